// Entry point: shows the current view in the chosen language and theme.
import { get } from "./api.js";
import { h, put } from "./dom.js";
import { button } from "./fields.js";
import { gloss, learn } from "./glossary.js";
import { nextLesson, showLesson } from "./lessons.js";
import { Page } from "./page.js";
import { savePng, saveSvg } from "./save.js";
import { linkTo, read, state } from "./state.js";
import { GROUPS, VIEWS, named } from "./views.js";
import { LANGUAGES, preferred, speak, t } from "./words.js";

const at = (id) => document.getElementById(id);
const NOTHING = { version: null, models: [], tasks: [], runs: false, samples: {} };
let about = null; // what is loaded; null until the server has said it
let page = null;
let turns = 0; // views shown so far

/** Shows the view in the URL; moves the focus to it, or back to the field `keep`. */
async function show({ focus = false, keep = null } = {}) {
  const { name, values } = read();
  const mine = (turns += 1);
  page?.close();
  state.lesson = values.lesson ?? null;
  await dress(values);
  const taught = !about || (await showLesson(at("lesson"), about)); // before the view: it would push it down
  if (mine !== turns) return; // another address came meanwhile
  const view = named(name) ?? VIEWS[0];
  const found = about ?? NOTHING;
  at("view").classList.remove("stale");
  put(at("notice"));
  page = new Page(view, found, values, { status: at("status"), notice: at("notice"), shown: at("view") });
  page.rebuild = () => show({ keep: document.activeElement?.id });
  page.reload = reload;
  page.ready = () => at("saves").toggleAttribute("hidden", false);
  at("saves").toggleAttribute("hidden", true);
  page.say("");
  title(view.name);
  if (name && name !== view.name) page.warn(t("link.view", { name, used: t(`${view.name}.name`) }));
  if (!taught) page.warn(t("link.lesson", { number: values.lesson }));
  const served = page.models.length || view.alone?.(found);
  put(at("view"), served ? page.elements() : about && missing(view.name));
  if (focus) at("main").focus({ preventScroll: true });
  if (keep) document.getElementById(keep)?.focus();
  if (served && !view.waits) await page.run();
}

/** Requests the loaded models and shows the view again. */
async function reload() {
  try {
    about = await get("studio/about");
  } catch (error) {
    return page.fail(error);
  }
  furnish();
  await show({ keep: document.activeElement?.id });
}

/** The language and the theme in the URL. */
async function dress({ lang, theme }) {
  if (["light", "dark"].includes(theme)) light(theme);
  if (LANGUAGES.includes(lang) && lang !== state.lang) await talk(lang);
}

async function talk(language) {
  await Promise.all([speak(language), learn(language)]);
  state.lang = language;
  furnish();
}

function title(known) {
  at("title").textContent = t(`${known}.title`);
  put(at("lead"), gloss(t(`${known}.lead`)));
  document.title = `${t(`${known}.title`)} · Malmoi`;
  mark(known);
}

function mark(known) {
  for (const link of at("views").querySelectorAll("a")) {
    const here = link.dataset.view === known;
    link.toggleAttribute("aria-current", here);
    if (here) link.setAttribute("aria-current", "page");
    if (here && matchMedia("(max-width: 760px)").matches) link.scrollIntoView({ inline: "center", block: "nearest" });
  }
}

/** Shown when no loaded model supports the view: which model to load. */
function missing(name) {
  const loaded = about.models.map((model) => model.name).join(", ") || "–";
  return h(
    "section",
    { class: "card empty" },
    h("h2", {}, t(named(name).missing ?? "missing")),
    h("p", {}, t(`${name}.need`)),
    h("p", { class: "note" }, t("loaded", { names: loaded })),
    h("pre", {}, h("code", {}, t(`${name}.command`))),
  );
}

function furnish() {
  at("skip").textContent = t("skip");
  at("views").setAttribute("aria-label", t("views"));
  const entry = ({ name }) => h("li", {}, h("a", { href: `#/${name}`, "data-view": name }, t(`${name}.name`)));
  const group = ([name, views]) => [
    h("p", { id: `group-${name}` }, t(`group.${name}`)),
    h("ul", { "aria-labelledby": `group-${name}` }, views.map(entry)),
  ];
  put(at("views"), h("div", {}, Object.entries(GROUPS).flatMap(group)));
  put(at("hour"), t("hour.name"));
  put(
    at("saves"),
    button(t("view.svg"), () => saveSvg(at("view"), page.view.name), { class: "quiet" }),
    button(t("view.png"), () => savePng(at("view"), page.view.name), { class: "quiet" }),
  );
  at("language").textContent = t("language");
  at("language").lang = state.lang === "ko" ? "en" : "ko";
  at("theme").textContent = t(dark() ? "theme.light" : "theme.dark");
}

/** Links include the sentence, the model, the language and the theme, so they are computed when used. */
function carry(event) {
  const link = event.target.closest?.("a[data-view]");
  if (link && about) link.setAttribute("href", linkTo(named(link.dataset.view), about));
}

const dark = () =>
  (state.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

function light(theme) {
  state.theme = theme;
  document.documentElement.dataset.theme = theme;
  at("theme").textContent = t(dark() ? "theme.light" : "theme.dark");
}

/** Shows the view again; settings that the user has not changed follow the language. */
async function anew() {
  const changed = Object.entries(page.values).filter(([name, value]) => value !== page.defaults[name]);
  history.replaceState(null, "", linkTo(page.view, about ?? page.about, Object.fromEntries(changed)));
  await show();
}

at("language").addEventListener("click", async () => {
  await talk(state.lang === "ko" ? "en" : "ko");
  localStorage.setItem("malmoi.language", state.lang);
  await anew();
});
at("theme").addEventListener("click", async () => {
  light(dark() ? "light" : "dark");
  localStorage.setItem("malmoi.theme", state.theme);
  await anew(); // thumbnails are drawn in the theme's colours
});
at("hour").addEventListener("click", async () => about && (location.hash = await nextLesson(about)));
at("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address says which view is shown
  at("main").focus();
});
for (const kind of ["pointerover", "focusin", "click"]) document.addEventListener(kind, carry, true);
window.addEventListener("hashchange", () => show({ focus: true }));

const theme = localStorage.getItem("malmoi.theme");
if (["light", "dark"].includes(theme)) light(theme);
const asked = read().values.lang;
state.lang = LANGUAGES.includes(asked) ? asked : preferred();
const [found] = await Promise.allSettled([get("studio/about"), speak(state.lang), learn(state.lang)]);
if (found.status === "fulfilled") about = found.value;
furnish();
await show();
if (!about) page.fail(found.reason);

// The studio: which view is shown, in which language and light.
import { read } from "./address.js";
import { get } from "./api.js";
import { h, put } from "./dom.js";
import { Page } from "./page.js";
import { preferred, speak, t } from "./words.js";

const NAMES = ["generate", "fill", "labels", "attention", "patterns", "lens", "translation", "tokens", "shots", "train", "embeddings", "beside"];
const at = (id) => document.getElementById(id);
let about = { models: [], tasks: [], runs: false };
let page = null;

/** Shows the view that the address names; `focus` goes there, or back to the field called `keep`. */
async function show({ focus = false, keep = null } = {}) {
  const { name, values } = read();
  const known = NAMES.includes(name) ? name : NAMES[0];
  const { default: view } = await import(`./views/${known}.js`);
  page?.close();
  page = new Page(view, about, values, { status: at("status"), shown: at("view") });
  at("view").classList.remove("stale");
  page.rebuild = () => show({ keep: document.activeElement?.id });
  page.say("");
  title(known);
  const served = page.models.length || view.alone?.(about);
  put(at("view"), served ? view.build(page) : missing(known));
  if (focus) at("main").focus({ preventScroll: true });
  if (keep) document.getElementById(keep)?.focus();
  if (served && !view.waits) await page.run();
}

function title(known) {
  at("title").textContent = t(`${known}.title`);
  at("lead").textContent = t(`${known}.lead`);
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

/** What to load, where nothing that is loaded can do this. */
function missing(name) {
  const loaded = about.models.map((model) => model.name).join(", ") || "–";
  return h(
    "section",
    { class: "card empty" },
    h("h2", {}, t("missing")),
    h("p", {}, t(`${name}.need`)),
    h("p", { class: "note" }, t("loaded", { names: loaded })),
    h("pre", {}, h("code", {}, t(`${name}.command`))),
  );
}

function furnish() {
  at("skip").textContent = t("skip");
  at("views").setAttribute("aria-label", t("views"));
  put(
    at("views"),
    h(
      "ul",
      {},
      NAMES.map((name) => h("li", {}, h("a", { href: `#/${name}`, "data-view": name }, t(`${name}.name`)))),
    ),
  );
  at("language").textContent = t("language");
  at("language").lang = document.documentElement.lang === "ko" ? "en" : "ko";
  at("theme").textContent = t(dark() ? "theme.light" : "theme.dark");
}

const dark = () =>
  (document.documentElement.dataset.theme ??
    (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

function light(theme) {
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
}

async function turn(language) {
  localStorage.setItem("malmoi.language", language);
  await speak(language);
  furnish();
  await show();
}

at("language").addEventListener("click", () => turn(document.documentElement.lang === "ko" ? "en" : "ko"));
at("theme").addEventListener("click", () => {
  light(dark() ? "light" : "dark");
  localStorage.setItem("malmoi.theme", document.documentElement.dataset.theme);
  furnish();
  show();
});
at("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address says which view is shown
  at("main").focus();
});
window.addEventListener("hashchange", () => show({ focus: true }));

light(localStorage.getItem("malmoi.theme"));
const [found] = await Promise.allSettled([get("studio/about"), speak(preferred())]);
furnish();
if (found.status === "fulfilled") about = found.value;
await show();
if (found.status === "rejected") page.fail(found.reason);

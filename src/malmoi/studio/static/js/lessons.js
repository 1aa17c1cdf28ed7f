// The guided hour: a panel above the view with a text, a question and its answer. The URL holds the lesson.
import { get } from "./api.js";
import { h, put } from "./dom.js";
import { button } from "./fields.js";
import { gloss } from "./glossary.js";
import { languageFor, linkTo, modelsFor, state, usable } from "./state.js";
import { named } from "./views.js";
import { t } from "./words.js";

const KINDS = { causal: (model) => model.causal, masked: (model) => model.mask && model.can.includes("fill"), tuned: (model) => model.head && !model.causal };
const loaded = {}; // by language

const lessons = async () => (loaded[state.lang] ??= await get(`lessons/${state.lang}.json`));

/** The URL of a lesson: its view with its values, and its sentence in a language that the model knows. */
function place(lesson, number, about) {
  const views = lesson.views.map(named).filter(Boolean);
  const view = views.find((one) => modelsFor(one, about).length || one.alone?.(about)) ?? views[0];
  const fits = KINDS[lesson.kind] ?? (() => true);
  const model = modelsFor(view, about).find(fits) ?? usable(view, about);
  const other = modelsFor(view, about).find((one) => one !== model && KINDS[lesson.compare]?.(one));
  const language = languageFor(model);
  const said = (value) => (typeof value === "string" ? value : value[language]);
  const values = Object.fromEntries(Object.entries(lesson.values).map(([name, value]) => [name, said(value)]));
  const text = lesson.text ? { text: lesson.text[language] } : {};
  const models = { ...(model ? { model: model.name } : {}), compare: other?.name ?? "" };
  return linkTo(view, about, { ...values, ...text, ...models, lesson: String(number) });
}

/** Shows the lesson in the URL, if there is one. */
export async function showLesson(node, about) {
  const number = Number(state.lesson);
  const all = number ? await lessons() : [];
  const lesson = all[number - 1];
  node.toggleAttribute("hidden", !lesson);
  if (!lesson) return put(node);
  const go = (to) => () => (location.hash = place(all[to - 1], to, about));
  const dot = (one, i) => {
    const here = i + 1 === number ? "step" : null;
    return h("li", {}, h("a", { href: place(one, i + 1, about), title: one.title, "aria-label": `${i + 1}. ${one.title}`, "aria-current": here }));
  };
  const close = () => {
    state.lesson = null;
    node.toggleAttribute("hidden", true);
    const rest = new URLSearchParams(location.hash.split("?")[1]);
    rest.delete("lesson");
    history.replaceState(null, "", `${location.hash.split("?")[0]}?${rest}`);
  };
  return put(
    node,
    h(
      "div",
      { class: "row" },
      h("p", { class: "count" }, t("hour.count", { number, all: all.length })),
      h("ol", { class: "dots" }, all.map(dot)),
      button(t("hour.close"), close, { class: "quiet" }),
    ),
    h("p", { class: "topic" }, lesson.title),
    h("p", {}, gloss(lesson.say)),
    h("p", { class: "ask" }, lesson.ask),
    h("details", {}, h("summary", {}, t("hour.reveal")), h("p", {}, gloss(lesson.reveal))),
    h(
      "div",
      { class: "row" },
      number > 1 && button(t("hour.back"), go(number - 1), { class: "quiet" }),
      number < all.length && button(t("hour.next"), go(number + 1)),
    ),
  );
}

/** The URL of the first lesson. */
export const firstLesson = async (about) => place((await lessons())[0], 1, about);

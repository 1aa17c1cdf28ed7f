// The guided hour: a panel above the view with a text, a question to answer first, and what the loaded model says to it.
// A lesson is a record (lessons/hour.json: views, settings, the claim that is computed) and words (lessons/en.json, ko.json).
import { get, post } from "./api.js";
import { h, put } from "./dom.js";
import { button } from "./fields.js";
import { gloss } from "./glossary.js";
import { bars, table } from "./parts.js";
import { chart } from "./pictures/chart.js";
import { fit } from "./pictures/fit.js";
import { languageFor, linkTo, modelsFor, read, state, usable } from "./state.js";
import { named } from "./views.js";
import { refusal, spell, t } from "./words.js";

const KINDS = {
  causal: (model) => model.causal && model.can.includes("score"),
  masked: (model) => model.mask && model.can.includes("fill"),
  next_sentence: (model) => model.next_sentence,
  tuned: (model) => model.head && !model.causal,
};
const PROGRESS = "malmoi.hour"; // in the browser's storage: by lesson, what was picked and what was right
const loaded = {}; // by language
let folded = 0; // the lesson whose text is folded away, to have its view on the screen
const claims = {}; // by claim, models and language: they do not change

/** What was answered so far, by lesson: {picked, answer, values, model}. */
export function progress() {
  try {
    return JSON.parse(localStorage.getItem(PROGRESS)) ?? {};
  } catch {
    return {}; // another program's
  }
}

const keep = (id, answered) => localStorage.setItem(PROGRESS, JSON.stringify({ ...progress(), [id]: answered }));
export const forget = () => localStorage.removeItem(PROGRESS);

/** Every lesson, its record and its words in one. */
export async function lessons() {
  const [records, words] = await Promise.all(["hour", state.lang].map((name) => (loaded[name] ??= get(`lessons/${name}.json`))));
  return records.map((record) => ({ ...record, ...words[record.id] }));
}

/** The models that a lesson is about: the shown one if it can carry it, else the first that can; never another one. */
export function cast(lesson, about) {
  const fits = KINDS[lesson.kind] ?? ((model) => model.tokenizer);
  const beside = KINDS[lesson.compare] ?? (() => false);
  const shown = about.models.find(({ name }) => name === read().values.model);
  const model = [shown, ...about.models].find((one) => one && fits(one));
  const other = about.models.find((one) => one !== model && beside(one));
  return { model, other, able: Boolean(model && (!lesson.both || other || beside(model))) };
}

/** The URL of a lesson: its view with its values, and its sentence in a language that the model knows. */
export function place(lesson, number, about) {
  const views = lesson.views.map(named);
  const view = views.find((one) => modelsFor(one, about).length || one.alone?.(about)) ?? views[0];
  const { model: wanted, other, able: carried } = cast(lesson, about);
  const able = modelsFor(view, about);
  const model = able.includes(wanted) ? wanted : usable(view, about);
  const language = languageFor(model);
  const said = (value) => (typeof value === "string" ? value : value[language]);
  const values = Object.fromEntries(Object.entries(lesson.values).map(([name, value]) => [name, said(value)]));
  const text = lesson.text ? { text: lesson.text[language] } : {};
  const models = { ...(model ? { model: model.name } : {}), compare: carried && able.includes(other) ? other.name : "" };
  return linkTo(view, about, { ...values, ...text, ...models, lesson: String(number) });
}

/** The lesson's claim, computed by the server from the models that carry it. */
export function claimOf(lesson, about) {
  const { model, other } = cast(lesson, about);
  const body = { claim: lesson.claim, model: model.name, other: other?.name ?? null, language: languageFor(model) };
  const key = JSON.stringify(body);
  claims[key] ??= post("studio/claims", body).catch((error) => {
    delete claims[key]; // the next try may succeed
    throw error;
  });
  return claims[key];
}

/** The names of the models that the claim is about: of one unless the lesson says two, or none. */
function computedFrom(lesson, about) {
  const { model, other } = cast(lesson, about);
  return [model, other].slice(0, lesson.models ?? 1).flatMap((one) => one?.name ?? []).join(", ");
}

/** Shows the lesson in the URL, if there is one; returns whether the URL names a lesson that there is. */
export async function showLesson(node, about) {
  const number = Number(state.lesson);
  const all = state.lesson ? await lessons() : [];
  const lesson = all[number - 1];
  node.toggleAttribute("hidden", !lesson);
  if (!lesson) {
    put(node);
    return !state.lesson;
  }
  const go = (to) => () => (location.hash = place(all[to - 1], to, about));
  const answered = progress();
  const dot = (one, i) => {
    const here = i + 1 === number ? "step" : null;
    const done = answered[one.id] ? ` (${t("hour.done")})` : "";
    return h("li", {}, h("a", { href: place(one, i + 1, about), class: done && "done", title: one.title + done, "aria-label": `${i + 1}. ${one.title}${done}`, "aria-current": here }));
  };
  const close = () => {
    state.lesson = null;
    node.toggleAttribute("hidden", true);
    const rest = new URLSearchParams(location.hash.split("?")[1]);
    rest.delete("lesson");
    history.replaceState(null, "", `${location.hash.split("?")[0]}?${rest}`);
  };
  const fold = () => {
    folded = folded === number ? 0 : number;
    show();
  };
  const folder = button("", fold, { class: "quiet", "aria-controls": "lesson" });
  const show = () => {
    node.classList.toggle("folded", folded === number);
    folder.setAttribute("aria-expanded", String(folded !== number));
    put(folder, t(folded === number ? "hour.unfold" : "hour.fold"));
  };
  show();
  put(
    node,
    h(
      "div",
      { class: "row" },
      h("p", { class: "count" }, t("hour.count", { number, all: all.length })),
      h("ol", { class: "dots" }, all.map(dot)),
      h("span", { class: "ways" }, folder, button(t("hour.close"), close, { class: "quiet" })),
    ),
    h("p", { class: "topic" }, lesson.title),
    h("details", { class: "say", open: !matchMedia("(max-width: 760px)").matches }, h("summary", {}, t("hour.say")), h("p", {}, gloss(lesson.say))),
    question(lesson, about),
    h(
      "div",
      { class: "row" },
      number > 1 && button(t("hour.back"), go(number - 1), { class: "quiet" }),
      number < all.length
        ? button(t("hour.next"), go(number + 1))
        : button(t("hour.finish"), () => (location.hash = linkTo(named("hour"), about, { lesson: "" }))),
    ),
  );
  return true;
}

/** The question with its options, and below it what is true of this model once one is chosen. */
function question(lesson, about) {
  const { model, able } = cast(lesson, about);
  const asked = h("p", { class: "ask", id: "ask" }, lesson.ask);
  if (!able) return [asked, ...unable(lesson)];
  const said = h("div", { class: "outcome", "aria-live": "polite" });
  const choose = async (picked) => {
    for (const one of options.children) one.setAttribute("aria-pressed", String(one.dataset.option === picked));
    put(said, h("p", { class: "note" }, t("hour.computing", { model: model.name })));
    try {
      const claim = await claimOf(lesson, about);
      const names = computedFrom(lesson, about);
      keep(lesson.id, { picked, answer: claim.answer, values: claim.values, model: names });
      put(said, outcome(lesson, claim, picked, names));
    } catch (error) {
      put(said, h("p", { class: "wrong" }, refusal(error)));
    }
  };
  const option = ([name, words]) => button(words, () => choose(name), { class: "quiet", "aria-pressed": "false", "data-option": name });
  const options = h("div", { class: "chips options", role: "group", "aria-labelledby": "ask" }, Object.entries(lesson.options).map(option));
  const before = progress()[lesson.id];
  if (before) choose(before.picked);
  return [asked, options, said];
}

/** What is said when no loaded model can carry a lesson: which to load, and the text without numbers. */
const unable = (lesson) => [
  h("p", { class: "notice" }, t("hour.unable", { kind: t(`hour.kind.${lesson.both ? "both" : lesson.kind}`) })),
  h("pre", {}, h("code", {}, t("hour.command"))),
  h("details", {}, h("summary", {}, t("hour.reveal")), h("p", {}, gloss(lesson.reveal))),
];

/** Whether the choice was right, the claim in numbers, computed from these models if from any, and why. */
export function outcome(lesson, { answer, values, bars: shares }, picked, models) {
  const right = picked === answer;
  const wrong = t(models ? "hour.wrong" : "hour.wrong.always", { answer: lesson.options[answer] });
  const rows = Object.entries(shares).map(([name, share]) => ({ name: lesson.bars?.[name] ?? name, share }));
  return [
    h("p", { class: right ? "verdict good" : "verdict" }, right ? t("hour.right") : wrong),
    h("p", {}, spell(lesson.found[answer], values), " ", models && h("span", { class: "note" }, t("hour.computed", { models }))),
    rows.length ? bars(rows, null, { best: false }) : null,
    h("p", {}, gloss(lesson.reveal)),
    lesson.table ? table(lesson.table.head, lesson.table.rows, lesson.title) : null,
    lesson.figure ? figure(lesson.figure) : null,
  ];
}

/** Our own measurements, drawn as a line. */
function figure({ points, across, up, log }) {
  const node = h("div", { class: "figure" });
  const series = [{ name: t(`hour.axis.${up}`), points, hue: "var(--a)" }];
  fit(node, (width) => chart(series, { width, across: t(`hour.axis.${across}`), up: t(`hour.axis.${up}`), log, height: 220 }));
  return node;
}

/** The URL of the first lesson that is not answered yet, or of the summary when all are. */
export async function nextLesson(about) {
  const all = await lessons();
  const answered = progress();
  const open = all.findIndex((one) => !answered[one.id]);
  return open < 0 ? linkTo(named("hour"), about) : place(all[open], open + 1, about);
}

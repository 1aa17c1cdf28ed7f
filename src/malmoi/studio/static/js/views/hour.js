// The guided hour on one page: a summary of what was answered, to print or to share, and the teacher's page.
import { h, put } from "../dom.js";
import { button, card, check, row } from "../fields.js";
import { cast, claimOf, forget, lessons, place, progress } from "../lessons.js";
import { table } from "../parts.js";
import { address } from "../state.js";
import { spell, t } from "../words.js";

/** Answers in a link: lesson.picked.right for each, with ~ between them. */
const packed = (answered) => Object.entries(answered).map(([id, { picked, answer }]) => `${id}_${picked}_${answer}`).join("~");
const unpacked = (link) => Object.fromEntries(link.split("~").map((one) => one.split("_")).map(([id, picked, answer]) => [id, { picked, answer }]));

class Hour {
  constructor(page) {
    this.page = page;
    [this.score, this.list] = [h("p", { "aria-live": "polite" }), h("ol", { class: "hour" })];
    page.work = (signal) => this.read(signal);
  }

  get answered() {
    const { answers } = this.page.values;
    return answers ? unpacked(answers) : progress();
  }

  async read(signal) {
    const all = await lessons();
    const teacher = this.page.values.teacher === "yes";
    const { answered } = this;
    const done = all.filter((one) => answered[one.id]);
    const right = done.filter((one) => answered[one.id].picked === answered[one.id].answer).length;
    const minutes = all.reduce((sum, one) => sum + one.minutes, 0);
    put(this.score, teacher ? t("hour.minutes", { minutes, all: all.length }) : t("hour.score", { right, done: done.length, all: all.length }));
    const items = all.map((lesson, i) => this.item(lesson, i + 1, teacher ? null : answered[lesson.id]));
    put(this.list, items);
    if (teacher) this.solve(all, items, signal); // it takes a while: answers appear one after another
  }

  /** The answers to all lessons that the loaded models can carry. */
  async solve(all, items, signal) {
    for (const [i, lesson] of all.entries()) {
      if (signal.aborted) return;
      if (!cast(lesson, this.page.about).able) continue;
      const claim = await claimOf(lesson, this.page.about).catch(() => null);
      if (claim) items[i].append(...answer(lesson, claim));
    }
  }

  item(lesson, number, answered) {
    const { about } = this.page;
    const teacher = this.page.values.teacher === "yes";
    const { model, other, able } = cast(lesson, about);
    const names = [model, other].filter(Boolean).map(({ name }) => name).join(", ");
    const kind = lesson.both ? "both" : lesson.kind;
    const needs = kind ? t("hour.needs", { kind: t(`hour.kind.${kind}`) }) : t("hour.needs.none");
    const facts = [t("hour.long", { minutes: lesson.minutes }), needs, able ? t("hour.with", { names }) : t("hour.missing")];
    return h(
      "li",
      {},
      h("h3", {}, h("a", { href: place(lesson, number, about) }, lesson.title)),
      teacher ? h("p", { class: "note" }, facts.join(" · ")) : null,
      teacher ? h("p", {}, lesson.say) : null,
      teacher || answered ? h("p", { class: "ask" }, lesson.ask) : h("p", { class: "note" }, t("hour.open")),
      answered ? own(lesson, answered) : null,
    );
  }
}

/** What was picked, whether that was right, and the sentence about it. */
function own(lesson, { picked, answer: right, values, model }) {
  const good = picked === right;
  return [
    h("p", {}, h("b", { class: good ? "good" : "wrong" }, good ? "✓ " : "✗ "), lesson.options[picked] ?? picked, good ? "" : ` → ${lesson.options[right] ?? right}`),
    values && lesson.found[right] ? h("p", {}, spell(lesson.found[right], values), " ", model && t("hour.computed", { models: model })) : null,
    h("p", { class: "note" }, lesson.reveal),
  ];
}

/** For the teacher: all options, the right one marked, with the numbers of the loaded models. */
function answer(lesson, { answer: right, values }) {
  const option = ([name, words]) => h("li", { class: name === right ? "good" : null }, words, name === right ? " ✓" : "");
  return [
    h("ul", {}, Object.entries(lesson.options).map(option)),
    h("p", {}, spell(lesson.found[right], values)),
    h("p", { class: "note" }, lesson.reveal),
    ...(lesson.table ? [table(lesson.table.head, lesson.table.rows, lesson.title)] : []),
  ];
}

export default {
  name: "hour",
  compares: false, // it is about the lessons
  alone: () => true,
  defaults: () => ({ teacher: "no", answers: "" }),

  build(page) {
    const hour = new Hour(page);
    const share = async () => {
      const link = `${location.origin}${location.pathname}${address("hour", { answers: packed(hour.answered), lesson: "" })}`;
      await navigator.clipboard?.writeText(link).catch(() => {}); // not allowed everywhere: the address has it too
      location.hash = link.slice(link.indexOf("#"));
    };
    const again = () => {
      forget();
      page.set("answers", "");
      page.run();
    };
    const buttons = [
      button(t("hour.print"), () => window.print()),
      button(t("hour.share"), share, { class: "quiet" }),
      button(t("hour.again"), again, { class: "quiet" }),
    ];
    return [card(hour.score, row(check(page, "teacher")), h("div", { class: "row act" }, buttons)), card(hour.list)];
  },
};

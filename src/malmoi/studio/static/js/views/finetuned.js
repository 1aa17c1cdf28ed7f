// A fine-tuned model compared with less-trained ones: labels, spans or answers, and the words that decided.
import { post } from "../api.js";
import { h, put } from "../dom.js";
import { area, button, card, line, modelField, pick, row } from "../fields.js";
import { fixed, percent } from "../numbers.js";
import { bars, table } from "../parts.js";
import { fit } from "../pictures/fit.js";
import { strip } from "../pictures/strip.js";
import { t } from "../words.js";

const METHODS = ["leave-one-out", "gradient"];
const WORST = 8; // mistakes that are listed

/** The request and the rendering for each kind of head. */
const KINDS = {
  classify: {
    ask: async (name, page, signal, labels) => {
      const asked = labels ? { labels } : {};
      const [one] = (await post("v1/classify", { model: name, text: page.values.text, ...asked }, signal)).data;
      const held = one.labels ?? [one.label];
      const rows = Object.entries(one.scores).map(([label, share]) => ({ name: label, share, right: held.includes(label) }));
      return [h("h3", {}, held.join(", ") || t("finetuned.none")), bars(rows.sort((a, b) => b.share - a.share))];
    },
  },
  tag: {
    ask: async (name, page, signal) => {
      const [spans] = (await post("v1/ner", { model: name, text: page.values.text }, signal)).data;
      return [spans.length ? marked(page.values.text, spans) : h("p", { class: "note" }, t("finetuned.spans.none"))];
    },
  },
  span: {
    ask: async (name, page, signal) => {
      const { question, text } = page.values;
      const found = await post("v1/answer", { model: name, question, context: text }, signal);
      const span = { ...found, label: t("finetuned.answer") };
      if (found.start === null || !found.answer) return [h("p", {}, found.answer || t("finetuned.answer.none"))];
      return [h("h3", {}, found.answer), marked(text, [span])];
    },
  },
};

/** A text with some of its spans framed and named. */
function marked(text, spans) {
  let at = 0;
  const parts = spans.flatMap(({ start, end, label, score }) => {
    const before = text.slice(at, start);
    at = end;
    return [before, h("mark", { title: fixed(score) }, text.slice(start, end), h("small", {}, label))];
  });
  return h("p", { class: "text" }, parts, text.slice(at));
}

class Finetuned {
  constructor(page) {
    this.page = page;
    this.kind = KINDS[page.model.head];
    this.answers = h("div", { class: "pair", "aria-live": "polite" });
    [this.words, this.tested, this.row] = [h("div"), h("div"), h("div", { "aria-live": "polite" })];
    this.plot = h("div");
    page.work = (signal) => this.read(signal);
  }

  /** The chosen model, others of its kind, and pre-trained models, which are prompted. */
  get asked() {
    const { model } = this.page;
    if (this.page.values.compare) return [{ name: model.name, kind: "tuned" }];
    const same = (one) => one.head === model.head && one.labels.join("\n") === model.labels.join("\n");
    const others = this.page.about.models.filter((one) => one !== model);
    const tuned = others.filter(same).map((one) => ({ name: one.name, kind: "tuned" }));
    const inWords = { classify: "classify", span: "answer" }[model.head];
    const only = (one) => !one.head && inWords && one.can.includes(inWords) && model.labels.length !== 1 && one.knows.includes(model.knows[0]);
    const plain = others.filter(only).map((one) => ({ name: one.name, kind: model.head === "span" ? "answers" : "asked", labels: model.labels }));
    return [{ name: model.name, kind: "tuned" }, ...tuned, ...plain];
  }

  /** Whether each text has one label, so that a confusion matrix can be drawn. */
  get single() {
    return this.page.model.classifies && !this.page.model.several;
  }

  async read(signal) {
    const cards = this.asked.map(async ({ name, kind, labels }) => {
      const labelled = this.page.model.head === "classify" ? labels : null;
      const shown = await this.kind.ask(name, this.page, signal, labelled).catch((error) => {
        if (name === this.page.values.model || signal.aborted) throw error;
        return [h("p", { class: "note", lang: "en" }, error.message)];
      });
      return card(!this.page.values.compare && h("h2", {}, name), h("p", { class: "note" }, t(`finetuned.kind.${kind}`)), ...shown);
    });
    put(this.answers, await Promise.all(cards));
    if (this.page.model.head === "classify") await this.colour(signal);
    if (this.single && !this.tried) await this.judge(signal);
  }

  /** The words coloured by their attribution. */
  async colour(signal) {
    const { model, text, method } = this.page.values;
    const found = await post("studio/attributions", { model, text, method }, signal);
    const most = Math.max(1e-9, ...found.pieces.map((piece) => Math.abs(piece.score)));
    const shown = found.pieces.filter((piece) => piece.end > piece.start);
    let at = 0;
    const parts = shown.flatMap(({ text: name, start, end, score }) => {
      const before = text.slice(at, start);
      at = end;
      const given = { class: score > 0 ? "did" : "did not", style: { "--p": String(Math.abs(score) / most) }, title: `${name}: ${fixed(score, 4)}` };
      return [before, h("span", given, text.slice(start, end))];
    });
    const rows = found.pieces.map((piece) => [piece.text, fixed(piece.score, 4)]);
    const said = { label: found.target, share: percent(found.probability) };
    put(
      this.words,
      h("p", {}, t("finetuned.for", said)),
      h("p", { class: "text" }, parts, text.slice(at)),
      h("p", { class: "note" }, t(`finetuned.${method}`)),
      h("details", {}, h("summary", {}, t("numbers")), table([t("finetuned.word"), t("finetuned.score")], rows)),
    );
  }

  /** The test rows: confusion matrix, one dot per row, and the worst mistakes. */
  async judge(signal) {
    this.tried = true;
    const { model } = this.page.values;
    const { labels, confusion, rows } = await post("studio/tested", { model }, signal);
    if (!rows.length) return put(this.tested, h("p", { class: "note" }, t("finetuned.untested")));
    const right = rows.filter((one) => one.prediction === one.label).length;
    const missed = rows.filter((one) => one.prediction !== one.label).slice(0, WORST);
    const label = t("finetuned.dots", { right, count: rows.length });
    put(
      this.tested,
      h("p", {}, label),
      this.plot,
      this.row,
      h("h3", {}, t("finetuned.confusion")),
      matrix(labels, confusion),
      h("h3", {}, t("finetuned.worst")),
      h("ul", { class: "worst" }, missed.map((one) => h("li", {}, this.one(one)))),
    );
    fit(this.plot, (width) => strip(labels, rows, { width, label, choose: (one) => put(this.row, this.one(one)) }));
  }

  one(found) {
    const said = { label: found.label, prediction: found.prediction, share: percent(found.chance) };
    return h(
      "div",
      { class: "tried" },
      h("p", {}, found.text),
      h("p", { class: "note" }, t(found.label === found.prediction ? "finetuned.hit" : "finetuned.miss", said)),
      button(t("finetuned.use"), () => this.use(found.text), { class: "quiet" }),
    );
  }

  use(text) {
    const control = document.getElementById("field-text");
    control.value = text;
    this.page.changed("text", text);
    control.scrollIntoView({ block: "center" });
  }
}

/** How often each label (row) was predicted as each (column). */
function matrix(labels, counts) {
  const shade = (row, value) => ({ style: { "--p": String(value / Math.max(1, ...row)) } });
  const body = counts.map((row, i) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, labels[i]),
      row.map((value, k) => h("td", { class: i === k ? "hit" : "miss", ...shade(row, value) }, String(value))),
    ),
  );
  const head = h("tr", {}, h("td", {}, t("finetuned.axes")), labels.map((name) => h("th", { scope: "col" }, name)));
  const label = t("finetuned.confusion");
  return h(
    "div",
    { class: "wide", tabindex: "0", role: "group", "aria-label": label },
    h("table", { class: "confusion" }, h("thead", {}, head), h("tbody", {}, body)),
  );
}

export default {
  name: "finetuned",
  needs: (model) => model.head in KINDS,
  defaults: () => ({ text: "", question: t("finetuned.question"), method: METHODS[0] }),

  build(page) {
    const view = new Finetuned(page);
    const methods = METHODS.map((name) => [name, t(`attribution.${name}`)]);
    const question = page.some(({ head }) => head === "span") && line(page, "question");
    const labelled = page.model.head === "classify";
    const method = page.some(({ head }) => head === "classify") && pick(page, "method", methods);
    return [
      card(area(page, "text", 3), row(modelField(page), question, method)),
      view.answers,
      labelled && card(h("h2", {}, t("finetuned.why")), view.words),
      view.single && card(h("h2", {}, t("finetuned.tested")), view.tested),
    ];
  },
};

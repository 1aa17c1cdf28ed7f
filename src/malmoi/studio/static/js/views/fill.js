// A BERT's predictions for each hidden word.
import { post } from "../api.js";
import { h, put } from "../dom.js";
import { area, button, card, modelField, range, row } from "../fields.js";
import { bars } from "../parts.js";
import { t } from "../words.js";

const WORD = /[\p{L}\p{N}]+(?:['’-][\p{L}\p{N}]+)*/gu;

/** The sentence and its hidden words: the chosen ones, else the last. Masks may be typed too. */
export class Gaps {
  constructor(page) {
    this.page = page;
    this.chips = h("div", { class: "chips", role: "group", "aria-label": t("fill.words"), lang: "" });
    this.furnish();
  }

  get typed() {
    return this.page.values.text.includes(this.page.model.mask);
  }

  get words() {
    return this.typed ? [] : [...this.page.values.text.matchAll(WORD)];
  }

  get hidden() {
    const { words } = this;
    const chosen = this.page.values.gaps.split(" ").filter((number) => words[number - 1]);
    return chosen.length || !words.length ? chosen.map(Number) : [words.length];
  }

  /** The model's input. */
  get text() {
    const { words, hidden } = this;
    return words.reduceRight((text, word, i) => {
      if (!hidden.includes(i + 1)) return text;
      return text.slice(0, word.index) + this.page.model.mask + text.slice(word.index + word[0].length);
    }, this.page.values.text);
  }

  furnish() {
    const { words, hidden } = this;
    const chip = ([word], i) =>
      button(word, () => this.toggle(i + 1), { class: "quiet", "aria-pressed": String(hidden.includes(i + 1)) });
    put(this.chips, words.map(chip));
  }

  toggle(number) {
    const { hidden } = this;
    const rest = hidden.filter((one) => one !== number);
    this.page.changed("gaps", (rest.length < hidden.length ? rest : [...hidden, number]).sort((a, b) => a - b).join(" "));
    this.furnish();
    this.chips.children[number - 1].focus();
  }
}

export default {
  name: "fill",
  needs: (model) => model.can.includes("fill") && model.mask,
  defaults: () => ({ text: "", gaps: "", top: "5" }),

  build(page) {
    const found = h("div", { class: "pair" });
    const gaps = new Gaps(page);
    const write = (words) => {
      document.getElementById("field-text").value = words;
      page.set("text", words);
      page.run();
    };
    page.work = async (signal) => {
      gaps.furnish();
      const right = gaps.hidden.map((number) => gaps.words[number - 1][0]);
      const body = { model: page.values.model, text: gaps.text, top: page.number("top", 1, 50) };
      const masks = (await post("v1/fill", body, signal)).fills;
      put(found, masks.map((fills, i) => gap(fills, i, right[i])));
    };
    const gap = (fills, i, right) =>
      card(
        h("h2", {}, right ? t("fill.hidden", { word: right }) : t("fill.mask", { number: i + 1 })),
        bars(
          fills.map((one) => ({ ...{ name: one.token, share: one.probability, text: one.text }, right: one.token === right })),
          (chosen) => write(chosen.text),
        ),
      );
    return [
      card(
        area(page, "text", 2),
        h("p", { class: "note" }, t("fill.hide")),
        gaps.chips,
        row(modelField(page), range(page, "top", { min: 1, max: 20, step: 1 })),
      ),
      found,
      h("p", { class: "note" }, t("fill.hint")),
    ];
  },
};

// Who looks at whom: every head small, one head large, as lines or as a matrix.
import { post } from "../api.js";
import { h, put } from "../dom.js";
import { area, button, card, check, line, modelField, pick, row } from "../fields.js";
import { fixed } from "../numbers.js";
import { table } from "../parts.js";
import { headGrid } from "../pictures/grid.js";
import { lines } from "../pictures/lines.js";
import { matrix } from "../pictures/matrix.js";
import { savePng, saveSvg } from "../save.js";
import { t } from "../words.js";

const PICTURES = { lines, matrix };

class Looks {
  constructor(page) {
    this.page = page;
    [this.large, this.small, this.numbers] = [h("div"), h("div"), h("div")];
    page.work = (signal) => this.read(signal);
  }

  async read(signal) {
    const { model, text, pair, words } = this.page.values;
    const second = this.page.model.causal ? null : pair || null;
    this.seen = await post("studio/attention", { model, text, pair: second, words: words === "yes" }, signal);
    this.draw();
  }

  /** Which head is shown large: [layer, head], counted from 0. */
  get place() {
    const { weights } = this.seen;
    return [this.page.number("layer", 1, weights.length) - 1, this.page.number("head", 1, weights[0].length) - 1];
  }

  draw() {
    const { names, weights } = this.seen;
    const [layer, head] = this.place;
    const shown = weights[layer][head];
    const label = t("attention.one", { layer: layer + 1, head: head + 1 });
    const picture = PICTURES[this.page.values.picture] ?? lines;
    put(this.large, h("h2", {}, label), picture(names, shown, label));
    put(
      this.small,
      h("h2", {}, t("attention.all")),
      headGrid(weights, this.place, (...place) => this.choose(...place)),
    );
    const rows = shown.map((values, i) => [names[i], ...values.map((value) => fixed(value))]);
    put(this.numbers, table([t("attention.from"), ...names], rows));
  }

  choose(layer, head) {
    this.page.set("layer", layer + 1);
    this.page.set("head", head + 1);
    this.draw();
  }

  save(how) {
    const [layer, head] = this.place;
    return how(this.large.querySelector("svg"), `attention-${layer + 1}-${head + 1}`);
  }

  saves() {
    return row(
      button(t("save.svg"), () => this.save(saveSvg), { class: "quiet" }),
      button(t("save.png"), () => this.save(savePng), { class: "quiet" }),
    );
  }
}

export default {
  name: "attention",
  needs: (model) => model.tokenizer && !model.can.includes("cross_attention"),
  defaults: () => ({ text: "", pair: "", words: "no", layer: "1", head: "1", picture: "lines" }),

  build(page) {
    const looks = new Looks(page);
    const pictures = Object.keys(PICTURES).map((name) => [name, t(`picture.${name}`)]);
    const second = page.model.causal ? null : line(page, "pair");
    return [
      card(area(page, "text", 2), row(modelField(page), second, pick(page, "picture", pictures), check(page, "words"))),
      h("div", { class: "pair" }, card(looks.large, looks.saves()), card(looks.small)),
      h("details", { class: "card" }, h("summary", {}, t("numbers")), looks.numbers),
    ];
  },
};

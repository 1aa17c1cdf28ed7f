// The prediction of each layer as if it were the last.
import { post } from "../api.js";
import { h, put } from "../dom.js";
import { area, card, modelField, reading, readingField, row } from "../fields.js";
import { percent } from "../numbers.js";
import { bars, visible } from "../parts.js";
import { t } from "../words.js";

const TOP = 8;
const named = (layer) => (layer ? t("lens.layer", { layer }) : t("lens.embedding"));

class Lens {
  constructor(page) {
    this.page = page;
    this.grid = h("div", { class: "wide", tabindex: "0", role: "group", "aria-label": t("lens.title") });
    this.panel = h("div", { "aria-live": "polite" });
    page.work = (signal) => this.read(signal);
  }

  async read(signal) {
    const { model, text } = this.page.values;
    this.seen = await post("studio/lens", { model, text, top: TOP, ...reading(this.page) }, signal);
    this.cells = this.seen.layers.map((places, layer) => places.map((_, place) => this.cell(layer, place)));
    const row = (cells, layer) =>
      h(
        "tr",
        {},
        h("th", { scope: "row" }, named(layer)),
        cells.map((cell) => h("td", {}, cell)),
      );
    const head = this.seen.tokens.map((token) => h("th", { scope: "col" }, visible(token)));
    const body = this.cells.map(row).reverse(); // the last layer on top
    put(this.grid, h("table", { class: "lens" }, h("thead", {}, h("tr", {}, h("td"), head)), h("tbody", {}, body)));
    this.open(this.cells.length - 1, head.length - 1);
  }

  cell(layer, place) {
    const [best] = this.seen.layers[layer][place];
    const given = { type: "button", "aria-expanded": "false", title: percent(best.probability) };
    const style = { "--p": String(best.probability) };
    return h("button", { ...given, style, onclick: () => this.open(layer, place) }, visible(best.text));
  }

  open(layer, place) {
    const chosen = this.cells[layer][place];
    this.cells.flat().forEach((cell) => cell.setAttribute("aria-expanded", String(cell === chosen)));
    const title = t("lens.cell", { layer: named(layer), token: visible(this.seen.tokens[place]) });
    const guesses = this.seen.layers[layer][place].map(({ text, probability }) => ({ name: text, share: probability }));
    put(this.panel, h("h2", {}, title), bars(guesses));
  }
}

export default {
  name: "lens",
  needs: (model) => model.can.includes("logits"),
  defaults: () => ({ text: "", reading: "causal" }),

  build(page) {
    const lens = new Lens(page);
    const hint = h("p", { class: "note" }, t("lens.hint"));
    return [card(area(page, "text", 2), row(modelField(page), readingField(page))), card(lens.grid, hint), card(lens.panel)];
  },
};

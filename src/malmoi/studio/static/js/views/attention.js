// Attention: thumbnails of every head, and one head large as lines or as a matrix.
import { post } from "../api.js";
import { h, put } from "../dom.js";
import { area, button, card, check, line, modelField, pick, reading, readingField, row } from "../fields.js";
import { fixed } from "../numbers.js";
import { table, visible } from "../parts.js";
import { fit } from "../pictures/fit.js";
import { HeadGrid } from "../pictures/grid.js";
import { lines } from "../pictures/lines.js";
import { matrix } from "../pictures/matrix.js";
import { savePng, saveSvg } from "../save.js";
import { t } from "../words.js";

const PICTURES = { lines, matrix };
const READABLE = 64; // tokens up to which the numbers are written before anyone asks

class Looks {
  constructor(page) {
    this.page = page;
    [this.large, this.small, this.numbers] = [h("div"), h("div"), h("div")];
    this.details = h("details", { class: "card", ontoggle: () => this.write() }, h("summary", {}, t("numbers")), this.numbers);
    page.work = (signal) => this.read(signal);
  }

  /** The head that is shown large: [layer, head], counted from 0. */
  get place() {
    const { depth, heads } = this.page.model;
    return [this.page.number("layer", 1, depth) - 1, this.page.number("head", 1, heads) - 1];
  }

  async read(signal) {
    const { model, text, pair, words } = this.page.values;
    const [layer, head] = this.place;
    const second = this.page.model.causal ? null : pair || null;
    const body = { model, text, pair: second, words: words === "yes", layer, head, ...reading(this.page) };
    this.seen = await post("studio/attention", body, signal);
    this.draw();
  }

  draw() {
    const { names, weights, small, thumbnails } = this.seen;
    const [layer, head] = this.place;
    const label = t("attention.one", { layer: layer + 1, head: head + 1 });
    const picture = PICTURES[this.page.values.picture] ?? lines;
    const holder = h("div");
    put(this.large, h("h2", {}, label), holder, this.saves());
    fit(holder, (width) => picture(names, weights, label, width));
    const told = JSON.stringify(thumbnails);
    if (told !== this.drawn) {
      this.drawn = told;
      this.grid = new HeadGrid(thumbnails, small, (...place) => this.choose(...place));
      put(this.small, h("h2", {}, t("attention.all")), this.grid.node);
    }
    this.grid.select(layer, head);
    put(this.numbers);
    if (names.length <= READABLE) this.write();
  }

  /** Builds the table of a long text only on request. */
  write() {
    const { names, weights } = this.seen ?? { names: [] };
    if (!names.length || (names.length > READABLE && !this.details.open)) return;
    const rows = weights.map((values, i) => [visible(names[i]), ...values.map((value) => fixed(value))]);
    put(this.numbers, table([t("attention.from"), ...names.map(visible)], rows));
  }

  choose(layer, head) {
    this.page.set("layer", layer + 1);
    this.page.set("head", head + 1);
    this.grid.select(layer, head);
    this.page.run();
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
  defaults: () => ({ text: "", pair: "", words: "no", reading: "masked", layer: "1", head: "1", picture: "lines" }),

  build(page) {
    const looks = new Looks(page);
    const pictures = Object.keys(PICTURES).map((name) => [name, t(`picture.${name}`)]);
    const second = page.some((model) => !model.causal) && line(page, "pair");
    return [
      card(area(page, "text", 2), row(modelField(page), second, readingField(page), pick(page, "picture", pictures), check(page, "words"))),
      h("div", { class: "pair" }, card(looks.large), card(looks.small)),
      looks.details,
    ];
  },
};

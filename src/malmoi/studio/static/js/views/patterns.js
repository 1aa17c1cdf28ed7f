// Attention patterns drawn from their predicate, with their cost.
import { post } from "../api.js";
import { h, put } from "../dom.js";
import { button, card, line, range, row } from "../fields.js";
import { bytes, percent, whole } from "../numbers.js";
import { bars, facts, maskPicture } from "../parts.js";
import { t } from "../words.js";

const KNOWN = {
  full: "full",
  causal: "causal",
  banded: "causal & local:8",
  strided: "causal & strided:8",
  fixed: "causal & fixed:8,2",
  prefix: "causal | prefix:8",
  two: "causal & local:8 ; causal & column:8",
};

class Patterns {
  constructor(page) {
    this.page = page;
    this.typed = line(page, "pattern", { class: "mono" });
    this.chips = h("div", { class: "chips", role: "group", "aria-label": t("patterns.known") });
    [this.found, this.others] = [h("div"), card()];
    page.work = (signal) => this.read(signal);
    this.furnish();
  }

  /** Chips of the known patterns, and of those that the loaded models use. */
  furnish() {
    const known = Object.entries(KNOWN).map(([name, text]) => [t(`pattern.${name}`), text]);
    const used = this.page.about.models.flatMap((model) =>
      [...new Set(model.attention)].map((text) => [`${model.name}: ${text}`, text]),
    );
    const chip = ([name, text]) => {
      const pressed = String(text === this.page.values.pattern);
      return button(name, () => this.choose(text), { class: "quiet", "aria-pressed": pressed });
    };
    put(this.chips, [...known, ...used].map(chip));
  }

  choose(text) {
    this.typed.querySelector("input").value = text;
    this.page.set("pattern", text);
    this.page.run();
  }

  async read(signal) {
    this.furnish();
    const { page } = this;
    const [length, heads] = [page.number("drawn", 4, 64), page.number("heads", 1, 96)];
    const { pattern } = page.values;
    const others = Object.entries(KNOWN).filter(([, text]) => text !== pattern);
    const body = { pattern, length, at: 2 ** page.number("at", 6, 12), heads, others: others.map(([, text]) => text) };
    const drawn = await post("studio/pattern", body, signal);
    this.draw(drawn);
    const rows = others.map(([name], i) => ({ name: t(`pattern.${name}`), share: drawn.others[i] }));
    put(this.others, h("h2", {}, t("patterns.others")), bars([{ name: pattern, share: drawn.share, mine: true }, ...rows], null, { best: false }));
  }

  draw(drawn) {
    const label = t("patterns.picture", { pattern: this.page.values.pattern });
    const group = (i) => (drawn.masks.length > 1 ? h("h2", {}, t("patterns.group", { number: i + 1 })) : null);
    const pictures = drawn.masks.map((mask, i) => card(group(i), maskPicture(mask, label)));
    const numbers = [
      [t("patterns.pairs", { at: whole(drawn.at) }), whole(drawn.pairs)],
      [t("patterns.share"), percent(drawn.share)],
      [t("patterns.tiles"), percent(drawn.tiles)],
      [t("patterns.memory"), bytes(drawn.memory)],
      [t("patterns.causal"), t(drawn.causal ? "yes" : "no")],
    ];
    const axes = h("p", { class: "note" }, t("patterns.axes"));
    put(this.found, facts(numbers), h("div", { class: "pair" }, pictures, this.others), axes);
  }
}

export default {
  name: "patterns",
  compares: false, // it is about no model
  alone: () => true,
  defaults: () => ({ pattern: KNOWN.strided, drawn: "32", at: "11", heads: "12" }),

  build(page) {
    const patterns = new Patterns(page);
    const sliders = row(
      range(page, "drawn", { min: 4, max: 64, step: 1 }),
      range(page, "at", { min: 6, max: 12, step: 1 }, (power) => whole(2 ** power)),
      range(page, "heads", { min: 1, max: 96, step: 1 }),
    );
    return [card(patterns.chips, row(patterns.typed), sliders), patterns.found];
  },
};

// The next token: logits, temperature, top-k, top-p and random draws, computed in the browser as the sliders move.
import { post } from "../api.js";
import { h, put } from "../dom.js";
import { act, area, button, card, modelField, range, row } from "../fields.js";
import { fixed, percent, whole } from "../numbers.js";
import { facts, visible } from "../parts.js";
import { t } from "../words.js";

const ROWS = 16;
const MANY = 100; // throws of the die at once

/** The distribution after temperature, top-k and top-p, as the sampler computes it; logits are sorted. */
export function distribution(logits, { temperature, topk, topp }) {
  const greedy = temperature === 0;
  const raw = softmax(logits, 1);
  const warm = greedy ? raw.map((_, i) => (i ? 0 : 1)) : softmax(logits, temperature);
  const last = topk && !greedy ? logits[Math.min(topk, logits.length) - 1] : -Infinity;
  const kept = softmax(logits.map((logit) => (logit < last ? -Infinity : logit)), greedy ? 1 : temperature);
  let before = 0;
  const cuts = Array.from(logits, (logit, i) => {
    if (greedy) return i ? "greedy" : null;
    const cut = logit < last ? "topk" : i && topp < 1 && before >= topp ? "topp" : null;
    before += kept[i];
    return cut;
  });
  const total = warm.reduce((sum, p, i) => sum + (cuts[i] ? 0 : p), 0);
  return { raw, cuts, final: warm.map((p, i) => (cuts[i] ? 0 : p / total)) };
}

function softmax(logits, temperature) {
  const powers = Float64Array.from(logits, (logit) => Math.exp((logit - logits[0]) / temperature));
  const total = powers.reduce((sum, power) => sum + power, 0);
  return powers.map((power) => power / total);
}

/** The index sampled by a number between 0 and 1. */
export function drawn(final, chance) {
  let sum = 0;
  const found = final.findIndex((p) => (sum += p) > chance);
  return found < 0 ? 0 : found;
}

class Next {
  constructor(page) {
    this.page = page;
    [this.facts, this.list, this.said] = [h("div"), h("ul", { class: "bars live" }), h("p", { role: "status" })];
    this.counts = new Map();
    page.work = (signal) => this.read(signal);
    page.draw = () => {
      this.last = null;
      this.draw();
    };
  }

  async read(signal) {
    const { model, text } = this.page.values;
    const seen = await post("studio/next", { model, text }, signal);
    const bytes = Uint8Array.from(atob(seen.logits), (letter) => letter.charCodeAt(0));
    this.names = seen.names;
    this.logits = new Float32Array(bytes.buffer);
    this.draw();
  }

  /** Recomputes everything after the logits, and clears draws from the old distribution. */
  draw() {
    if (!this.logits) return;
    const { page } = this;
    const settings = { temperature: page.number("temperature", 0, 2), topk: page.number("topk", 0, 100) };
    this.seen = distribution(this.logits, { ...settings, topp: page.number("topp", 0.05, 1) });
    this.counts.clear();
    put(this.said);
    this.show();
  }

  show() {
    const { final, cuts } = this.seen;
    const kept = cuts.filter((cut) => !cut).length;
    const entropy = final.reduce((sum, p) => sum - (p ? p * Math.log2(p) : 0), 0);
    put(
      this.facts,
      facts([
        [t("next.kept"), `${whole(kept)} / ${whole(final.length)}`],
        [t("next.entropy"), t("next.bits", { entropy: fixed(entropy, 2) })],
        [t("next.likeliest"), percent(final[0])],
      ]),
    );
    const size = Math.min(ROWS, this.names.length);
    const rows = this.names.slice(0, size).map((_, i) => this.row(i));
    const rest = final.slice(size).reduce((sum, p) => sum + p, 0);
    const before = this.seen.raw.slice(size).reduce((sum, p) => sum + p, 0);
    const count = whole(final.length - size);
    put(this.list, rows, this.bar({ name: t("next.rest", { count }), p: rest, before, kind: "rest" }));
  }

  row(i) {
    const cut = this.seen.cuts[i];
    const throws = this.counts.get(i);
    const note = cut ? t(`next.cut.${cut}`) : throws ? `⚄ ${throws}` : `${t("next.logit")} ${fixed(this.logits[i], 2)}`;
    const kind = cut ? "cut" : i === this.last ? "fell" : i ? "" : "best";
    return this.bar({ name: visible(this.names[i]), p: this.seen.final[i], before: this.seen.raw[i], kind, note });
  }

  bar({ name, p, before, kind, note = "" }) {
    const style = { "--share": String(p), "--before": String(before) };
    return h(
      "li",
      { class: kind || null },
      h("span", { class: "name", lang: "" }, name, h("small", {}, note)),
      h("div", { class: "bar", title: t("next.before", { p: percent(before) }) }, h("i", { style }), h("s", { style })),
      h("b", {}, p ? percent(p) : "0%"),
    );
  }

  /** Draws a token, marks it, and offers to append it. */
  throwDie(times) {
    if (!this.seen) return;
    this.counts.clear();
    for (let n = 0; n < times; n++) {
      this.last = drawn(this.seen.final, Math.random());
      this.counts.set(this.last, (this.counts.get(this.last) ?? 0) + 1);
    }
    if (times > 1) this.last = null;
    this.show();
    const name = this.names[this.last];
    if (times > 1) put(this.said, t("next.many", { times, kinds: this.counts.size }));
    else if (name === undefined) put(this.said, t("next.far"));
    else put(this.said, t("next.fell", { token: visible(name) }), " ", this.taker(name));
  }

  taker(name) {
    if (name.startsWith("bytes:")) return null; // part of a character: no text yet
    const take = () => {
      this.page.set("text", this.page.values.text + name);
      document.getElementById("field-text").value = this.page.values.text;
      this.last = null;
      this.page.run();
    };
    return button(t("next.take"), take, { class: "quiet" });
  }
}

export default {
  name: "next",
  needs: (model) => model.causal && model.can.includes("logits"),
  defaults: () => ({ text: "", temperature: "1", topk: "0", topp: "1" }),

  build(page) {
    const next = new Next(page);
    const off = (none) => (value) => (value === none ? t("off") : value);
    const again = () => page.redraw();
    return [
      card(
        area(page, "text", 2),
        row(modelField(page)),
        row(
          range(page, "temperature", { min: 0, max: 2, step: 0.05 }, (v) => (v === "0" ? t("greedy") : v), again),
          range(page, "topk", { min: 0, max: 100, step: 1 }, off("0"), again),
          range(page, "topp", { min: 0.05, max: 1, step: 0.05 }, off("1"), again),
        ),
        act(
          button(`⚄ ${t("next.die")}`, () => next.throwDie(1), { id: "die" }),
          button(t("next.dice", { times: MANY }), () => next.throwDie(MANY), { class: "quiet" }),
          next.said,
        ),
      ),
      card(next.facts, next.list, h("p", { class: "note" }, t("next.hint"))),
    ];
  },
};

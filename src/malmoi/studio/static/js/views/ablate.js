// Interventions: parts switched off, another mask, values of another sentence, with the answer before and after.
import { post } from "../api.js";
import { h, put } from "../dom.js";
import { act, area, button, card, line, modelField, pick, row, shared } from "../fields.js";
import { fixed, percent } from "../numbers.js";
import { bars, table, visible } from "../parts.js";
import { SUBLAYERS, board, partName } from "../pictures/board.js";
import { matrix } from "../pictures/matrix.js";
import { t } from "../words.js";
import { Gaps } from "./fill.js";

const MASKS = ["", "causal", "full", "causal & local:3"];
const SITES = ["residual", "attention", "mlp"];
const TOP = 6;
const key = (layer, part) => `${layer + 1}.${typeof part === "number" ? part + 1 : part}`;

class Ablation {
  constructor(page) {
    this.page = page;
    [this.switches, this.worths, this.patched] = [h("div"), card(), card()];
    this.answers = h("div", { class: "answers", "aria-live": "polite" });
    this.gaps = page.model.can.includes("fill") && page.model.mask ? new Gaps(page) : null;
    this.map = null; // what each part contributes, once it was asked for
    page.work = (signal) => this.read(signal);
    page.weigh = (signal) => this.weigh(signal);
    page.patch = (signal) => this.patch(signal);
    page.draw = () => this.furnish();
    this.furnish();
  }

  /** The parts that are off: {layer, part}, counted from 0. */
  get off() {
    const { depth, heads } = this.page.model;
    const parts = this.page.values.off.split(" ").map((one) => one.split("."));
    return parts
      .map(([layer, part]) => ({ layer: layer - 1, part: SUBLAYERS.includes(part) ? part : part - 1 }))
      .filter(({ layer, part }) => layer >= 0 && layer < depth && (typeof part === "string" || (part >= 0 && part < heads)));
  }

  get text() {
    return this.gaps ? this.gaps.text : this.page.values.text;
  }

  get interventions() {
    const { mask } = this.page.values;
    const change = ({ layer, part }) => (typeof part === "number" ? { site: "head", layer, head: part } : { site: part, layer });
    return [...(mask ? [{ site: "mask", pattern: mask }] : []), ...this.off.map(change)];
  }

  async read(signal) {
    this.gaps?.furnish();
    const { model } = this.page.values;
    const body = { model, text: this.text, interventions: this.interventions, top: TOP };
    const found = await post("studio/ablation", body, signal);
    const changed = this.interventions.length;
    const listed = (guesses) => bars(guesses.map(({ text, probability }) => ({ name: text, share: probability })));
    const pairs = found.before.map((before, i) =>
      h(
        "div",
        { class: "pair" },
        card(h("h2", {}, t("ablate.before")), listed(before)),
        card(
          h("h2", {}, changed ? t("ablate.after", { count: changed }) : t("ablate.nothing")),
          listed(found.after[i]),
          h("p", { class: "note" }, t("ablate.moved", { share: percent(found.moved[i]) })),
        ),
      ),
    );
    put(this.answers, pairs);
  }

  furnish() {
    const off = new Set(this.off.map(({ layer, part }) => key(layer, part)));
    const isOff = (layer, part) => off.has(key(layer, part));
    const names = this.off.map(({ layer, part }) => partName(layer, part));
    const said = names.length ? t("ablate.off", { names: names.join(", ") }) : t("ablate.hint");
    put(
      this.switches,
      board(this.page.model, isOff, (...place) => this.worth(...place), (...place) => this.toggle(...place)),
      act(button(t("ablate.reset"), () => this.set(""), { class: "quiet" }), h("p", { class: "note" }, said)),
    );
  }

  worth(layer, part) {
    if (!this.map || part === "layer") return null;
    return typeof part === "number" ? this.map.heads[layer][part] : this.map[part][layer];
  }

  toggle(layer, part, clicked) {
    const all = this.off.map((one) => key(one.layer, one.part));
    const here = key(layer, part);
    const place = [...this.switches.querySelectorAll("button")].indexOf(clicked);
    this.set((all.includes(here) ? all.filter((one) => one !== here) : [...all, here]).join(" "));
    this.switches.querySelectorAll("button")[place].focus();
  }

  set(off) {
    this.page.changed("off", off);
    this.page.redraw();
  }

  /** The contribution of each part to predicting the rows. */
  async weigh(signal) {
    const { model, rows, method } = this.page.values;
    const given = rows.split("\n").filter((one) => one.trim());
    this.map = await post("studio/importance", { model, rows: given.length ? given : [this.page.values.text], method }, signal);
    this.furnish();
    const { depth, heads } = this.page.model;
    const numbers = [...Array(depth).keys()].map((l) => [
      l + 1,
      ...[...this.map.heads[l], this.map.attention[l], this.map.mlp[l]].map((value) => fixed(value, 4)),
    ]);
    const head = [t("field.layer"), ...[...Array(heads).keys()].map((k) => k + 1), t("ablate.attention.short"), t("ablate.mlp.short")];
    const words = { loss: fixed(this.map.baseline), count: this.map.predictions };
    put(
      this.worths,
      h("p", {}, t("ablate.loss", words)),
      h("details", {}, h("summary", {}, t("numbers")), table(head, numbers)),
    );
  }

  /** Where the other sentence's answer comes from. */
  async patch(signal) {
    const { model, other, site } = this.page.values;
    const found = await post("studio/patching", { model, source: other, text: this.text, site }, signal);
    const { answer, tokens, recovered } = found;
    const said = {
      answer: visible(answer),
      source: percent(Math.exp(found.source_logprob)),
      text: percent(Math.exp(found.logprob)),
    };
    if (!recovered) return put(this.patched, h("p", { class: "note" }, t("ablate.same", said)));
    const names = recovered.map((_, i) => t("lens.layer", { layer: i + 1 }));
    const shares = recovered.map((some) => some.map((value) => Math.max(0, Math.min(1, value)))).reverse();
    const label = t("ablate.recovered", said);
    put(
      this.patched,
      h("p", {}, label),
      h("div", { class: "wide", tabindex: "0", role: "group", "aria-label": label }, matrix([...names].reverse(), shares, label, 0, tokens)),
    );
  }
}

export default {
  name: "ablate",
  needs: (model) => model.tokenizer && (model.can.includes("generate") || model.can.includes("fill") || model.classifies),
  defaults: () => ({ text: "", gaps: "", off: "", mask: "", rows: "", method: "gradient", other: "", site: "residual" }),

  build(page) {
    const ablation = new Ablation(page);
    const masks = MASKS.map((pattern) => [pattern, pattern ? `${pattern}` : t("ablate.mask.own", { pattern: page.model.attention.join(", ") })]);
    const methods = ["gradient", "ablation"].map((name) => [name, t(`method.${name}`)]);
    const sites = SITES.map((name) => [name, t(`site.${name}`)]);
    return [
      card(
        area(page, "text", 2),
        ablation.gaps && [h("p", { class: "note" }, t("fill.hide")), ablation.gaps.chips],
        row(modelField(page), pick(page, "mask", masks)),
      ),
      ablation.answers,
      card(h("h2", {}, t("ablate.board")), ablation.switches),
      shared(
        h("h2", {}, t("ablate.worth")),
        h("p", { class: "note" }, t(page.some(({ classifies }) => classifies) ? "ablate.rows.labels" : "ablate.rows")),
        area(page, "rows", 2),
        row(pick(page, "method", methods), button(t("ablate.weigh"), () => page.run("weigh"), { id: "weigh" })),
      ),
      ablation.worths,
      shared(
        h("h2", {}, t("ablate.patch")),
        h("p", { class: "note" }, t("ablate.patch.hint")),
        row(line(page, "other"), pick(page, "site", sites)),
        act(button(t("ablate.patch.do"), () => page.run("patch"), { id: "patch" })),
      ),
      ablation.patched,
    ];
  },
};

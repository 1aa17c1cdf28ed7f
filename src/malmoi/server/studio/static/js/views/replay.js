// A run from its first step to its last: loss, what it writes, what its layers say and what a head looks at.
import { get, post } from "../api.js";
import { h, put } from "../dom.js";
import { area, button, card, pick, range, row } from "../fields.js";
import { percent, whole } from "../numbers.js";
import { bars, visible } from "../parts.js";
import { chart } from "../pictures/chart.js";
import { fit } from "../pictures/fit.js";
import { matrix } from "../pictures/matrix.js";
import { t } from "../words.js";

const EVERY = 900; // ms between two steps while it plays

class Replay {
  constructor(page) {
    this.page = page;
    this.fields = h("div");
    this.said = h("p", { class: "text", lang: "" });
    [this.curve, this.guesses, this.lens, this.attention] = [h("div"), h("div"), h("div"), h("div")];
    this.result = h("div", {});
    page.work = (signal) => this.read(signal);
  }

  get run() {
    return this.runs.find((run) => run.name === this.page.values.run) ?? this.runs[0];
  }

  get step() {
    return this.run.steps[this.page.number("snapshot", 1, this.run.steps.length) - 1];
  }

  async read(signal) {
    if (!this.runs) {
      this.runs = (await get("studio/snapshots", signal)).runs;
      if (this.runs.length) this.furnish();
    }
    if (!this.runs.length) return put(this.result, card(h("p", {}, t("replay.none")), h("pre", {}, t("replay.line"))));
    const { text, layer, head } = this.page.values;
    const { run, step } = this;
    const body = { run: run.name, step, text, layer: layer - 1, head: head - 1 };
    const found = await post("studio/replay", body, signal);
    this.draw(found, step);
  }

  furnish() {
    const { page, run } = this;
    const numbered = (count, name) => Array.from({ length: count }, (_, i) => [String(i + 1), `${t(`field.${name}`)} ${i + 1}`]);
    if (Number(page.values.snapshot) > run.steps.length || page.values.snapshot === "0") page.set("snapshot", run.steps.length);
    if (!page.values.run) page.set("run", run.name);
    const runs = pick(page, "run", this.runs.map((one) => [one.name, one.name]));
    runs.querySelector("select").addEventListener("change", () => this.furnish());
    const steps = { min: 1, max: run.steps.length, step: 1 };
    put(
      this.fields,
      row(range(page, "snapshot", steps, (value) => t("replay.step", { step: whole(run.steps[value - 1] ?? 0) }))),
      row(runs, pick(page, "layer", numbered(run.depth, "layer")), pick(page, "head", numbered(run.heads, "head"))),
      row(button(t("replay.play"), () => this.play(), { class: "quiet", id: "play" })),
    );
    put(this.result, card(h("h2", {}, t("replay.loss")), this.curve), h("div", { class: "pair" }, card(h("h2", {}, t("replay.next")), this.guesses, this.said), card(h("h2", {}, t("attention.name")), this.attention)), card(h("h2", {}, t("replay.layers")), this.lens));
  }

  /** From the first snapshot to the last, one after the other. */
  async play() {
    const { page, run } = this;
    const control = document.getElementById("field-snapshot");
    for (let at = 1; at <= run.steps.length && control.isConnected && run === this.run; at += 1) {
      control.value = String(at);
      control.parentElement.querySelector("output").textContent = t("replay.step", { step: whole(run.steps[at - 1]) });
      page.set("snapshot", at);
      await page.run("work", { quiet: true });
      await new Promise((done) => setTimeout(done, EVERY));
    }
  }

  draw({ lens, attention, sample }, step) {
    const { run } = this;
    const series = [
      { name: t("replay.loss"), points: run.loss, hue: "var(--a)" },
      { name: t("train.valid"), points: run.valid, hue: "var(--a)", dashed: true },
      { name: t("replay.now"), label: t("replay.now"), points: [run.places[run.steps.indexOf(step)]], hue: "var(--b)" },
    ];
    fit(this.curve, (width) => chart(series, { width, across: t("train.tokens"), up: t("train.loss"), height: 220 }));
    const last = lens.layers.at(-1).at(-1);
    put(this.guesses, bars(last.map((one) => ({ name: one.text, share: one.probability }))));
    put(this.said, sample === null ? "" : [h("span", { class: "given" }, this.page.values.text), sample]);
    const label = t("attention.one", { layer: this.page.values.layer, head: this.page.values.head });
    put(this.attention, matrix(attention.names, attention.weights, label));
    put(this.lens, this.grid(lens));
  }

  grid({ tokens, layers }) {
    const cell = ([best]) => h("td", { style: { "--p": String(best.probability) }, title: percent(best.probability) }, visible(best.text));
    const name = (layer) => (layer ? t("lens.layer", { layer }) : t("lens.embedding"));
    const body = layers.map((places, layer) => h("tr", {}, h("th", { scope: "row" }, name(layer)), places.map(cell))).reverse();
    const head = h("tr", {}, h("td"), tokens.map((token) => h("th", { scope: "col" }, visible(token))));
    const given = { class: "wide", tabindex: "0", role: "region", "aria-label": t("replay.layers") };
    return h("div", given, h("table", { class: "lens shaded" }, h("thead", {}, head), h("tbody", {}, body)));
  }
}

export default {
  name: "replay",
  alone: (about) => about.runs,
  needs: () => false,
  defaults: () => ({ text: "", run: "", snapshot: "0", layer: "1", head: "1" }),

  build(page) {
    const replay = new Replay(page);
    return [card(area(page, "text", 2), replay.fields), replay.result];
  },
};

// Replay of a run: loss, samples, layer predictions, attention, and which
// grammatical phenomena it has learnt.
import { get, post } from "../api.js";
import { h, put } from "../dom.js";
import { area, button, card, pick, range, row, shared } from "../fields.js";
import { fixed, percent, whole } from "../numbers.js";
import { bars, table, visible } from "../parts.js";
import { HUES, chart } from "../pictures/chart.js";
import { fit } from "../pictures/fit.js";
import { matrix } from "../pictures/matrix.js";
import { languageFor, state } from "../state.js";
import { has, t } from "../words.js";

const EVERY = 900; // ms between two steps while it plays
const phenomenon = (name) => (has(`phenomenon.${name}`) ? t(`phenomenon.${name}`) : name.replaceAll("_", " ") || t("replay.pairs.all"));

class Replay {
  constructor(page) {
    this.page = page;
    this.fields = h("div");
    this.said = h("p", { class: "text", lang: "" });
    [this.curve, this.guesses, this.lens, this.attention] = [h("div"), h("div"), h("div"), h("div")];
    this.result = h("div", {});
    [this.form, this.grammar] = [shared(), card()];
    this.scores = {}; // by set of pairs, by step
    page.work = (signal) => this.read(signal);
    page.grade = (signal) => this.grade(signal);
  }

  get run() {
    return this.runs.find((run) => run.name === this.page.values.run) ?? this.runs[0];
  }

  get step() {
    return this.run.steps[this.page.number("snapshot", 1, this.run.steps.length) - 1];
  }

  async read(signal) {
    if (!this.runs) {
      const asked = ["studio/snapshots", "studio/pairs"].map((path) => get(path, signal));
      [{ runs: this.runs }, { sets: this.sets }] = await Promise.all(asked);
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
    const numbered = (count, word) => Array.from({ length: count }, (_, i) => [String(i + 1), word(i + 1)]);
    if (!page.suffix) this.settle();
    const names = this.runs.map((one) => [one.name, one.name]);
    const runs = pick(page, "run", names);
    runs.querySelector("select").addEventListener("change", () => page.rebuild());
    const against = pick(page, "against", [["", t("none")], ...names.filter(([name]) => name !== run.name)]);
    against.querySelector("select").addEventListener("change", () => page.rebuild());
    const steps = { min: 1, max: run.steps.length, step: 1 };
    put(
      this.fields,
      row(range(page, "snapshot", steps, (value) => t("replay.step", { step: whole(run.steps[value - 1] ?? 0) }))),
      row(runs, names.length > 1 && against, pick(page, "layer", numbered(run.depth, (layer) => t("lens.layer", { layer }))), pick(page, "head", numbered(run.heads, (head) => `${t("field.head")} ${head}`))),
      row(button(t("replay.play"), () => this.play(), { class: "quiet", id: "play" })),
    );
    put(this.result, card(h("h2", {}, t("replay.loss")), this.curve), h("div", { class: "pair" }, card(h("h2", {}, t("replay.next")), this.guesses, this.said), card(h("h2", {}, t("attention.name")), this.attention)), card(h("h2", {}, t("replay.layers")), this.lens));
    const sets = this.sets.map(({ name, pairs }) => [name, t("replay.pairs.set", { name: has(`replay.pairs.${name}`) ? t(`replay.pairs.${name}`) : name, pairs })]);
    put(
      this.form,
      h("h2", {}, t("replay.grammar")),
      h("p", { class: "note" }, t("replay.grammar.about")),
      row(pick(page, "pairs", sets), button(t("replay.grade"), () => page.run("grade"), { id: "grade" })),
    );
  }

  /** Defaults: the last snapshot, and pairs and a sentence in a language that the run knows. */
  settle() {
    const { page, run } = this;
    if (state.text === null) page.values.text = document.getElementById("field-text").value = page.about.samples[languageFor(run)];
    if (Number(page.values.snapshot) > run.steps.length || page.values.snapshot === "0") page.set("snapshot", run.steps.length);
    if (!page.values.run) page.set("run", run.name);
    if (!page.values.pairs) page.set("pairs", languageFor(run));
  }

  /** Accuracy on minimal pairs for each snapshot, plotted as results arrive. */
  async grade(signal) {
    const { run } = this;
    const { pairs } = this.page.values;
    const scores = (this.scores[`${run.name} ${pairs}`] ??= {});
    for (const step of run.steps) {
      scores[step] ??= await post("studio/pairs", { run: run.name, step, pairs }, signal);
      this.drawGrammar();
    }
  }

  /** A curve for each phenomenon, and the pairs as the chosen snapshot scores them. */
  drawGrammar() {
    const { run, step } = this;
    const scores = this.scores[`${run.name} ${this.page.values.pairs}`];
    if (!scores) return put(this.grammar);
    const graded = run.steps.filter((one) => scores[one]);
    const names = Object.keys(scores[graded[0]].accuracy);
    const series = names.map((name, i) => ({
      ...{ name: phenomenon(name), label: phenomenon(name), hue: HUES[i % HUES.length], dashed: i >= HUES.length },
      points: graded.map((one) => [one, scores[one].accuracy[name]]),
    }));
    const holder = h("div");
    const words = { across: t("axis.step"), up: t("replay.right"), read: percent, floor: 0, ceiling: 1, log: true };
    const rows = (scores[step]?.pairs ?? []).map((one) => [
      phenomenon(one.phenomenon),
      h("span", { lang: "" }, one.good),
      h("span", { lang: "" }, one.bad),
      `${one.margin > 0 ? "✓" : "✗"} ${fixed(one.margin, 2)}`,
    ]);
    const head = ["phenomenon", "good", "bad", "margin"].map((key) => t(`replay.${key}`));
    const { open = false } = this.grammar.querySelector("details") ?? {};
    put(
      this.grammar,
      holder,
      h("p", { class: "note" }, t("replay.chance", { share: percent(names.length / scores[graded[0]].pairs.length) })),
      h("details", { open }, h("summary", {}, t("replay.every", { step: whole(step) })), table(head, rows)),
    );
    fit(holder, (width) => chart(series, { width, ...words, at: step }));
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
    fit(this.curve, (width) => chart(series, { width, across: t("train.tokens"), up: t("train.loss"), height: 220, log: true }));
    const last = lens.layers.at(-1).at(-1);
    put(this.guesses, bars(last.map((one) => ({ name: one.text, share: one.probability }))));
    put(this.said, sample === null ? "" : [h("span", { class: "given" }, this.page.values.text), sample]);
    const label = t("attention.one", { layer: this.page.values.layer, head: this.page.values.head });
    put(this.attention, matrix(attention.names, attention.weights, label));
    put(this.lens, this.grid(lens));
    this.drawGrammar();
  }

  grid({ tokens, layers }) {
    const cell = ([best]) => h("td", { style: { "--p": String(best.probability) }, title: percent(best.probability) }, visible(best.text));
    const name = (layer) => (layer ? t("lens.layer", { layer }) : t("lens.embedding"));
    const body = layers.map((places, layer) => h("tr", {}, h("th", { scope: "row" }, name(layer)), places.map(cell))).reverse();
    const head = h("tr", {}, h("td"), tokens.map((token) => h("th", { scope: "col" }, visible(token))));
    const given = { class: "wide", tabindex: "0", role: "group", "aria-label": t("replay.layers") };
    return h("div", given, h("table", { class: "lens shaded" }, h("thead", {}, head), h("tbody", {}, body)));
  }
}

export default {
  name: "replay",
  alone: (about) => about.runs,
  needs: () => false,
  defaults: () => ({ text: "", run: "", against: "", snapshot: "0", layer: "1", head: "1", pairs: "" }),
  compares: false, // it compares runs
  twin: ({ values }) => ["run", values.against !== values.run && values.against],

  build(page) {
    const replay = new Replay(page);
    return [card(area(page, "text", 2), replay.fields), replay.result, replay.form, replay.grammar];
  },
};

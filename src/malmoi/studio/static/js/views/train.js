// Live training runs: pre-training first, one axis per objective, task metrics, and samples.
import { get } from "../api.js";
import { h, put } from "../dom.js";
import { card, pick, row } from "../fields.js";
import { fixed, percent, short, whole } from "../numbers.js";
import { bars, table } from "../parts.js";
import { HUES, chart } from "../pictures/chart.js";
import { fit } from "../pictures/fit.js";
import { has, t } from "../words.js";

const EVERY = 2000; // ms
const FIRST = 4; // runs of each kind that are shown unless others are chosen
const AXES = ["tokens", "step", "seconds"];
const SCALES = ["linear", "log"];
const NONE = "none"; // in the address: no run is chosen
const COLUMNS = ["run", "step", "loss", "valid", "speed", "time"];
const last = (points) => (points.length ? fixed(points.at(-1)[1]) : "–");
const kinds = (runs) => [runs.filter((run) => run.objective), runs.filter((run) => !run.objective)];

/** One run of each folder, then a second of each: of many seeds, the first ones are enough to compare. */
function inTurn(runs) {
  const met = {};
  const turn = ({ name }) => {
    const folder = name.split("/")[0];
    return (met[folder] = (met[folder] ?? -1) + 1);
  };
  return runs.map((run) => [turn(run), run]).sort(([one], [other]) => one - other).map(([, run]) => run);
}

class Runs {
  constructor(page) {
    this.page = page;
    [this.legend, this.pictures, this.said] = [h("div"), h("div", { class: "pair" }), h("div")];
    this.scores = card();
    this.numbers = h("div");
    [this.found, this.parts] = [[], new Map()];
    page.work = (signal) => this.read(signal);
  }

  async read(signal) {
    const { axis } = this.page.values;
    const { runs, tests } = await get(`studio/runs?axis=${axis}`, signal);
    this.found = kinds(runs).flat();
    this.part(this.scores, "scores", tests, () => testScores(tests));
    this.draw();
    // scheduled only now, so that the next request never cancels a slow one
    this.page.timer = setTimeout(() => this.page.run("work", { quiet: true }), EVERY);
  }

  get chosen() {
    const { runs } = this.page.values;
    if (runs === NONE) return [];
    if (runs) return runs.split("|");
    return kinds(this.found).flatMap((some) => inTurn(some).slice(0, FIRST).map((run) => run.name));
  }

  toggle(name, on) {
    const { chosen } = this;
    const wanted = this.found.map((run) => run.name).filter((one) => (one === name ? on : chosen.includes(one)));
    this.page.set("runs", wanted.join("|") || NONE);
    this.draw();
  }

  hue(run) {
    return HUES[this.found.indexOf(run) % HUES.length];
  }

  /** Redraws only what has changed, to keep the focus and selected text. */
  draw() {
    const { chosen } = this;
    const shown = this.found.filter((run) => chosen.includes(run.name));
    this.part(this.legend, "legend", this.found.map((run) => run.name), () => this.boxes());
    const graphs = this.graphs(shown);
    const holders = graphs.map((one) => this.kept(`graph ${one.title}`, () => card(h("h2", {}, one.title), h("div"))));
    this.keep(this.pictures, holders);
    if (!graphs.length) put(this.pictures, h("p", { class: "note" }, t("train.nothing")));
    graphs.forEach((one, i) => {
      const holder = holders[i].lastChild;
      const [series, across] = inUnits(one.series, this.page.values.axis);
      const log = this.page.values.scale === "log";
      const draw = () => fit(holder, (width) => chart(series, { width, across, up: one.up, log }));
      this.part(holder, one.title, [series, across, log], draw);
    });
    this.part(this.numbers, "numbers", shown, () => this.figures(shown));
    const speakers = shown.filter((run) => run.samples.length);
    this.keep(this.said, speakers.map((run) => this.kept(`said ${JSON.stringify([run.name, run.samples])}`, () => samples(run))));
  }

  /** Rebuilds a part if its data has changed. */
  part(node, name, shown, make) {
    const told = JSON.stringify(shown);
    if (this.parts.get(name) === told) return;
    this.parts.set(name, told);
    const made = make();
    if (made) put(node, made);
  }

  kept(key, make) {
    if (!this.parts.has(key)) this.parts.set(key, make());
    return this.parts.get(key);
  }

  /** Puts nodes into an element without moving those already there. */
  keep(node, wanted) {
    if (wanted.length !== node.children.length || wanted.some((one, i) => node.children[i] !== one)) put(node, wanted);
  }

  boxes() {
    const box = (run) => {
      const onchange = (event) => this.toggle(run.name, event.target.checked);
      const control = h("input", { type: "checkbox", checked: this.chosen.includes(run.name), onchange });
      const swatch = h("span", { class: "swatch", style: { "--hue": this.hue(run) } });
      return h("label", { class: "check" }, control, swatch, run.name);
    };
    const names = ["train.pretraining", "train.finetuning"];
    return kinds(this.found).map((some, i) =>
      some.length ? h("fieldset", {}, h("legend", {}, t(names[i])), h("div", { class: "legend" }, some.map(box))) : null,
    );
  }

  /** One chart per objective, since losses cannot be compared across objectives, and one per task metric. */
  graphs(shown) {
    const titles = [...new Set(shown.map(objectiveName))];
    const losses = titles.map((title) => {
      const runs = shown.filter((run) => objectiveName(run) === title);
      const series = runs.flatMap((run) => [
        { name: run.name, label: run.name, points: run.loss, hue: this.hue(run) },
        { name: `${run.name} ${t("train.valid")}`, points: run.valid, hue: this.hue(run), dashed: true },
      ]);
      return { title: t("train.losses", { objective: title }), series, up: t("train.loss") };
    });
    const measures = [...new Set(shown.flatMap((run) => Object.keys(run.metrics)))];
    const tasks = measures.map((name) => {
      const runs = shown.filter((run) => run.metrics[name]);
      const line = (run) => ({ name: run.name, label: run.name, points: run.metrics[name], hue: this.hue(run) });
      const title = has(`metric.${name}`) ? t(`metric.${name}`) : name.replaceAll("_", " ");
      return { title, series: runs.map(line), up: "" };
    });
    return [...losses, ...tasks].filter((one) => one.series.some(({ points }) => points.length));
  }

  figures(shown) {
    const speed = (run) => (run.tokens_per_second ? short(run.tokens_per_second) : "–");
    const cells = (run) => [
      run.name,
      whole(run.step),
      last(run.loss),
      last(run.valid),
      speed(run),
      `${Math.round(run.seconds)} s`,
    ];
    const made = table(COLUMNS.map((name) => t(`train.${name}`)), shown.map(cells), t("train.compare"));
    const there = this.numbers.firstElementChild; // it may have the focus
    if (!there) return made;
    there.replaceChildren(made.firstElementChild);
    return null;
  }
}

/** Fine-tuned models on their test rows: the mean of all seeds with each of them, beside what needs no network. */
function testScores(tests) {
  const first = tests.find((one) => one.scores.length);
  if (!first) return null;
  const mean = (some) => some.reduce((sum, one) => sum + one, 0) / some.length;
  const seeds = (some) => (some.length > 1 ? ` (${some.map(percent).join(", ")})` : "");
  const row = ({ name, scores }) => ({ name: `${name}${seeds(scores)}`, share: mean(scores) });
  const plain = [
    { name: t("train.majority"), share: first.majority, kind: "rest" },
    first.words === null ? null : { name: t("train.words"), share: first.words, kind: "rest" },
  ];
  return [h("h2", {}, t("train.scores")), bars([...plain.filter(Boolean), ...tests.map(row)], null, { best: false }), h("p", { class: "note" }, t("train.seeds"))];
}

/** Series whose seconds are minutes or hours where they are many, and the words for the axis. */
function inUnits(series, axis) {
  if (axis !== "seconds") return [series, t(`axis.${axis}`)];
  const longest = Math.max(0, ...series.flatMap(({ points }) => points.map(([x]) => x)));
  const [unit, size] = longest > 7200 ? ["hours", 3600] : longest > 120 ? ["minutes", 60] : ["seconds", 1];
  const scaled = (one) => ({ ...one, points: one.points.map(([x, y]) => [x / size, y]) });
  return [series.map(scaled), t(`train.${unit}`)];
}

const objectiveName = (run) => run.objective ?? t("train.finetuning");

function samples(run) {
  const rows = run.samples.map((sample) => [whole(sample.step), h("span", { class: "said", lang: "" }, sample.text)]);
  const title = t("train.said", { name: run.name });
  return card(h("h2", {}, title), table([t("train.step"), t("train.sample")], rows, title));
}

export default {
  name: "train",
  compares: false, // it shows many runs
  alone: (about) => about.runs,
  missing: "train.missing",
  needs: () => false,
  defaults: () => ({ runs: "", axis: AXES[0], scale: SCALES[0] }),

  build(page) {
    const runs = new Runs(page);
    const hint = h("p", { class: "note" }, t("train.hint"));
    const axes = pick(page, "axis", AXES.map((name) => [name, t(`axis.${name}`)]));
    const scales = pick(page, "scale", SCALES.map((name) => [name, t(`scale.${name}`)]));
    return [card(row(axes, scales), runs.legend, hint), runs.scores, runs.pictures, card(runs.numbers), runs.said];
  },
};

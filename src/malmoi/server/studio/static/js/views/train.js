// Runs as they go: losses side by side, and what each says.
import { get } from "../api.js";
import { h, put } from "../dom.js";
import { card } from "../fields.js";
import { fixed, short, whole } from "../numbers.js";
import { table } from "../parts.js";
import { HUES, chart } from "../pictures/chart.js";
import { t } from "../words.js";

const EVERY = 2000; // ms
const FIRST = 4; // runs that are shown unless others are chosen
const COLUMNS = ["run", "step", "loss", "valid", "speed", "time"];
const last = (points) => (points.length ? fixed(points.at(-1)[1]) : "–");

class Runs {
  constructor(page) {
    this.page = page;
    this.legend = h("fieldset");
    [this.picture, this.numbers, this.said] = [h("div"), h("div"), h("div")];
    [this.found, this.listed] = [[], ""];
    page.work = (signal) => this.read(signal);
  }

  async read(signal) {
    this.page.timer = setTimeout(() => this.page.run(this.page.work, { quiet: true }), EVERY);
    this.found = (await get("studio/runs", signal)).runs;
    const names = this.found.map((run) => run.name).join("|");
    if (names !== this.listed) this.furnish(); // a box that has the focus is not made anew
    this.listed = names;
    this.draw();
  }

  get chosen() {
    const { runs } = this.page.values;
    return runs ? runs.split("|") : this.found.slice(0, FIRST).map((run) => run.name);
  }

  hue(run) {
    return HUES[this.found.indexOf(run) % HUES.length];
  }

  toggle(name, on) {
    const wanted = (one) => (one === name ? on : this.chosen.includes(one));
    this.page.set(
      "runs",
      this.found
        .map((run) => run.name)
        .filter(wanted)
        .join("|"),
    );
    this.draw();
  }

  furnish() {
    const box = (run) => {
      const onchange = (event) => this.toggle(run.name, event.target.checked);
      const control = h("input", { type: "checkbox", checked: this.chosen.includes(run.name), onchange });
      return h(
        "label",
        { class: "check" },
        control,
        h("span", { class: "swatch", style: { "--hue": this.hue(run) } }),
        run.name,
      );
    };
    put(this.legend, h("legend", {}, t("train.compare")), h("div", { class: "legend" }, this.found.map(box)));
  }

  draw() {
    const shown = this.found.filter((run) => this.chosen.includes(run.name));
    put(this.picture, this.curves(shown));
    const speed = (run) => (run.tokens_per_second ? short(run.tokens_per_second) : "–");
    const cells = (run) => [
      run.name,
      whole(run.step),
      last(run.loss),
      last(run.valid),
      speed(run),
      `${Math.round(run.seconds)} s`,
    ];
    put(
      this.numbers,
      table(
        COLUMNS.map((name) => t(`train.${name}`)),
        shown.map(cells),
      ),
    );
    put(this.said, shown.filter((run) => run.samples.length).map(samples));
  }

  curves(shown) {
    const lines = shown.flatMap((run) => [
      { name: run.name, points: run.loss, hue: this.hue(run) },
      { name: `${run.name} ${t("train.valid")}`, points: run.valid, hue: this.hue(run), dashed: true },
    ]);
    if (!lines.some((one) => one.points.length > 1)) return h("p", { class: "note" }, t("train.nothing"));
    return chart(lines, { across: t("train.tokens"), up: t("train.loss") });
  }
}

function samples(run) {
  const rows = run.samples.map((sample) => [whole(sample.step), sample.text]);
  return card(h("h2", {}, t("train.said", { name: run.name })), table([t("train.step"), t("train.sample")], rows));
}

export default {
  name: "train",
  alone: (about) => about.runs,
  needs: () => false,
  defaults: () => ({ runs: "" }),

  build(page) {
    const runs = new Runs(page);
    const hint = h("p", { class: "note" }, t("train.hint"));
    return [card(runs.legend, runs.picture, hint), card(runs.numbers), runs.said];
  },
};

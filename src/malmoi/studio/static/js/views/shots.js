// The few-shot lab: an item, K examples before it, and the probability of each answer.
import { post } from "../api.js";
import { h, put } from "../dom.js";
import { area, button, card, modelField, number, pick, range, row } from "../fields.js";
import { fixed, percent } from "../numbers.js";
import { bars, table } from "../parts.js";
import { chart } from "../pictures/chart.js";
import { fit } from "../pictures/fit.js";
import { languageFor } from "../state.js";
import { t } from "../words.js";

const MOST = 8;
const SCORINGS = ["total", "token", "byte", "unconditional"];

class Lab {
  constructor(page) {
    this.page = page;
    this.own = h("div", { class: "field" }, area(page, "lines", 6), h("p", { class: "note" }, t("shots.shape")));
    this.prompt = h("pre", { tabindex: "0", "aria-label": t("shots.prompt") });
    [this.answers, this.curve] = [h("div"), h("div")];
    page.work = (signal) => this.read(signal);
    page.plot = (signal) => this.every(signal);
  }

  ask(shots, signal, every = false) {
    const { model, task, lines, scoring } = this.page.values;
    const [item, seed] = [this.page.number("item", 1, 100000) - 1, this.page.number("seed", 0, 1e6)];
    const body = { model, task, lines: task === "own" ? lines : "", item, shots, seed, scoring, all_items: every };
    return post("studio/shots", body, signal);
  }

  async read(signal) {
    this.own.hidden = this.page.values.task !== "own";
    put(this.curve);
    const seen = await this.ask(this.page.number("k", 0, MOST), signal);
    put(this.prompt, seen.prompt);
    const rows = seen.choices.map((one) => [one.text, fixed(one.logprob), fixed(one.alone), String(one.tokens), fixed(one.score)]);
    put(
      this.answers,
      bars(seen.choices.map(({ text, share, right }) => ({ name: text, share, right }))),
      table([t("shots.answer"), "log p", t("shots.alone"), t("tokens.count"), t("shots.score")], rows),
    );
  }

  /** The share of all items that are right with 0, 1, 2… examples, beside guessing, plotted as results arrive. */
  async every(signal) {
    const points = [];
    for (let k = 0; k <= MOST; k++) {
      const seen = await this.ask(k, signal, true).catch((error) =>
        k && error.status === 400 ? null : Promise.reject(error),
      );
      if (!seen) break;
      points.push([k, seen.right]);
      const guess = points.map(([x]) => [x, 1 / seen.choices.length]);
      const series = [
        { name: t("shots.right"), points, hue: "var(--c)" },
        { name: t("shots.guess"), points: guess, hue: "var(--soft)", dashed: true, label: t("shots.guess") },
      ];
      fit(this.curve, (width) => chart(series, { width, across: "K", up: t("shots.right"), read: percent, floor: 0, ceiling: 1 }));
      if (k >= seen.most) break;
    }
  }
}

export default {
  name: "shots",
  needs: (model) => model.can.includes("score") || model.can.includes("fill"),
  defaults: ({ model }) => ({
    ...{ task: "own", lines: t(`shots.lines.${languageFor(model)}`) },
    ...{ item: "1", k: "2", seed: "0", scoring: "total" },
  }),

  build(page) {
    const lab = new Lab(page);
    const tasks = [...page.about.tasks.map((name) => [name, name]), ["own", t("shots.own")]];
    const scorings = SCORINGS.map((name) => [name, t(`scoring.${name}`)]);
    const k = range(page, "k", { min: 0, max: MOST, step: 1 });
    const every = button(t("shots.every"), () => page.run("plot"), { class: "quiet" });
    lab.own.hidden = page.values.task !== "own";
    return [
      card(
        row(modelField(page), pick(page, "task", tasks), pick(page, "scoring", scorings)),
        lab.own,
        row(number(page, "item", { min: 1 }), number(page, "seed", { min: 0 }), k),
      ),
      h(
        "div",
        { class: "pair" },
        card(h("h2", {}, t("shots.prompt")), lab.prompt),
        card(h("h2", {}, t("shots.answers")), lab.answers, row(every), lab.curve),
      ),
    ];
  },
};

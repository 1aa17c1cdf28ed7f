// The few-shot lab: an item, K examples before it, and how likely each answer becomes.
import { post } from "../api.js";
import { h, put } from "../dom.js";
import { area, button, card, modelField, number, pick, range, row } from "../fields.js";
import { fixed, percent } from "../numbers.js";
import { bars, table } from "../parts.js";
import { chart } from "../pictures/chart.js";
import { t } from "../words.js";

const MOST = 8;

export default {
  name: "shots",
  needs: (model) => model.can.includes("score") || model.can.includes("fill"),
  defaults: (page) => ({ task: page.about.tasks[0] ?? "own", lines: t("shots.lines"), item: "1", k: "2", seed: "0", scoring: "total" }),

  build(page) {
    const own = h("div", { class: "field" });
    const prompt = h("pre", { tabindex: "0", "aria-label": t("shots.prompt") });
    const answers = h("div", {});
    const curve = h("div", {});
    const body = (shots) => ({
      model: page.values.model, task: page.values.task, lines: page.values.task === "own" ? page.values.lines : "",
      item: page.number("item", 1, 100000) - 1, shots, seed: page.number("seed", 0, 1e6), scoring: page.values.scoring,
    });
    page.work = async (signal) => {
      own.hidden = page.values.task !== "own";
      put(curve);
      const seen = await post("studio/shots", body(page.number("k", 0, MOST)), signal);
      put(prompt, seen.prompt);
      put(answers, bars(seen.choices.map((one) => ({ name: one.text, share: one.share, right: one.right }))),
        table([t("shots.answer"), "log p", t("tokens.count"), t("shots.score")], seen.choices.map((one) => [one.text, fixed(one.logprob), String(one.tokens), fixed(one.score)])));
    };
    const every = (signal) => all(body, curve, signal);
    const task = pick(page, "task", [...page.about.tasks.map((name) => [name, name]), ["own", t("shots.own")]]);
    const scoring = pick(page, "scoring", ["total", "token", "byte", "unconditional"].map((name) => [name, t(`scoring.${name}`)]));
    own.append(area(page, "lines", 6), h("p", { class: "note" }, t("shots.shape")));
    own.hidden = page.values.task !== "own";
    return [
      card(row(modelField(page), task, scoring), own, row(number(page, "item", { min: 1 }), number(page, "seed", { min: 0 }), range(page, "k", { min: 0, max: MOST, step: 1 }))),
      h("div", { class: "pair" }, card(h("h2", {}, t("shots.prompt")), prompt),
        card(h("h2", {}, t("shots.answers")), answers, row(button(t("shots.every"), () => page.run(every), { class: "quiet" })), curve)),
    ];
  },
};

/** The right answer's share with 0, 1, 2… examples, drawn as it comes. */
async function all(body, curve, signal) {
  const points = [];
  for (let k = 0; k <= MOST; k++) {
    const seen = await post("studio/shots", body(k), signal).catch((error) => (k && error.status === 400 ? null : Promise.reject(error)));
    if (!seen) break;
    points.push([k, seen.choices.find((one) => one.right)?.share ?? 0]);
    put(curve, chart([{ name: t("shots.right"), points, hue: "var(--c)" }], { across: "K", up: t("shots.right"), read: percent, floor: 0 }));
    if (k >= seen.most) break;
  }
}

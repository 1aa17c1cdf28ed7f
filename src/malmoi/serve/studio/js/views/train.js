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

export default {
  name: "train",
  alone: (about) => about.runs,
  needs: () => false,
  defaults: () => ({ runs: "" }),

  build(page) {
    const legend = h("fieldset", {});
    const picture = h("div", {});
    const numbers = h("div", {});
    const said = h("div", {});
    let found = [];
    let listed = "";
    const chosen = () => (page.values.runs ? page.values.runs.split("|") : found.slice(0, FIRST).map((run) => run.name));
    const hue = (run) => HUES[found.indexOf(run) % HUES.length];
    const toggle = (name, on) => {
      const names = found.map((run) => run.name).filter((one) => (one === name ? on : chosen().includes(one)));
      page.set("runs", names.join("|"));
      draw();
    };
    const furnish = () => put(legend, h("legend", {}, t("train.compare")), h("div", { class: "legend" }, found.map((run) => h("label", { class: "check" },
      h("input", { type: "checkbox", checked: chosen().includes(run.name), onchange: (event) => toggle(run.name, event.target.checked) }),
      h("span", { class: "swatch", style: { "--hue": hue(run) } }), run.name))));
    const draw = () => {
      const shown = found.filter((run) => chosen().includes(run.name));
      const lines = shown.flatMap((run) => [
        { name: run.name, points: run.loss, hue: hue(run) }, { name: `${run.name} ${t("train.valid")}`, points: run.valid, hue: hue(run), dashed: true }]);
      put(picture, lines.some((one) => one.points.length > 1) ? chart(lines, { across: t("train.tokens"), up: t("train.loss") }) : h("p", { class: "note" }, t("train.nothing")));
      put(numbers, table([t("train.run"), t("train.step"), t("train.loss"), t("train.valid"), t("train.speed"), t("train.time")], shown.map((run) => [
        run.name, whole(run.step), last(run.loss), last(run.valid), run.tokens_per_second ? short(run.tokens_per_second) : "–", `${Math.round(run.seconds)} s`])));
      put(said, shown.filter((run) => run.samples.length).map((run) => card(h("h2", {}, t("train.said", { name: run.name })),
        table([t("train.step"), t("train.sample")], run.samples.map((sample) => [whole(sample.step), sample.text])))));
    };
    page.work = async (signal) => {
      found = (await get("studio/runs", signal)).runs;
      const names = found.map((run) => run.name).join("|");
      if (names !== listed) furnish();
      listed = names;
      draw();
      page.timer = setTimeout(() => page.run(), EVERY);
    };
    return [card(legend, picture, h("p", { class: "note" }, t("train.hint"))), card(numbers), said];
  },
};

const last = (points) => (points.length ? fixed(points.at(-1)[1]) : "–");

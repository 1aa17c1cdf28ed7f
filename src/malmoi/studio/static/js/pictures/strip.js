// One dot per test row, in the line of its label: the further right, the more probable the true label.
import { s } from "../dom.js";
import { percent } from "../numbers.js";
import { wide } from "./fit.js";

const LINE = 46;
const FOOT = 26;

/** rows: {label, prediction, chance}; `choose(row)` when a dot is clicked. */
export function strip(labels, rows, { width, label, choose }) {
  const left = Math.min(0.4 * width, 16 + Math.max(...labels.map(wide)));
  const x = (chance) => left + 10 + chance * (width - left - 24);
  const y = (row, i) => LINE * (labels.indexOf(row.label) + 0.5) + ((i * 7) % 13) - 6;
  const height = LINE * labels.length + FOOT;
  const lines = labels.flatMap((name, i) => [
    s("line", { class: "axis", x1: left, x2: width - 8, y1: LINE * (i + 1), y2: LINE * (i + 1) }),
    s("text", { class: "soft", x: left - 8, y: LINE * (i + 0.5) + 4, "text-anchor": "end" }, name),
  ]);
  const feet = [0, 0.5, 1].map((value) =>
    s("text", { class: "soft", x: x(value), y: height - 8, "text-anchor": value === 1 ? "end" : "middle" }, percent(value)),
  );
  const dots = rows.map((row, i) =>
    s("circle", {
      class: row.prediction === row.label ? "tested" : "tested missed",
      cx: x(row.chance).toFixed(1),
      cy: y(row, i).toFixed(1),
      r: 4.5,
      onclick: () => choose(row),
    }),
  );
  return s("svg", { class: "picture", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, lines, feet, dots);
}

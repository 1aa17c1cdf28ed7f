// Lines over an axis: one colour each, round numbers at the ticks.
import { s } from "../dom.js";
import { short } from "../numbers.js";

const WIDEST = 720;
const EDGES = 76; // of the page and the card on a phone
const ROOM = { left: 58, right: 14, top: 26, bottom: 34 };
export const HUES = ["var(--a)", "var(--b)", "var(--c)", "var(--d)", "var(--soft)"];

/** series: {name, points: [[x, y]…], hue, dashed?}. */
export function chart(series, { across, up, read = short, height = 280, floor = null }) {
  const width = Math.min(WIDEST, innerWidth - EDGES); // so that words keep their size
  const points = series.flatMap((one) => one.points);
  const [xs, ys] = [0, 1].map((i) => points.map((point) => point[i]));
  const right = Math.max(...xs);
  const x = scale(Math.min(...xs), right, ROOM.left, width - ROOM.right, right);
  const low = floor ?? Math.min(...ys);
  const y = scale(low, Math.max(...ys, low + 1e-9), height - ROOM.bottom, ROOM.top);
  const grid = y.ticks.flatMap((value) => [
    s("line", { class: "axis", x1: ROOM.left, x2: width - ROOM.right, y1: y.at(value), y2: y.at(value) }),
    s("text", { class: "soft", x: ROOM.left - 8, y: y.at(value) + 4, "text-anchor": "end" }, read(value)),
  ]);
  const feet = x.ticks
    .filter((value) => value <= right)
    .map((value) =>
      s("text", { class: "soft", x: x.at(value), y: height - 14, "text-anchor": "middle" }, short(value)),
    );
  const drawn = series.filter((one) => one.points.length).map((one) => line(one, x, y));
  const label = `${up} / ${across}: ${series.map((one) => `${one.name} ${one.points.length ? read(one.points.at(-1)[1]) : ""}`).join(", ")}`;
  return s(
    "svg",
    { class: "picture", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    grid,
    feet,
    drawn,
    s("text", { class: "soft", x: 0, y: 12 }, up),
    s("text", { class: "soft", x: width - ROOM.right, y: height - 1, "text-anchor": "end" }, across),
  );
}

function line({ points, hue, dashed }, x, y) {
  const path = points.map(([px, py]) => `${x.at(px).toFixed(1)},${y.at(py).toFixed(1)}`).join(" ");
  const [ex, ey] = points.at(-1);
  return s(
    "g",
    {},
    s("polyline", {
      points: path,
      fill: "none",
      style: { stroke: hue },
      "stroke-width": 2,
      "stroke-linejoin": "round",
      "stroke-dasharray": dashed ? "5 4" : null,
    }),
    s("circle", { cx: x.at(ex), cy: y.at(ey), r: 3, style: { fill: hue } }),
  );
}

function scale(low, high, from, to, end = null) {
  const marks = ticks(low, high);
  const [first, last] = [marks[0], end ?? marks.at(-1)];
  return { ticks: marks, at: (value) => from + ((value - first) / (last - first || 1)) * (to - from) };
}

/** Round numbers from at most `low` to at least `high`. */
export function ticks(low, high, about = 5) {
  const span = high - low || Math.abs(high) || 1;
  const power = 10 ** Math.floor(Math.log10(span / about));
  const step = [1, 2, 5, 10].map((m) => m * power).find((size) => size * about >= span);
  const first = Math.floor(low / step + 1e-9);
  const last = Math.max(Math.ceil(high / step - 1e-9), first + 1);
  return Array.from({ length: last - first + 1 }, (_, i) => +((first + i) * step).toPrecision(12));
}

// A line chart: one colour per line, labels at the line ends, round numbers at the ticks.
import { s } from "../dom.js";
import { short } from "../numbers.js";
import { wide } from "./fit.js";

const ROOM = { left: 52, right: 16, top: 28, bottom: 36 };
const LINE = 15; // between two names
const NARROW = 420; // pixels: a phone
export const HUES = ["a", "b", "c", "d", "e", "f", "g", "i"].map((name) => `var(--${name})`);

/**
 * series: {name, points: [[x, y]…], hue, dashed?, label?}; lines with a `label` are labelled at their end. The y axis spans at
 * least `floor` to `ceiling`; the x axis may be logarithmic, and `at` marks a position on it.
 */
export function chart(series, { width, across, up, read = short, height = 280, floor = null, ceiling = null, at = null, log = false }) {
  const shown = series.filter((one) => one.points.length);
  const below = width < NARROW && shown.filter((one) => one.label).length > 1; // no room beside the lines
  const room = { ...ROOM, right: below ? ROOM.right : Math.max(ROOM.right, Math.min(0.4 * width, nameRoom(shown))) };
  const points = shown.flatMap((one) => one.points);
  const [xs, ys] = [0, 1].map((i) => points.map((point) => point[i]));
  const right = Math.max(...xs);
  const ends = [room.left, width - room.right];
  const x = xs.every((one) => one === right) ? middle(right, ...ends) : log ? powers(xs, ...ends) : scale(Math.min(...xs), right, ...ends, right);
  x.whole = xs.every(Number.isInteger); // layers and steps have nothing between them
  const high = Math.max(...ys, ceiling ?? -Infinity);
  const least = floor ?? Math.min(...ys);
  const low = least < high ? least : high - (Math.abs(high) || 1) / 2; // one value: round numbers around it
  const y = scale(low, least < high ? high : 2 * high - low, height - room.bottom, room.top);
  const label = `${up} / ${across}: ${shown.map((one) => `${one.name} ${read(one.points.at(-1)[1])}`).join(", ")}`;
  const lone = shown.every((one) => one.points.length === 1); // nothing but the values to see
  const svg = s(
    "svg",
    { class: "picture", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    axes(x, y, { width, height, room, read, right }),
    at !== null && s("line", { class: "hair", x1: x.at(at), x2: x.at(at), y1: room.top, y2: height - room.bottom }),
    shown.map((one) => line(one, x, y, lone && read)),
    below ? null : names(shown, y, { right: width - room.right, room: room.right - 10, bottom: height - 4 }),
    s("text", { class: "soft", x: 0, y: 12 }, up),
    s("text", { class: "soft", x: width - room.right, y: height - 2, "text-anchor": "end" }, across),
  );
  if (below) listed(svg, shown, width, height);
  return hovered(svg, shown, { x, y, width, height, room, read });
}

const nameRoom = (series) => Math.max(0, ...series.map((one) => (one.label ? 1.12 * wide(one.label) + 18 : 0)));

function axes(x, y, { width, height, room, read, right }) {
  const rows = y.ticks.flatMap((value) => [
    s("line", { class: "axis", x1: room.left, x2: width - room.right, y1: y.at(value), y2: y.at(value) }),
    s("text", { class: "soft", x: room.left - 8, y: y.at(value) + 4, "text-anchor": "end" }, read(value)),
  ]);
  let last = -Infinity; // where the number before it stands
  const roomy = (value) => value <= right && (!x.whole || Number.isInteger(value)) && x.at(value) - last >= 45 && ((last = x.at(value)), true);
  const feet = x.ticks
    .filter(roomy)
    .map((value) => s("text", { class: "soft", x: x.at(value), y: height - 18, "text-anchor": "middle" }, short(value)));
  return [rows, feet].flat();
}

function line({ points, hue, dashed }, x, y, read) {
  const path = points.map(([px, py]) => `${x.at(px).toFixed(1)},${y.at(py).toFixed(1)}`).join(" ");
  const [ex, ey] = points.at(-1);
  const end = dashed ? { r: 4, fill: "none", "stroke-width": 2, style: { stroke: hue } } : { r: 3, style: { fill: hue } };
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
    s("circle", { cx: x.at(ex), cy: y.at(ey), ...end }),
    read && s("text", { class: "soft", x: x.at(ex), y: y.at(ey) - 9, "text-anchor": "middle" }, read(ey)),
  );
}

/** Names at the ends of their lines, pushed apart where they would overlap. */
function names(series, y, { right, room, bottom }) {
  const placed = series
    .filter((one) => one.label)
    .map((one) => ({ ...one, from: y.at(one.points.at(-1)[1]), at: y.at(one.points.at(-1)[1]) }))
    .sort((one, other) => one.at - other.at);
  placed.forEach((one, i) => (one.at = Math.max(one.at, i ? placed[i - 1].at + LINE : LINE)));
  placed.forEach((one, i) => (one.at = Math.min(one.at, bottom - LINE * (placed.length - 1 - i))));
  return placed.map(({ label, hue, at }) => s("text", { class: "end", x: right + 9, y: at + 4, style: { fill: hue } }, cut(label, room)));
}

/** Names below the picture, in two columns. */
function listed(svg, series, width, height) {
  const named = series.filter((one) => one.label);
  const rows = Math.ceil(named.length / 2);
  const place = (i) => ({ x: i < rows ? 0 : width / 2, y: height + LINE * ((i % rows) + 1) });
  svg.append(...named.map(({ label, hue }, i) => s("text", { class: "end", ...place(i), style: { fill: hue } }, cut(label, width / 2 - 8))));
  svg.setAttribute("viewBox", `0 0 ${width} ${height + LINE * rows + 6}`);
}

/** Shortens a long name to its end, in which runs differ. */
function cut(label, room) {
  let shown = label;
  while (shown && 1.12 * wide(shown) > room) shown = shown.slice(1);
  return shown.length < label.length ? `…${shown.slice(1)}` : label;
}

/** Values under the pointer: the nearest point of every line. */
function hovered(svg, series, { x, y, width, height, room, read }) {
  const mark = s("line", { class: "hair", y1: room.top, y2: height - room.bottom, visibility: "hidden" });
  const text = s("text", { class: "soft", y: 12, "text-anchor": "end", x: width });
  svg.append(mark, text);
  svg.addEventListener("pointermove", (event) => {
    const at = event.offsetX * (width / svg.clientWidth);
    const near = series.map((one) => one.points.reduce((a, b) => (Math.abs(x.at(b[0]) - at) < Math.abs(x.at(a[0]) - at) ? b : a)));
    mark.setAttribute("x1", at);
    mark.setAttribute("x2", at);
    mark.setAttribute("visibility", "visible");
    text.textContent = cut(series.map((one, i) => `${one.name} ${read(near[i][1])}`).join("  ·  "), width - 110);
  });
  svg.addEventListener("pointerleave", () => {
    mark.setAttribute("visibility", "hidden");
    text.textContent = "";
  });
  return svg;
}

function scale(low, high, from, to, end = null) {
  const marks = ticks(low, high);
  const [first, last] = [marks[0], end ?? marks.at(-1)];
  return { ticks: marks, at: (value) => from + ((value - first) / (last - first || 1)) * (to - from) };
}

/** The scale of a single value, in the middle. */
const middle = (value, from, to) => ({ ticks: [value], at: () => (from + to) / 2 });

/** A logarithmic scale with ticks at 1, 2 and 5 times the powers of ten; values ≤ 0 are at its left end. */
function powers(values, from, to) {
  const low = Math.min(...values.filter((value) => value > 0), Math.max(...values, 1e-9));
  const high = Math.max(...values, low * 1.001);
  const first = Math.floor(Math.log10(low));
  const tens = Array.from({ length: Math.ceil(Math.log10(high)) - first + 1 }, (_, i) => 10 ** (first + i));
  const marks = tens.flatMap((ten) => [ten, 2 * ten, 5 * ten]).filter((value) => value >= low && value <= high);
  const share = (value) => Math.log(Math.max(value, low) / low) / Math.log(high / low);
  const few = ticks(low, high).filter((value) => value >= low); // within one power of ten
  return { ticks: marks.length > 1 ? marks : few, at: (value) => from + share(value) * (to - from) };
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

// Texts as selectable dots. Labels that would overlap are shown only for the selected dot.
import { s } from "../dom.js";
import { wide } from "./fit.js";

const EDGE = 24;
const LONG = 20; // characters of a name
const HIGH = 16; // pixels of a name
const FAR = 12; // from the middle of a dot to its name

export function plane(texts, points, { width, label, choose }) {
  const height = Math.round(Math.min(520, Math.max(300, 0.7 * width)));
  const x = spread(points.map((point) => point[0]), EDGE, width - EDGE);
  const y = spread(points.map((point) => point[1]), height - EDGE, EDGE);
  const places = points.map(([px, py]) => [x(px), y(py)]);
  const taken = places.map(([px, py]) => [px - 8, py - 8, px + 8, py + 8]);
  const dots = texts.map((text, i) => dot(text, places[i], spot(text, places[i], taken, { width, height }), () => choose(i)));
  return s("svg", { class: "picture", viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": label }, dots);
}

/** Maps values to positions between two edges. */
function spread(values, from, to) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return (value) => from + ((value - low) / (high - low || 1)) * (to - from);
}

const short = (text) => (text.length > LONG ? `${text.slice(0, LONG - 1)}…` : text);
const apart = ([a, b, c, d], [e, f, g, h]) => c <= e || g <= a || d <= f || h <= b;

/** The position of a label: right, left, above or below its dot; `free` is false if all are taken. */
function spot(text, [x, y], taken, { width, height }) {
  const size = wide(short(text));
  const tries = [
    { anchor: "start", dx: FAR, dy: 4, box: [x + FAR, y - 8, x + FAR + size, y + 8] },
    { anchor: "end", dx: -FAR, dy: 4, box: [x - FAR - size, y - 8, x - FAR, y + 8] },
    { anchor: "middle", dx: 0, dy: -FAR, box: [x - size / 2, y - FAR - HIGH, x + size / 2, y - FAR + 4] },
    { anchor: "middle", dx: 0, dy: FAR + 10, box: [x - size / 2, y + FAR - 2, x + size / 2, y + FAR + HIGH] },
  ].filter(({ box }) => box[0] >= 0 && box[2] <= width && box[1] >= 0 && box[3] <= height);
  const found = tries.find(({ box }) => taken.every((other) => apart(box, other)));
  if (found) taken.push(found.box);
  return { ...(found ?? tries[0] ?? { anchor: x > width / 2 ? "end" : "start", dx: 0, dy: -FAR }), free: Boolean(found) };
}

function dot(text, [x, y], { anchor, dx, dy, free }, choose) {
  const onkeydown = (event) => {
    if (!["Enter", " "].includes(event.key)) return;
    event.preventDefault();
    choose();
  };
  return s(
    "g",
    { class: `dot${free ? "" : " crowded"}`, tabindex: "0", role: "button", "aria-label": short(text), onclick: choose, onkeydown },
    s("title", {}, text),
    s("circle", { cx: x, cy: y, r: 7 }),
    s("text", { class: "soft", x: x + dx, y: y + dy, "text-anchor": anchor }, short(text)),
  );
}

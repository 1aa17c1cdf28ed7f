// Texts as dots that can be chosen.
import { s } from "../dom.js";

const WIDEST = 460;
const HEIGHT = 360;
const EDGE = 24;
const EDGES = 76; // of the page and the card on a phone
const LONG = 20; // characters of a name

export function plane(texts, points, label, choose) {
  const width = Math.min(WIDEST, innerWidth - EDGES); // so that words keep their size
  const x = spread(
    points.map((point) => point[0]),
    EDGE,
    width - EDGE,
  );
  const y = spread(
    points.map((point) => point[1]),
    HEIGHT - EDGE,
    EDGE,
  );
  const dots = texts.map((text, i) => dot(text, [x(points[i][0]), y(points[i][1])], width / 2, () => choose(i)));
  return s("svg", { class: "picture", viewBox: `0 0 ${width} ${HEIGHT}`, role: "group", "aria-label": label }, dots);
}

/** From values to places between two edges. */
function spread(values, from, to) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return (value) => from + ((value - low) / (high - low || 1)) * (to - from);
}

function dot(text, [x, y], middle, choose) {
  const onkeydown = (event) => {
    if (!["Enter", " "].includes(event.key)) return;
    event.preventDefault();
    choose();
  };
  const [beside, anchor] = x > middle ? [-11, "end"] : [11, "start"]; // names stay inside
  const name = text.length > LONG ? `${text.slice(0, LONG - 1)}…` : text;
  return s(
    "g",
    { class: "dot", tabindex: "0", role: "button", "aria-label": text, onclick: choose, onkeydown },
    s("circle", { cx: x, cy: y, r: 7 }),
    s("text", { class: "soft", x: x + beside, y: y + 4, "text-anchor": anchor }, name),
  );
}

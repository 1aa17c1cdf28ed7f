// One head as lines from the token that looks (left) to those it looks at (right).
import { s } from "../dom.js";
import { percent } from "../numbers.js";
import { visible } from "../parts.js";

const STEP = 28;
const LEFT = 126;
const RIGHT = 276;
const WIDTH = 420;
const FAINT = 0.02; // weaker ones are not drawn

export function lines(names, weights, label) {
  const height = names.length * STEP + 12;
  const y = (i) => 8 + i * STEP + STEP / 2;
  const strands = weights.map((row, q) => row.map((weight, k) => (weight < FAINT ? null : s("path", {
    d: `M${LEFT} ${y(q)}C${LEFT + 70} ${y(q)} ${RIGHT - 70} ${y(k)} ${RIGHT} ${y(k)}`, fill: "none",
    style: { stroke: "var(--a)" }, "stroke-width": 1 + 3 * weight, "stroke-opacity": Math.min(1, 0.12 + 0.88 * weight).toFixed(2),
  }))));
  const shares = names.map((_, k) => s("text", { class: "soft", x: WIDTH - 4, y: y(k) + 4, "text-anchor": "end" }));
  const light = (q) => {
    strands.forEach((some, i) => some.forEach((path) => path?.setAttribute("visibility", q === null || i === q ? "visible" : "hidden")));
    shares.forEach((text, k) => (text.textContent = q === null ? "" : percent(weights[q][k])));
    askers.forEach((node, i) => node.classList.toggle("on", i === q));
  };
  const askers = names.map((name, i) => s("g", {
    class: "look", tabindex: "0", role: "button", "aria-label": spoken(names, weights[i], i),
    onmouseenter: () => light(i), onmouseleave: () => light(null), onfocus: () => light(i), onblur: () => light(null),
  }, s("rect", { x: 4, y: y(i) - 12, width: LEFT - 10, height: 24, rx: 6, fill: "transparent" }),
  s("text", { x: LEFT - 12, y: y(i) + 5, "text-anchor": "end" }, clipped(name))));
  const targets = names.map((name, i) => s("text", { x: RIGHT + 10, y: y(i) + 5 }, clipped(name)));
  return s("svg", { class: "picture", viewBox: `0 0 ${WIDTH} ${height}`, role: "group", "aria-label": label }, strands.flat(), askers, targets, shares);
}

const clipped = (name) => (visible(name).length > 12 ? `${visible(name).slice(0, 11)}…` : visible(name));

/** The three strongest looks in words. */
function spoken(names, row, i) {
  const best = row.map((weight, k) => [weight, k]).sort((one, other) => other[0] - one[0]).slice(0, 3);
  return `${names[i]}: ${best.map(([weight, k]) => `${names[k]} ${percent(weight)}`).join(", ")}`;
}

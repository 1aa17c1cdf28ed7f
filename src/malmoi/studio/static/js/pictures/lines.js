// One head as lines from the query token (left) to the tokens it attends to (right).
import { s } from "../dom.js";
import { percent } from "../numbers.js";
import { visible } from "../parts.js";
import { wide } from "./fit.js";

const STEP = 28;
const NAME = 118; // of a token, at most
const SHARE = 48; // of a percentage
const WIDEST = 640;
const FAINT = 0.02; // weaker ones are not drawn
const LONG = 12; // characters of a name
const y = (i) => 8 + i * STEP + STEP / 2;

export function lines(names, weights, label, width) {
  const whole = Math.min(WIDEST, width);
  const room = Math.min(NAME, 26 + 1.1 * Math.max(...names.map((name) => wide(clipped(name)))));
  const [left, right] = [room, whole - room - SHARE];
  const strands = weights.map((row, q) =>
    row.map((weight, k) => (weight < FAINT ? null : strand([left, y(q)], [right, y(k)], weight))),
  );
  const shares = names.map((_, k) => s("text", { class: "soft", x: whole - 4, y: y(k) + 4, "text-anchor": "end" }));
  const light = (chosen) => {
    const seen = (i) => (chosen === null || i === chosen ? "visible" : "hidden");
    strands.forEach((some, i) => some.forEach((path) => path?.setAttribute("visibility", seen(i))));
    shares.forEach((text, k) => (text.textContent = chosen === null ? "" : percent(weights[chosen][k])));
    askers.forEach((node, i) => node.classList.toggle("on", i === chosen));
  };
  const askers = names.map((name, i) => asker(clipped(name), [i, room], spoken(names, weights[i], i), light));
  const targets = names.map((name, i) => s("text", { x: right + 10, y: y(i) + 5 }, clipped(name)));
  const given = { class: "picture", viewBox: `0 0 ${whole} ${names.length * STEP + 12}`, role: "group" };
  given.style = { "max-width": `${whole}px` };
  return s("svg", { ...given, "aria-label": label }, strands.flat(), askers, targets, shares);
}

function strand([left, from], [right, to], weight) {
  const bend = (right - left) / 2;
  return s("path", {
    d: `M${left} ${from}C${left + bend} ${from} ${right - bend} ${to} ${right} ${to}`,
    fill: "none",
    style: { stroke: "var(--a)" },
    "stroke-width": 1 + 3 * weight,
    "stroke-opacity": (0.12 + 0.88 * Math.min(1, weight)).toFixed(2),
  });
}

/** A query token: on hover or focus, only its own attention is shown. */
function asker(name, [i, room], words, light) {
  const [on, off] = [() => light(i), () => light(null)];
  return s(
    "g",
    {
      ...{ class: "look", tabindex: "0", role: "button", "aria-label": words },
      ...{ onmouseenter: on, onmouseleave: off, onfocus: on, onblur: off },
    },
    s("rect", { x: 4, y: y(i) - 12, width: room - 10, height: 24, rx: 6, fill: "transparent" }),
    s("text", { x: room - 12, y: y(i) + 5, "text-anchor": "end" }, name),
  );
}

function clipped(name) {
  const shown = visible(name);
  return shown.length > LONG ? `${shown.slice(0, LONG - 1)}…` : shown;
}

/** The three strongest attention weights as text. */
function spoken(names, row, i) {
  const best = row.map((weight, k) => [weight, k]).sort((one, other) => other[0] - one[0]);
  const told = best.slice(0, 3).map(([weight, k]) => `${visible(names[k])} ${percent(weight)}`);
  return `${clipped(names[i])}: ${told.join(", ")}`;
}

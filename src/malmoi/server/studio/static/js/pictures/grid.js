// Every head of every layer, small: one is chosen, by the mouse or with the arrow keys.
import { h } from "../dom.js";
import { t } from "../words.js";

const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

export function headGrid(weights, [layer, head], choose) {
  const heads = weights[0].length;
  const colour = accent();
  const cell = (l, k) => {
    const here = l === layer && k === head;
    return h(
      "button",
      {
        type: "button",
        role: "radio",
        "aria-checked": String(here),
        tabindex: here ? "0" : "-1",
        "aria-label": t("attention.one", { layer: l + 1, head: k + 1 }),
        onclick: () => choose(l, k),
      },
      thumbnail(weights[l][k], colour),
    );
  };
  const labels = [h("span", {}), ...weights[0].map((_, k) => h("span", {}, String(k + 1)))];
  const rows = weights.flatMap((some, l) => [h("span", {}, String(l + 1)), ...some.map((_, k) => cell(l, k))]);
  const grid = h(
    "div",
    { class: "heads", role: "radiogroup", "aria-label": t("attention.all"), style: { "--heads": String(heads) } },
    labels,
    rows,
  );
  grid.addEventListener("keydown", (event) => {
    const step = STEPS[event.key];
    if (!step) return;
    event.preventDefault();
    const [l, k] = [layer + step[0], head + step[1]];
    if (weights[l]?.[k] === undefined) return;
    const card = grid.parentElement;
    choose(l, k);
    card.querySelector('[aria-checked="true"]').focus();
  });
  return grid;
}

/** One head as pixels, one a pair of tokens. */
function thumbnail(weights, colour) {
  const size = weights.length;
  const canvas = h("canvas", { width: size, height: size, "aria-hidden": "true" });
  const brush = canvas.getContext("2d");
  brush.fillStyle = colour;
  weights.forEach((row, y) =>
    row.forEach((weight, x) => {
      brush.globalAlpha = weight;
      brush.fillRect(x, y, 1, 1);
    }),
  );
  return canvas;
}

/** The accent as it is now, light or dark. */
function accent() {
  const probe = document.body.appendChild(h("span", { style: { color: "var(--a)" } }));
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

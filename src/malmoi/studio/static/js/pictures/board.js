// A grid of switches for every part of the network: layers down, heads and sublayers across. Tab and arrow keys work.
import { h } from "../dom.js";
import { fixed } from "../numbers.js";
import { t } from "../words.js";

const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
export const SUBLAYERS = ["attention", "mlp", "layer"];

/** `worth(layer, part)` returns a number that colours a switch, or null; parts are head numbers and the names above. */
export function board({ depth, heads }, isOff, worth, toggle) {
  const parts = [...Array(heads).keys(), ...SUBLAYERS];
  const most = Math.max(1e-9, ...parts.flatMap((part) => layers(depth).map((l) => Math.abs(worth(l, part) ?? 0))));
  const cells = layers(depth).map((layer) => parts.map((part) => cell(layer, part)));
  function cell(layer, part) {
    const value = worth(layer, part);
    const name = partName(layer, part);
    const said = value === null ? name : `${name}: ${value > 0 ? "+" : ""}${fixed(value, 4)}`;
    return h("button", {
      type: "button",
      class: value === null ? null : value > 0 ? "worse" : "better",
      style: { "--p": String(value === null ? 0 : Math.abs(value) / most) },
      "aria-pressed": String(isOff(layer, part)),
      "aria-label": said,
      title: said,
      tabindex: layer || part ? "-1" : "0",
      onclick: (event) => toggle(layer, part, event.currentTarget),
    });
  }
  const heading = parts.map((part) => h("span", {}, typeof part === "number" ? part + 1 : t(`ablate.${part}.short`)));
  const grid = h(
    "div",
    { class: "board", role: "group", "aria-label": t("ablate.board"), style: { "--columns": String(parts.length) } },
    h("span", {}),
    heading,
    cells.flatMap((row, layer) => [h("span", {}, layer + 1), ...row]),
  );
  grid.addEventListener("keydown", (event) => move(event, cells));
  return h("div", { class: "wide", tabindex: "-1" }, grid);
}

export const partName = (layer, part) =>
  typeof part === "number"
    ? t("attention.one", { layer: layer + 1, head: part + 1 })
    : t(`ablate.${part}.one`, { layer: layer + 1 });

const layers = (depth) => [...Array(depth).keys()];

function move(event, cells) {
  const step = STEPS[event.key];
  const row = cells.findIndex((some) => some.includes(event.target));
  if (!step || row < 0) return;
  event.preventDefault();
  const next = cells[row + step[0]]?.[cells[row].indexOf(event.target) + step[1]];
  if (!next) return;
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

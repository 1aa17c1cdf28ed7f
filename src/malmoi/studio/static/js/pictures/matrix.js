// One head as a matrix: each row is a query token, each column a key token.
import { s } from "../dom.js";
import { percent } from "../numbers.js";
import { visible } from "../parts.js";

const CELL = 26;
const LEFT = 110;
const TOP = 84;

const short = (name) => (visible(name).length > 13 ? `${visible(name).slice(0, 12)}…` : visible(name));

/** `columns` names the keys if they belong to another text. */
export function matrix(names, weights, label, _width = 0, columns = names) {
  const [width, height] = [columns.length * CELL, names.length * CELL];
  const cells = weights.flatMap((row, q) =>
    row.map((weight, k) =>
      s(
        "rect",
        {
          x: LEFT + k * CELL,
          y: TOP + q * CELL,
          width: CELL - 1,
          height: CELL - 1,
          rx: 3,
          style: { fill: "var(--a)" },
          "fill-opacity": Math.max(0.04, Math.min(1, weight)).toFixed(2),
        },
        s("title", {}, `${visible(names[q])} → ${visible(columns[k])}: ${percent(weight)}`),
      ),
    ),
  );
  const texts = [
    ...names.map((name, i) =>
      s("text", { x: LEFT - 8, y: TOP + i * CELL + 17, "text-anchor": "end" }, short(name)),
    ),
    ...columns.map((name, i) =>
      s("text", { transform: `translate(${LEFT + i * CELL + 17},${TOP - 8}) rotate(-55)` }, short(name)),
    ),
  ];
  return s(
    "svg",
    {
      class: "picture",
      viewBox: `0 0 ${LEFT + width + 40} ${TOP + height}`,
      style: { "max-width": "var(--natural)", "--natural": `${LEFT + width + 40}px` },
      role: "img",
      "aria-label": label,
    },
    cells,
    texts,
  );
}

// Small pictures that several views share: bars, numbers, masks.
import { h, s } from "./dom.js";
import { percent } from "./numbers.js";

/** Shares as bars: {name, share, value?, right?}; with `choose`, names are buttons. The largest is coloured. */
export function bars(rows, choose) {
  const top = Math.max(...rows.map((row) => row.share));
  return h(
    "ul",
    { class: "bars" },
    rows.map((row) => {
      const kind = [row.share === top && "best", row.right && "right"].filter(Boolean).join(" ");
      const name = choose
        ? h("button", { type: "button", class: "name", onclick: () => choose(row) }, visible(row.name))
        : h("span", { class: "name" }, visible(row.name));
      const bar = h("div", { class: "bar" }, h("i", { style: { "--share": String(Math.min(1, row.share)) } }));
      return h("li", { class: kind || null }, name, bar, h("b", {}, row.value ?? percent(row.share)));
    }),
  );
}

/** A token that can be seen, whatever it is made of: spaces as ·, bytes of a character as ⟨EC 96⟩. */
export function visible(name) {
  if (name.startsWith("bytes:")) return `⟨${name.slice(6).replaceAll("\\x", " ").trim().toUpperCase()}⟩`;
  const shown = name.replace(/^ +/, (spaces) => "·".repeat(spaces.length)).replaceAll("\n", "↵");
  return (
    shown.replace(/\p{Cc}/gu, (mark) => `⟨${mark.codePointAt(0).toString(16).toUpperCase().padStart(2, "0")}⟩`) || "∅"
  );
}

export function facts(pairs) {
  return h(
    "dl",
    { class: "facts" },
    pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
  );
}

/** Who sees whom: rows of 0 and 1. One path for all cells, so that large ones stay light. */
export function maskPicture(rows, label, now = -1) {
  const size = rows.length;
  const gap = size > 40 ? 0.06 : 0.1;
  const cell = (x, y) => `M${x + gap} ${y + gap}h${1 - 2 * gap}v${1 - 2 * gap}h${2 * gap - 1}z`;
  const cells = rows.flatMap((row, y) => [...row].map((seen, x) => (seen === "1" ? cell(x, y) : "")));
  const width = `${Math.min(24, 1.7 * size)}rem`;
  const svg = s(
    "svg",
    {
      class: "picture mask",
      style: { "max-width": width },
      viewBox: `-0.2 -0.2 ${size + 0.4} ${size + 0.4}`,
      role: "img",
      "aria-label": label,
    },
    s("rect", { x: 0, y: 0, width: size, height: size, rx: 0.15 }),
    s("path", { d: cells.join("") }),
  );
  if (now >= 0) svg.append(s("rect", { class: "now", x: 0, y: now, width: size, height: 1, rx: 0.12 }));
  return svg;
}

/** A table of numbers for those who would rather read than look. */
export function table(head, rows, kind = "full") {
  const cells = (row, name) =>
    row.map((value, i) => h(i ? name : "th", i || name === "th" ? {} : { scope: "row" }, value));
  return h(
    "div",
    { class: "wide", tabindex: "0", role: "region", "aria-label": head.filter(Boolean).slice(0, 2).join(", ") },
    h(
      "table",
      { class: kind },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          head.map((name) => h("th", { scope: "col" }, name)),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map((row) => h("tr", {}, cells(row, "td"))),
      ),
    ),
  );
}

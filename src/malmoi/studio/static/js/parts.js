// Small components that several views share: bars, numbers, masks.
import { h, s } from "./dom.js";
import { percent } from "./numbers.js";

/**
 * Bars: {name, share, value?, right?, mine?, kind?}; with `choose`, names are buttons. The largest is highlighted
 * with `best`; `right` adds a tick, `mine` a mark.
 */
export function bars(rows, choose, { best = true } = {}) {
  const ranked = rows.filter((row) => row.kind !== "rest").map((row) => row.share);
  const top = best ? Math.max(...ranked) : Infinity;
  return h(
    "ul",
    { class: "bars" },
    rows.map((row) => {
      const kind = [row.share === top && row.kind !== "rest" && "best", row.right && "right", row.mine && "mine", row.kind].filter(Boolean).join(" ");
      const name = choose && row.kind !== "rest"
        ? h("button", { type: "button", class: "name", onclick: () => choose(row) }, visible(row.name))
        : h("span", { class: "name" }, row.kind === "rest" ? row.name : visible(row.name));
      const bar = h("div", { class: "bar" }, h("i", { style: { "--share": String(Math.min(1, row.share)) } }));
      return h("li", { class: kind || null }, name, bar, h("b", {}, row.value ?? percent(row.share)));
    }),
  );
}

const SPACES = { " ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍", "\u00a0": "⍽", "\u3000": "␣" };
const hex = (mark) => `⟨${mark.codePointAt(0).toString(16).toUpperCase().padStart(2, "0")}⟩`;

/** A visible form of a token: a leading space as ·, only spaces as ␣, bytes as ⟨EC 96⟩. */
export function visible(name) {
  if (name.startsWith("bytes:")) return `⟨${name.slice(6).replaceAll("\\x", " ").trim().toUpperCase()}⟩`;
  const alone = /^\s+$/.test(name);
  return (
    name
      .replace(/^ +(?=\S)/, (spaces) => "·".repeat(spaces.length))
      .replace(alone ? /\s/g : /[\n\t\r]/g, (mark) => SPACES[mark] ?? hex(mark))
      .replace(/[\p{Cc}\p{Cf}\p{Co}\p{Cn}\ufe00-\ufe0f]/gu, hex)
      .replace(/^\p{M}/u, "◌$&") || "∅"
  );
}

export function facts(pairs) {
  return h(
    "dl",
    { class: "facts" },
    pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
  );
}

/** An attention mask from rows of 0 and 1. All cells are one path, to keep large masks fast. */
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

/** The same numbers as an accessible table. */
export function table(head, rows, label = head.filter(Boolean).slice(0, 2).join(", ")) {
  const cells = (row, name) =>
    row.map((value, i) => h(i ? name : "th", i || name === "th" ? {} : { scope: "row" }, value));
  return h(
    "div",
    { class: "wide", tabindex: "0", role: "group", "aria-label": label },
    h(
      "table",
      { class: "full" },
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

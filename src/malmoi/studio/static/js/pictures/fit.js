// Draws pictures for the width of their card, so that text keeps its size; redraws when the width changes.
import { put } from "../dom.js";

const drawn = new WeakMap();
const watch = globalThis.ResizeObserver && new ResizeObserver((some) => some.forEach(({ target }) => redraw(target)));

/** Draws into an element on the page; `draw` receives its width in pixels. */
export function fit(holder, draw) {
  drawn.set(holder, { draw, width: 0 });
  watch.observe(holder);
  redraw(holder);
}

function redraw(holder) {
  const one = drawn.get(holder);
  const width = Math.floor(holder.clientWidth);
  if (!width || width === one.width) return;
  one.width = width;
  put(holder, one.draw(width));
}

/** The approximate width of a text at 12 px. */
export const wide = (text) => [...text].reduce((sum, letter) => sum + (letter > "\u2e80" ? 12.5 : 6.6), 0);

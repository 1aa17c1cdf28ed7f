// Thumbnails of every head of every layer; choose one with the mouse or the arrow keys.
import { h } from "../dom.js";
import { t } from "../words.js";

const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

export class HeadGrid {
  /** thumbnails[layer][head]: bytes in base64, `size` × `size` each. */
  constructor(thumbnails, size, choose) {
    const colour = accent();
    this.choose = choose;
    this.cells = thumbnails.map((heads, layer) =>
      heads.map((bytes, head) => this.cell(layer, head, thumbnail(atob(bytes), size, colour))),
    );
    const labels = [h("span", {}), ...thumbnails[0].map((_, head) => h("span", {}, String(head + 1)))];
    const rows = this.cells.flatMap((cells, layer) => [h("span", {}, String(layer + 1)), ...cells]);
    const given = { class: "heads", role: "radiogroup", "aria-label": t("attention.all") };
    const style = { "--heads": String(thumbnails[0].length) };
    this.node = h("div", { ...given, style, onkeydown: (event) => this.step(event) }, labels, rows);
  }

  cell(layer, head, picture) {
    const label = t("attention.one", { layer: layer + 1, head: head + 1 });
    const given = { type: "button", role: "radio", "aria-label": label };
    return h("button", { ...given, onclick: () => this.choose(layer, head) }, picture);
  }

  select(layer, head) {
    this.place = [layer, head];
    this.cells.flat().forEach((cell) => {
      const here = cell === this.cells[layer][head];
      cell.setAttribute("aria-checked", String(here));
      cell.tabIndex = here ? 0 : -1;
    });
  }

  step(event) {
    const step = STEPS[event.key];
    if (!step) return;
    event.preventDefault();
    const [layer, head] = [this.place[0] + step[0], this.place[1] + step[1]];
    const cell = this.cells[layer]?.[head];
    if (!cell) return;
    this.choose(layer, head);
    cell.focus();
  }
}

/** One head as pixels in the accent colour, by strength. */
function thumbnail(bytes, size, [red, green, blue]) {
  const canvas = h("canvas", { width: size, height: size, "aria-hidden": "true" });
  const brush = canvas.getContext("2d");
  const pixels = brush.createImageData(size, size);
  for (let i = 0; i < bytes.length; i++) pixels.data.set([red, green, blue, bytes.charCodeAt(i)], 4 * i);
  brush.putImageData(pixels, 0, 0);
  return canvas;
}

/** The current accent colour (light or dark) as red, green, blue. */
function accent() {
  const probe = document.body.appendChild(h("span", { style: { color: "var(--a)" } }));
  const found = getComputedStyle(probe).color;
  probe.remove();
  const brush = new OffscreenCanvas(1, 1).getContext("2d");
  brush.fillStyle = found;
  brush.fillRect(0, 0, 1, 1);
  return [...brush.getImageData(0, 0, 1, 1).data].slice(0, 3);
}

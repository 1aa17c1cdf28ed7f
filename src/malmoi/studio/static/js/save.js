// Saves a picture as SVG with inlined colours, or as PNG. HTML parts (bars, tokens, tables) are
// redrawn as SVG at their position on the page.
import { s } from "./dom.js";

const KEPT = [
  ...["fill", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "fill-opacity", "opacity", "visibility"],
  ...["font-family", "font-size", "font-weight"],
];
const SHARP = 2; // pixels of a PNG for one on the page
const CONTROLS = ".hidden, input, select, textarea, details:not([open]), button.quiet:not([aria-pressed])";
const CLEAR = "rgba(0, 0, 0, 0)";

export function saveSvg(node, name) {
  download(URL.createObjectURL(new Blob([written(node)], { type: "image/svg+xml" })), `${name}.svg`);
}

export async function savePng(node, name) {
  const picture = new Image();
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(written(node))}`;
  await picture.decode();
  const [width, height] = [SHARP * picture.width, SHARP * picture.height];
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const brush = canvas.getContext("2d");
  brush.fillStyle = getComputedStyle(node.closest(".card") ?? document.body).backgroundColor;
  brush.fillRect(0, 0, width, height);
  brush.drawImage(picture, 0, 0, width, height);
  canvas.toBlob((blob) => download(URL.createObjectURL(blob), `${name}.png`));
}

function written(node) {
  const svg = node instanceof SVGSVGElement ? standalone(node) : drawn(node);
  svg.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  return new XMLSerializer().serializeToString(svg);
}

/** A standalone picture with inlined styles. */
function standalone(svg) {
  const copy = svg.cloneNode(true);
  const copies = [copy, ...copy.querySelectorAll("*")];
  [svg, ...svg.querySelectorAll("*")].forEach((node, i) => {
    const style = getComputedStyle(node);
    for (const name of KEPT) copies[i].setAttribute(name, style.getPropertyValue(name));
    for (const name of ["class", "style"]) copies[i].removeAttribute(name);
  });
  const { width, height } = svg.viewBox.baseVal;
  copy.setAttribute("width", width);
  copy.setAttribute("height", height);
  return copy;
}

/** Elements as rectangles, text and pictures at their positions; for a view, everything below its fields. */
function drawn(root) {
  const frame = root.getBoundingClientRect();
  const first = root.children[1] ?? root;
  const above = first.getBoundingClientRect().top;
  const at = ({ left, top }) => ({ x: (left - frame.left).toFixed(1), y: (top - above).toFixed(1) });
  const [width, height] = [Math.ceil(root.scrollWidth), Math.ceil(frame.bottom - above)];
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, width, height });
  const visit = (node) => {
    if (node.nodeType === Node.TEXT_NODE) return svg.append(...words(node, at));
    if (node.nodeType !== Node.ELEMENT_NODE || !node.checkVisibility()) return;
    if (node.matches(CONTROLS)) return;
    const box = node.getBoundingClientRect();
    if (node instanceof SVGSVGElement || node.matches("canvas")) return svg.append(inside(node, box, at(box)));
    const back = rectangle(node, box, at(box));
    if (back) svg.append(back);
    node.childNodes.forEach(visit);
  };
  for (let node = first; node; node = node.nextElementSibling) visit(node);
  return svg;
}

function inside(node, { width, height }, place) {
  if (node.matches("canvas")) return s("image", { ...place, width, height, href: node.toDataURL(), style: { "image-rendering": "pixelated" } });
  const copy = standalone(node);
  for (const [name, value] of Object.entries({ ...place, width, height })) copy.setAttribute(name, value);
  return copy;
}

function rectangle(node, { width, height }, place) {
  const style = getComputedStyle(node);
  const line = Number.parseFloat(style.borderTopWidth);
  if (style.backgroundColor === CLEAR && !line) return null;
  const stroke = line ? { stroke: style.borderTopColor, "stroke-width": line } : {};
  if (line && style.borderTopStyle === "dashed") stroke["stroke-dasharray"] = "3 3";
  return s("rect", { ...place, width, height, rx: style.borderTopLeftRadius, fill: style.backgroundColor, ...stroke });
}

/** Each word of a text at its position, on the baseline of its font. */
function words(text, at) {
  const style = getComputedStyle(text.parentElement);
  const brush = new OffscreenCanvas(1, 1).getContext("2d");
  brush.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
  const { fontBoundingBoxAscent: up, fontBoundingBoxDescent: down } = brush.measureText("x");
  const look = { fill: style.color, "font-family": style.fontFamily, "font-size": style.fontSize };
  return [...text.data.matchAll(/\S+/g)].flatMap((word) => {
    const range = document.createRange();
    range.setStart(text, word.index);
    range.setEnd(text, word.index + word[0].length);
    const [box] = range.getClientRects();
    if (!box) return [];
    const { x, y } = at(box);
    const base = Number(y) + (box.height * up) / (up + down);
    return [s("text", { x, y: base.toFixed(1), "font-weight": style.fontWeight, ...look }, word[0])];
  });
}

function download(address, name) {
  Object.assign(document.createElement("a"), { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

// A picture as a file: SVG with its colours written out, or PNG drawn from that.
const KEPT = [
  "fill",
  "stroke",
  "stroke-width",
  "stroke-opacity",
  "fill-opacity",
  "opacity",
  "font-family",
  "font-size",
  "font-weight",
];
const SHARP = 2; // pixels of a PNG for one on the page

export function saveSvg(svg, name) {
  download(URL.createObjectURL(new Blob([standalone(svg)], { type: "image/svg+xml" })), `${name}.svg`);
}

export async function savePng(svg, name) {
  const { width, height } = svg.viewBox.baseVal;
  const picture = new Image();
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(standalone(svg))}`;
  await picture.decode();
  const canvas = Object.assign(document.createElement("canvas"), { width: SHARP * width, height: SHARP * height });
  const brush = canvas.getContext("2d");
  brush.fillStyle = getComputedStyle(svg.closest(".card") ?? document.body).backgroundColor;
  brush.fillRect(0, 0, canvas.width, canvas.height);
  brush.drawImage(picture, 0, 0, canvas.width, canvas.height);
  canvas.toBlob((blob) => download(URL.createObjectURL(blob), `${name}.png`));
}

/** The picture by itself: what style sheets say of it becomes its own. */
function standalone(svg) {
  const copy = svg.cloneNode(true);
  const pairs = [svg, ...svg.querySelectorAll("*")].map((node, i) => [node, [copy, ...copy.querySelectorAll("*")][i]]);
  for (const [node, other] of pairs) {
    const style = getComputedStyle(node);
    for (const name of KEPT) other.setAttribute(name, style.getPropertyValue(name));
    for (const name of ["class", "style"]) other.removeAttribute(name);
  }
  const { width, height } = svg.viewBox.baseVal;
  copy.setAttribute("width", width);
  copy.setAttribute("height", height);
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  return new XMLSerializer().serializeToString(copy);
}

function download(address, name) {
  Object.assign(document.createElement("a"), { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

// Creates elements. Text is always inserted as text, never parsed as HTML.
const SVG = "http://www.w3.org/2000/svg";

export function h(name, given = {}, ...children) {
  return fill(document.createElement(name), given, children);
}

export function s(name, given = {}, ...children) {
  return fill(document.createElementNS(SVG, name), given, children);
}

function fill(node, given, children) {
  for (const [name, value] of Object.entries(given)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style")
      for (const [property, set] of Object.entries(value)) node.style.setProperty(property, set);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function put(node, ...children) {
  node.replaceChildren(...children.flat().filter(Boolean));
  return node;
}

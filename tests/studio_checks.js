// What an accessibility checker would ask of the page; returns sentences about what is wrong.
() => {
  const wrong = [];
  const told = (node) =>
    `${node.tagName.toLowerCase()}${node.id ? `#${node.id}` : ""}.${node.getAttribute("class") ?? ""} “${node.textContent.trim().slice(0, 30)}”`;
  const shown = (node) =>
    node.checkVisibility({ visibilityProperty: true, contentVisibilityAuto: true }) &&
    !node.closest("[aria-hidden=true], .hidden, .skip");

  // one heading, a language, unique ids
  if (document.querySelectorAll("h1").length !== 1) wrong.push("there is not exactly one h1");
  if (!["ko", "en"].includes(document.documentElement.lang)) wrong.push("the page has no language");
  const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
  for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) wrong.push(`the id ${id} is used twice`);

  // every control has a name, every picture too
  const named = (node) =>
    node.getAttribute("aria-label") ||
    node.textContent.trim() ||
    node.title ||
    (node.labels?.length && node.labels[0].textContent.trim()) ||
    node.alt === "";
  for (const node of document.querySelectorAll(
    "button, a, input, select, textarea, [role=button], [role=img], [role=group], [role=region], img",
  )) {
    if (!named(node)) wrong.push(`${told(node)} has no name`);
  }

  // text can be read: WCAG 2.2 §1.4.3
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], below) => [r, g, b].map((value, i) => value * a + below[i] * (1 - a));
  const behind = (node) => {
    const layers = [];
    for (let at = node; at; at = at.parentElement) layers.push(rgba(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255]);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb
      .map((value) => value / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) =>
    (Math.max(light(one), light(other)) + 0.05) / (Math.min(light(one), light(other)) + 0.05);
  for (const node of document.querySelectorAll("body *")) {
    const text = [...node.childNodes].some((child) => child.nodeType === Node.TEXT_NODE && child.data.trim());
    if (
      !(text || node.matches("input:not([type=range], [type=checkbox]), textarea, select")) ||
      !shown(node) ||
      node.matches("script, noscript, title, option")
    )
      continue;
    const style = getComputedStyle(node);
    const back = behind(node.closest("svg")?.parentElement ?? node);
    const ratio = contrast(over(rgba(node.namespaceURI.endsWith("svg") ? style.fill : style.color), back), back);
    if (ratio < 4.5) wrong.push(`${told(node)} has a contrast of ${ratio.toFixed(2)}`);
  }
  return [...new Set(wrong)];
};

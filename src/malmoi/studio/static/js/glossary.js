// Explains technical terms in place: the first occurrence of each in a text can be opened.
import { get } from "./api.js";
import { h, put } from "./dom.js";

let terms = {};
let finder = null;

export async function learn(language) {
  terms = await get(`words/glossary.${language}.json`);
  const forms = Object.values(terms).flatMap(({ forms: some }) => some);
  const ordered = forms.sort((one, other) => other.length - one.length).map((form) => form.replace(/[[\]]/g, "\\$&"));
  // match whole English words; a Korean word may be followed by a particle, but not be the end of another
  const [before, after] = language === "ko" ? ["(?<!\\p{L})", ""] : ["(?<![\\p{L}-])", "(?![\\p{L}-])"];
  finder = new RegExp(`${before}(?:${ordered.join("|")})${after}`, language === "ko" ? "gu" : "giu");
}

const named = (form) => Object.keys(terms).find((id) => terms[id].forms.some((one) => one.toLowerCase() === form.toLowerCase()));

/** A text in which the first occurrence of each term can be opened; `met` holds the terms that occurred before. */
export function gloss(text, met = new Set()) {
  const parts = [];
  let from = 0;
  for (const found of text.matchAll(finder)) {
    const id = named(found[0]);
    if (!id || met.has(id)) continue;
    met.add(id);
    parts.push(text.slice(from, found.index), word(id, found[0]));
    from = found.index + found[0].length;
  }
  return [...parts, text.slice(from)];
}

/** A question mark next to a field whose name is in the glossary, or nothing. */
export function help(field, label) {
  const id = Object.keys(terms).find((one) => terms[one].fields.includes(field));
  if (!id) return null;
  const node = h("button", { type: "button", class: "help", "aria-label": label, onclick: () => open(node, id) }, "?");
  return node;
}

/** An inline term. Not a button, which would be a box that allows line breaks around it. */
function word(id, words) {
  const onkeydown = (event) => ["Enter", " "].includes(event.key) && (event.preventDefault(), open(node, id));
  const node = h("span", { class: "glossed", role: "button", tabindex: "0", onclick: () => open(node, id), onkeydown }, words);
  return node;
}

/** Shows the explanation of a term below it. */
function open(node, id) {
  const box = document.getElementById("meaning");
  put(box, h("b", {}, terms[id].forms[0]), " ", terms[id].says);
  box.showPopover();
  const { left, bottom } = node.getBoundingClientRect();
  const room = document.documentElement.clientWidth - box.offsetWidth - 8;
  box.style.setProperty("left", `${Math.max(8, Math.min(left, room))}px`);
  box.style.setProperty("top", `${Math.min(bottom + 6, innerHeight - box.offsetHeight - 8)}px`);
}

// Labelled controls that are bound to a page's settings.
import { h } from "./dom.js";
import { help } from "./glossary.js";
import { comparable } from "./state.js";
import { t } from "./words.js";

function labelled(page, name, control, ...beside) {
  control.id = `field-${name}${page.suffix}`;
  const label = t(`field.${name}`);
  const words = h("label", { for: control.id }, label, ...beside);
  return h("div", { class: "field" }, words, help(name, t("hour.help", { name: label })), control);
}

const bound = (page, name) => (event) => page.changed(name, event.target.value);

export function area(page, name, rows = 3, given = {}) {
  const control = h("textarea", { rows, spellcheck: "false", oninput: bound(page, name), ...given });
  control.value = page.values[name];
  return labelled(page, name, control);
}

export function line(page, name, given = {}) {
  return labelled(
    page,
    name,
    h("input", { type: "text", value: page.values[name], spellcheck: "false", oninput: bound(page, name), ...given }),
  );
}

export const number = (page, name, given = {}) => line(page, name, { type: "number", ...given });

/** A slider that shows its value, formatted by `read`; `then` replaces the page's work on change. */
export function range(page, name, given, read = (value) => value, then = null) {
  page.number(name, Number(given.min), Number(given.max)); // a link may hold another
  const shown = h("output", {}, read(page.values[name]));
  const control = h("input", {
    type: "range",
    value: page.values[name],
    ...given,
    oninput: (event) => {
      shown.textContent = read(event.target.value);
      if (!then) return page.changed(name, event.target.value);
      page.set(name, event.target.value);
      then();
    },
  });
  control.value = page.values[name];
  const field = labelled(page, name, control, shown);
  shown.setAttribute("for", control.id);
  return field;
}

/** A select field; each option is [value, label]. */
export function pick(page, name, options) {
  const control = h(
    "select",
    { onchange: bound(page, name) },
    options.map(([value, words]) => h("option", { value }, words)),
  );
  control.value = page.values[name];
  if (control.selectedIndex < 0 && options.length && page.suffix) control.selectedIndex = options.length - 1;
  if (control.selectedIndex < 0 && options.length) {
    page.warn(t("link.number", { name: t(`field.${name}`), value: page.values[name], used: options[0][1] }));
    page.set(name, options[0][0]);
    control.selectedIndex = 0;
  }
  return labelled(page, name, control);
}

/** The model and the model to compare with; another model may need other fields. */
export function modelField(page) {
  const { model: before } = page.values;
  const other = page.values.compare;
  const model = pick(page, "model", page.models.map(({ name }) => [name, name]));
  model.querySelector("select").addEventListener("change", ({ target }) => {
    if (target.value === other) page.set("compare", before); // the two change places
    page.rebuild();
  });
  const others = comparable(page.view, page.about, before);
  if (!others.length) return model;
  const compare = pick(page, "compare", [["", t("none")], ...others.map((name) => [name, name])]);
  compare.querySelector("select").addEventListener("change", () => page.rebuild());
  return [model, compare];
}

const READINGS = ["masked", "causal"];
/** Whether the model was trained both ways: it generates, and it fills in. */
const bothWays = (model) => model.causal && model.can.includes("fill");
export const readingField = (page) => page.some(bothWays) && pick(page, "reading", READINGS.map((name) => [name, t(`reading.${name}`)]));
/** The setting of that field, for a request about such a model. */
export const reading = ({ model, values }) => (bothWays(model) ? { reading: values.reading } : {});

export function check(page, name) {
  const control = h("input", {
    type: "checkbox",
    checked: page.values[name] === "yes",
    onchange: (event) => page.changed(name, event.target.checked ? "yes" : "no"),
  });
  return h("label", { class: "check" }, control, t(`field.${name}`));
}

export const button = (words, onclick, given = {}) => h("button", { type: "button", onclick, ...given }, words);
export const act = (...children) => h("div", { class: "row act" }, ...children);
export const row = (...children) => h("div", { class: "row" }, ...children);
export const card = (...children) => h("section", { class: "card" }, ...children);
/** A card that is shown once even when two models are compared. */
export const shared = (...children) => h("section", { class: "card shared" }, ...children);

// State that all views share: the sentence, the model, the model to compare with, the language and the theme. The URL holds all of it and the
// settings of the current view, so that a link shows everyone the same.
export const state = { text: null, model: null, compare: null, lang: "en", theme: null, lesson: null }; // null: nobody has chosen yet
const kept = {}; // by view: its own settings, for when one comes back by the menu

export function read() {
  const [name, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { name, values: Object.fromEntries(new URLSearchParams(query)) };
}

/** Updates the URL without a new history entry. */
export function write(name, values, defaults) {
  const own = Object.entries(values).filter(([key, value]) => !["text", "model", "compare"].includes(key) && value !== defaults[key]);
  kept[name] = Object.fromEntries(own);
  history.replaceState(null, "", address(name, values));
}

/** The URL of a view with the shared settings, for the menu and links between views. */
export function linkTo(view, about, values = {}) {
  const model = usable(view, about)?.name ?? "";
  const compare = comparable(view, about, model).includes(state.compare) ? state.compare : "";
  const shared = { ...(state.text === null ? {} : { text: state.text }), model, compare };
  return address(view.name, { ...kept[view.name], ...shared, ...values });
}

export function address(name, values) {
  const { lang, theme, lesson } = state;
  const given = Object.entries({ lesson: lesson ?? "", ...values, lang, theme: theme ?? "" }).filter(([, value]) => value !== "");
  return `#/${name}?${new URLSearchParams(given)}`;
}

export const modelsFor = (view, about) => about.models.filter(view.needs ?? (() => true));

/** The shared model if this view supports it, else the first supported one. */
export function usable(view, about) {
  const models = modelsFor(view, about);
  return models.find((model) => model.name === state.model) ?? models[0];
}

/** The models that a view can compare with `model`; views of no model or of all models set `compares: false`. */
export const comparable = (view, about, model) =>
  view.compares === false ? [] : modelsFor(view, about).map(({ name }) => name).filter((name) => name !== model);

/** The language of samples: the page's if the model knows it, else one that it knows. */
export function languageFor(model) {
  const known = model?.knows ?? [];
  return known.includes(state.lang) ? state.lang : (known[0] ?? state.lang);
}

export const sampleFor = (model, about) => about.samples?.[languageFor(model)] ?? "";

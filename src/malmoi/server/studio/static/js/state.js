// What all views share: the sentence, the model, the one it is compared with, the language and the theme. The address holds all of it, and the
// settings of the view that is shown, so that a link means the same to everyone.
export const state = { text: null, model: null, compare: null, lang: "en", theme: null, lesson: null }; // null: nobody has chosen yet
const kept = {}; // by view: its own settings, for when one comes back by the menu

export function read() {
  const [name, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { name, values: Object.fromEntries(new URLSearchParams(query)) };
}

/** Writes where we are, without a new entry in the history. */
export function write(name, values, defaults) {
  const own = Object.entries(values).filter(([key, value]) => !["text", "model", "compare"].includes(key) && value !== defaults[key]);
  kept[name] = Object.fromEntries(own);
  history.replaceState(null, "", address(name, values));
}

/** A view's address with the shared settings: what the menu and other views link to. */
export function linkTo(view, about, values = {}) {
  const model = usable(view, about)?.name ?? "";
  const compare = comparable(view, about, model).includes(state.compare) ? state.compare : "";
  const shared = { ...(state.text === null ? {} : { text: state.text }), model, compare };
  return address(view.name, { ...kept[view.name], ...shared, ...values });
}

function address(name, values) {
  const { lang, theme, lesson } = state;
  const given = Object.entries({ lesson: lesson ?? "", ...values, lang, theme: theme ?? "" }).filter(([, value]) => value !== "");
  return `#/${name}?${new URLSearchParams(given)}`;
}

export const modelsFor = (view, about) => about.models.filter(view.needs ?? (() => true));

/** The shared model where this view can use it, else the first that it can use. */
export function usable(view, about) {
  const models = modelsFor(view, about);
  return models.find((model) => model.name === state.model) ?? models[0];
}

/** Which models a view can show beside `model`; a view about no model, or about all of them, says `compares: false`. */
export const comparable = (view, about, model) =>
  view.compares === false ? [] : modelsFor(view, about).map(({ name }) => name).filter((name) => name !== model);

/** The language of samples: the page's where the model knows that, else one that it knows. */
export function languageFor(model) {
  const known = model?.knows ?? [];
  return known.includes(state.lang) ? state.lang : (known[0] ?? state.lang);
}

export const sampleFor = (model, about) => about.samples?.[languageFor(model)] ?? "";

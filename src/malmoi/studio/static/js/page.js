// The context of a view: its settings (kept in the URL), the models it may use, and one task at a time.
import { Refused, get, post } from "./api.js";
import { h, put } from "./dom.js";
import { comparable, modelsFor, sampleFor, state, usable, write } from "./state.js";
import { refusal, t } from "./words.js";

const PAUSE = 300; // ms after the last key before work starts
const LONGEST_PAUSE = 3000; // of a model that takes long

const RETRY = 2000; // ms between two looks for a server that is gone

export class Page {
  /** `status` and `notice` are the elements for status and warnings, `shown` the element for the output. */
  constructor(view, about, given, { status, notice, shown }) {
    Object.assign(this, { view, about, status, notice, shown });
    this.models = modelsFor(view, about);
    this.notices = new Set();
    this.unknown = ""; // how much of the text the models do not know
    this.took = 0; // ms of the work that was done last
    this.rebuild = () => {}; // shows the view anew
    this.reload = () => {}; // asks the server what is loaded, and shows the view anew
    this.work = null; // what is done when a setting changes
    this.draw = null; // draws anew what is already known
    this.suffix = ""; // of the ids of fields: two models may have the same ones
    this.twin = null; // the same view of another model, beside this one
    this.control = new AbortController();
    this.settle(given);
  }

  /** The settings: from the URL, else shared between views, else the view's defaults. */
  settle(given) {
    this.values = { model: this.chosenModel(given.model) };
    this.values.compare = this.chosenOther(given.compare ?? given.second); // `second`: its name in older links
    this.defaults = { ...this.values, ...this.view.defaults(this) };
    if ("text" in this.defaults) {
      const sample = sampleFor(this.model, this.about);
      if (given.text !== undefined) state.text = given.text === sample ? null : given.text;
      this.defaults.text = state.text ?? sample;
    }
    const known = Object.entries(given).filter(([name]) => name in this.defaults && !["model", "compare"].includes(name));
    Object.assign(this.values, this.defaults, Object.fromEntries(known));
    if (this.about.version !== null) write(this.view.name, this.values, this.defaults);
  }

  /** The model in the URL if it is loaded and supports this view, else the shared one with a notice. */
  chosenModel(name) {
    const fallback = usable(this.view, this.about)?.name ?? "";
    if (!name || name === fallback) return fallback;
    if (this.models.some((model) => model.name === name)) return (state.model = name);
    const loaded = this.about.models.some((model) => model.name === name);
    if (fallback) this.warn(t(loaded ? "link.cannot" : "link.model", { name, used: fallback }));
    return fallback;
  }

  /** The model in the URL to compare with, if this view can show it; "" for none. */
  chosenOther(name = "") {
    const others = comparable(this.view, this.about, this.values.model);
    if (others.includes(name)) return (state.compare = name);
    if (name && name !== this.values.model && others.length) this.warn(t("link.compare", { name }));
    if (others.includes(state.compare)) state.compare = null; // this link asks for one model
    return "";
  }

  get model() {
    return this.models.find((model) => model.name === this.values.model);
  }

  /** Whether the condition holds for one of the shown models. */
  some(test) {
    return this.models.some((model) => [this.values.model, this.values.compare].includes(model.name) && test(model));
  }

  /** The view's elements. When two models are compared, everything below the fields appears once per model. */
  elements() {
    const [key, other] = this.view.twin?.(this) ?? ["model", this.values.compare];
    const [fields, ...own] = this.view.build(this);
    if (!other) return [fields, ...own];
    this.twin = twin(this, key, other);
    const [, ...others] = this.view.build(this.twin);
    const beside = (one, i) => h("div", { class: "sides" }, side(this.values[key], one), side(other, others[i]));
    return [fields, ...own.map((one, i) => (one && one.matches(".shared") ? one : beside(one, i)))];
  }

  get sides() {
    return [this, this.twin].filter(Boolean);
  }

  /** Redraws all sides without a request. */
  redraw() {
    for (const one of this.sides) one.draw?.();
  }

  /** A numeric setting, clamped to its bounds with a notice. */
  number(name, low, high) {
    const value = Number(this.values[name]);
    const kept = Number.isFinite(value) ? Math.min(high, Math.max(low, value)) : Number(this.defaults[name]);
    if (kept !== value) {
      const words = { name: t(`field.${name}`), value: this.values[name] || "–", used: kept };
      this.warn(t("link.number", words));
    }
    return kept;
  }

  set(name, value) {
    this.values[name] = String(value);
    if (name === "text") state.text = this.values.text;
    if (name === "model") this.turnTo(this.values.model);
    if (name === "compare") state.compare = this.values.compare || null;
    write(this.view.name, this.values, this.defaults);
  }

  /** Changes the model for all views; an unedited sample sentence follows the model's language. */
  turnTo(name) {
    state.model = name;
    if ("text" in this.defaults && state.text === null) this.values.text = sampleFor(this.model, this.about);
  }

  /** Called when the user changes a setting: marks the output as outdated and schedules the work. */
  changed(name, value) {
    this.set(name, value);
    this.notices.clear();
    clearTimeout(this.timer);
    if (!this.work) return;
    this.control.abort(); // nobody waits for what was asked before
    this.outdate();
    this.timer = setTimeout(() => this.run(), this.pause);
  }

  /** Delays slow work longer, because the next keystroke may arrive before it finishes. */
  get pause() {
    return Math.min(LONGEST_PAUSE, Math.max(PAUSE, this.took));
  }

  /** Dims outdated output. */
  outdate() {
    this.shown.classList.add("stale");
    this.say(t("busy"));
  }

  /**
   * Runs the view's work for each shown model, or another method of the view by name, or a function, and cancels
   * running work. With `quiet`, only errors are reported.
   */
  async run(name = "work", { quiet = false } = {}) {
    const works = typeof name === "function" ? [name] : this.sides.map((one) => one[name]).filter(Boolean);
    if (!works.length) return;
    if (name !== "work" && this.work && this.outdated) {
      await this.run(); // a setting was changed a moment ago
      if (this.outdated) return; // that failed, or was given up in turn
    }
    clearTimeout(this.timer);
    this.control.abort();
    const control = (this.control = new AbortController());
    if (name === "work" && !quiet) this.outdate();
    else if (!quiet) this.say(t("busy"));
    const start = performance.now();
    const took = () => performance.now() - start;
    try {
      await Promise.all([...works.map((work) => work(control.signal)), quiet || this.cover(control.signal)]);
      if (control.signal.aborted) return;
      if (name === "work") this.refresh(took());
      this.ready?.(); // what is shown can be saved
      if (!quiet) this.say(t("done", { seconds: (took() / 1000).toFixed(2) }));
    } catch (error) {
      if (control.signal.aborted) this.took = Math.max(this.took, took());
      else this.fail(error);
    }
  }

  get outdated() {
    return this.shown.classList.contains("stale");
  }

  /** Marks the output as up to date. */
  refresh(took) {
    this.took = took;
    this.shown.classList.remove("stale");
  }

  stop() {
    this.control.abort();
    this.say(t("stopped"));
  }

  close() {
    clearTimeout(this.timer);
    this.control.abort();
  }

  /** Warns how much of the text is unknown to the models; `view.reads` names them if not the chosen one. */
  async cover(signal) {
    if (!("text" in this.values) || !this.model) return;
    const models = this.view.reads?.(this) ?? [this.values.model, this.values.compare].filter(Boolean);
    const { models: found } = await post("studio/coverage", { text: this.values.text, models }, signal);
    this.unknown = found.map(uncovered).filter(Boolean).join(" ");
    this.tell();
  }

  /** A warning that does not stop the work, such as an invalid value in a link. */
  warn(sentence) {
    this.notices.add(sentence);
    this.tell();
  }

  tell() {
    if (this.notice) put(this.notice, [...this.notices, this.unknown].filter(Boolean).join(" "));
  }

  say(text) {
    this.status.classList.remove("wrong");
    put(this.status, text);
  }

  fail(error) {
    const gone = error instanceof TypeError && /fetch|network/i.test(error.message); // as browsers word it
    const words = error instanceof Refused ? refusal(error) : gone ? t("failed") : error.message;
    this.status.classList.add("wrong");
    put(this.status, words, words !== error.message && [" ", h("small", { lang: "en" }, error.message)]);
    this.status.scrollIntoView({ block: "nearest" });
    if (error.status === 401) this.status.append(this.keyField());
    else if (gone) this.awaitServer();
    else if (error.code === "model_not_found") this.offerReload();
  }

  /** Polls the server until it is reachable again. */
  awaitServer() {
    this.offerReload();
    const { signal } = this.control;
    const look = () => get("health", signal).then(() => this.reload(), again);
    const again = () => signal.aborted || (this.timer = setTimeout(look, RETRY));
    again();
  }

  offerReload() {
    this.status.append(" ", h("button", { type: "button", class: "quiet", onclick: () => this.reload() }, t("again")));
  }

  keyField() {
    const field = h("input", { type: "password", id: "key", autocomplete: "off" });
    const use = () => {
      sessionStorage.setItem("malmoi.key", field.value);
      location.reload();
    };
    return h(
      "span",
      { class: "row" },
      h("label", { for: "key" }, t("key")),
      field,
      h("button", { type: "button", onclick: use }, t("key.use")),
    );
  }
}

/** The page for a second model (`key` is its setting); it reads and changes the same settings. */
function twin(page, key, name) {
  const other = Object.assign(Object.create(page), { suffix: "-2", work: null, draw: null });
  other.values = Object.create(page.values, { [key]: { value: name } });
  for (const method of ["set", "changed", "run", "redraw", "stop"]) other[method] = page[method].bind(page);
  return other;
}

const side = (name, node) => h("div", { class: "side", "data-model": name }, h("p", { class: "whose" }, name), node || null);

/** A warning if much of a text is unknown to a model or split into bytes. */
function uncovered({ name, words, unknown, characters, tokens }) {
  if (unknown) return t("unknown.words", { name, unknown, words });
  return tokens > 1.5 * characters ? t("unknown.bytes", { name, tokens, characters }) : "";
}

// What a view is given: its settings (kept in the address), the models it may use, and one piece of work at a time.
import { Refused, get, newRun, post } from "./api.js";
import { h, put } from "./dom.js";
import { comparable, modelsFor, sampleFor, state, usable, write } from "./state.js";
import { refusal, t } from "./words.js";

const PAUSE = 300; // ms after the last key before work starts
const LONGEST_PAUSE = 3000; // of a model that takes long

const RETRY = 2000; // ms between two looks for a server that is gone

export class Page {
  /** `status` is where it says how things are, `notice` what is odd about them, `shown` where its pictures are. */
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

  /** The settings: the link's, else what is shared, else the view's own. */
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

  /** The link's model where there is one of that name that can do this, else the shared one; a change is said. */
  chosenModel(name) {
    const fallback = usable(this.view, this.about)?.name ?? "";
    if (!name || name === fallback) return fallback;
    if (this.models.some((model) => model.name === name)) return (state.model = name);
    const loaded = this.about.models.some((model) => model.name === name);
    if (fallback) this.warn(t(loaded ? "link.cannot" : "link.model", { name, used: fallback }));
    return fallback;
  }

  /** The link's model to compare with, where this view can show it beside the chosen one; "" for none. */
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

  /** Whether this is so of one of the models that are shown. */
  some(test) {
    return this.models.some((model) => [this.values.model, this.values.compare].includes(model.name) && test(model));
  }

  /** The view's elements. Where two models are compared, what is below the fields is there for each, side by side. */
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

  /** Draws all sides anew, without asking anything. */
  redraw() {
    for (const one of this.sides) one.draw?.();
  }

  /** A number among the settings, kept within bounds; that it was outside is said. */
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

  /** Another model for all views; a sample sentence that nobody has touched becomes one that it knows. */
  turnTo(name) {
    state.model = name;
    if ("text" in this.defaults && state.text === null) this.values.text = sampleFor(this.model, this.about);
  }

  /** A setting was changed by hand: what is shown is not about it any more; work soon, once. */
  changed(name, value) {
    this.set(name, value);
    this.notices.clear();
    clearTimeout(this.timer);
    if (!this.work) return;
    this.control.abort(); // nobody waits for what was asked before
    this.outdate();
    this.timer = setTimeout(() => this.run(), this.pause);
  }

  /** Who took long is asked less often: the next key may come before it would be done. */
  get pause() {
    return Math.min(LONGEST_PAUSE, Math.max(PAUSE, this.took));
  }

  /** Old pictures must not pass for new ones. */
  outdate() {
    this.shown.classList.add("stale");
    this.say(t("busy"));
  }

  /**
   * Does the view's work for each model that is shown, or what else of the view is named, or a function; what was under
   * way is given up. `quiet` work only tells what goes wrong.
   */
  async run(name = "work", { quiet = false } = {}) {
    const works = typeof name === "function" ? [name] : this.sides.map((one) => one[name]).filter(Boolean);
    if (!works.length) return;
    clearTimeout(this.timer);
    this.control.abort();
    const control = (this.control = new AbortController());
    newRun();
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

  /** What is shown is what was asked for. */
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

  /** Says how much of the text the models do not know; `view.reads` names them where it is not the one chosen. */
  async cover(signal) {
    if (!("text" in this.values) || !this.model) return;
    const models = this.view.reads?.(this) ?? [this.values.model, this.values.compare].filter(Boolean);
    const { models: found } = await post("studio/coverage", { text: this.values.text, models }, signal);
    this.unknown = found.map(uncovered).filter(Boolean).join(" ");
    this.tell();
  }

  /** Something odd that does not stop the work: a link's value that cannot be. */
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

  /** The server is gone: looks for it until it is back. */
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

/** The same page for another model (`key` says which setting it is): it reads the page's settings, and changes them. */
function twin(page, key, name) {
  const other = Object.assign(Object.create(page), { suffix: "-2", work: null, draw: null });
  other.values = Object.create(page.values, { [key]: { value: name } });
  for (const method of ["set", "changed", "run", "redraw", "stop"]) other[method] = page[method].bind(page);
  return other;
}

const side = (name, node) => h("div", { class: "side", "data-model": name }, h("p", { class: "whose" }, name), node || null);

/** A sentence where much of a text is unknown to a model, or cut into bytes. */
function uncovered({ name, words, unknown, characters, tokens }) {
  if (unknown) return t("unknown.words", { name, unknown, words });
  return tokens > 1.5 * characters ? t("unknown.bytes", { name, tokens, characters }) : "";
}

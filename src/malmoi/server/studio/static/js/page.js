// What a view is given: its settings (kept in the address), the models it may use, and one piece of work at a time.
import { Refused, newRun } from "./api.js";
import { write } from "./address.js";
import { h, put } from "./dom.js";
import { refusal, t } from "./words.js";

const PAUSE = 300; // ms after the last key before work starts
const LONGEST_PAUSE = 3000; // of a model that takes long

export class Page {
  /** `status` is where it says how things are, `shown` where its pictures are. */
  constructor(view, about, values, { status, shown }) {
    this.view = view;
    this.about = about;
    this.models = about.models.filter(view.needs ?? (() => true));
    this.defaults = { model: this.models[0]?.name ?? "", ...view.defaults(this) };
    this.values = { ...this.defaults, ...values };
    if (!this.models.some((model) => model.name === this.values.model)) this.values.model = this.defaults.model;
    this.status = status;
    this.shown = shown;
    this.took = 0; // ms of the work that was done last
    this.rebuild = () => {}; // shows the view anew
    this.work = null; // what is done when a setting changes
    this.control = new AbortController();
  }

  get model() {
    return this.models.find((model) => model.name === this.values.model);
  }

  /** A number among the settings, kept within bounds. */
  number(name, low, high) {
    const value = Number(this.values[name]);
    return Number.isFinite(value) ? Math.min(high, Math.max(low, value)) : Number(this.defaults[name]);
  }

  set(name, value) {
    this.values[name] = String(value);
    write(this.view.name, this.values, this.defaults);
  }

  /** A setting was changed by hand: what is shown is not about it any more; work soon, once. */
  changed(name, value) {
    this.set(name, value);
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

  /** Does the view's work, or another; what was under way is given up. `quiet` work only tells what goes wrong. */
  async run(work = this.work, { quiet = false } = {}) {
    if (!work) return;
    clearTimeout(this.timer);
    this.control.abort();
    const control = (this.control = new AbortController());
    newRun();
    if (work === this.work && !quiet) this.outdate();
    else if (!quiet) this.say(t("busy"));
    const start = performance.now();
    const took = () => performance.now() - start;
    try {
      await work(control.signal);
      if (control.signal.aborted) return;
      if (work === this.work) this.refresh(took());
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

  say(text) {
    this.status.classList.remove("wrong");
    put(this.status, text);
  }

  fail(error) {
    const words = error instanceof Refused ? refusal(error) : t("failed");
    this.status.classList.add("wrong");
    put(this.status, words, words !== error.message && [" ", h("small", { lang: "en" }, error.message)]);
    this.status.scrollIntoView({ block: "nearest" });
    if (error.status === 401) this.status.append(this.keyField());
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

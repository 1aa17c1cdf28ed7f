// What a view is given: its settings (kept in the address), the models it may use, and one piece of work at a time.
import { Refused } from "./api.js";
import { write } from "./address.js";
import { h, put } from "./dom.js";
import { refusal, t } from "./words.js";

const PAUSE = 300; // ms after the last key before work starts

export class Page {
  constructor(view, about, values, status) {
    this.view = view;
    this.about = about;
    this.models = about.models.filter(view.needs ?? (() => true));
    this.defaults = { model: this.models[0]?.name ?? "", ...view.defaults(this) };
    this.values = { ...this.defaults, ...values };
    if (!this.models.some((model) => model.name === this.values.model)) this.values.model = this.defaults.model;
    this.status = status;
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

  /** A setting was changed by hand: work soon, once. */
  changed(name, value) {
    this.set(name, value);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.run(), PAUSE);
  }

  /** Does the view's work, or another; what was under way is given up. `quiet` work only tells what goes wrong. */
  async run(work = this.work, { quiet = false } = {}) {
    if (!work) return;
    clearTimeout(this.timer);
    this.control.abort();
    const control = (this.control = new AbortController());
    if (!quiet) this.say(t("busy"));
    const start = performance.now();
    try {
      await work(control.signal);
      if (!quiet) this.say(t("done", { seconds: ((performance.now() - start) / 1000).toFixed(2) }));
    } catch (error) {
      if (!control.signal.aborted) this.fail(error);
    }
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

// The path of one sentence: text, tokens, vectors, blocks, logits, a word, with the numbers of the chosen token.
import { post } from "../api.js";
import { h, put } from "../dom.js";
import { area, card, modelField, pick, row } from "../fields.js";
import { gloss } from "../glossary.js";
import { bytes, fixed, percent, short, whole } from "../numbers.js";
import { bars, visible } from "../parts.js";
import { t } from "../words.js";

const IDLE = 0.01; // share of hidden numbers above 0: an MLP with fewer is all but off
const PARTS = ["embedding", "attention", "mlp", "head", "other"];
const usual = (numbers) => Math.max(0.05, ...numbers.map(Math.abs));

/** The first of a vector's `width` numbers as cells: blue above 0, orange below; hover shows the number. */
function strip(label, numbers, width) {
  const most = usual(numbers);
  const told = numbers.slice(0, 4).map((x) => fixed(x, 2));
  const readout = h("output", {}, told.slice(0, 3).join("  "), " …");
  const cell = (x, i) => {
    const style = { "--v": String(Math.abs(x) / most), "--hue": x < 0 ? "var(--b)" : "var(--a)" };
    return h("i", { style, title: `${i + 1}: ${fixed(x, 3)}`, onpointerenter: () => put(readout, `[${i + 1}] ${fixed(x, 3)}`) });
  };
  const spoken = t("home.vector", { name: label, count: whole(width), numbers: told.join(", ") });
  return h(
    "div",
    { class: "strip", role: "img", tabindex: "0", "aria-label": spoken },
    h("span", {}, label, h("small", {}, ` ${numbers.length < width ? `${numbers.length}/` : ""}${whole(width)}`)),
    h("div", { class: "cells" }, numbers.map(cell)),
    readout,
  );
}

const open = (name, words = null) =>
  h("a", { href: `#/${name}`, "data-view": name, class: "go" }, words ?? t(`${name}.name`), " →");

/** A step of the path: its name, its shape, what happens, its picture, and the views that show more. */
function step(name, { shape, values = {}, links = [], met }, ...pictures) {
  return h(
    "li",
    { class: "step" },
    h("h2", {}, t(`home.${name}`), shape && h("code", {}, shape)),
    h("p", {}, gloss(t(`home.${name}.about`, values), met)),
    ...pictures,
    h("p", { class: "links" }, links.map((one) => open(one))),
  );
}

class Path {
  constructor(page) {
    this.page = page;
    this.flow = h("div", { class: "flow", role: "group", "aria-label": t("home.title") });
    this.steps = h("ol", { class: "path" });
    this.sizes = h("div");
    page.work = (signal) => this.read(signal);
    page.draw = () => this.seen && this.draw();
  }

  async read(signal) {
    const { model } = this.page.values;
    const { text } = this;
    const { depth, heads } = this.page.model;
    const [layer, head] = [this.page.number("layer", 1, depth) - 1, this.page.number("head", 1, heads) - 1];
    this.seen = await post("studio/path", { model, text, layer, head }, signal);
    this.draw();
  }

  /** The word of the sentence that a BERT is to find, counted from 1: the middle one unless chosen; 0 for none. */
  get gap() {
    const { mask, causal } = this.page.model;
    const { text, hide } = this.page.values;
    const words = text.split(/\s+/).filter(Boolean);
    if (!mask || causal || text.includes(mask) || !words.length) return 0;
    const wanted = hide === "" ? Math.ceil(words.length / 2) : Number(hide);
    return wanted <= words.length ? wanted : words.length;
  }

  /** What the model reads: the sentence, with a mask for a BERT to follow. */
  get text() {
    let count = 0;
    const { gap } = this;
    return this.page.values.text.replace(/\S+/g, (word) => ((count += 1) === gap ? this.page.model.mask : word));
  }

  /** The token whose numbers are shown, counted from 0: the chosen one, else the mask, else the last with text. */
  get chosen() {
    const { spans, tokens } = this.seen;
    const wanted = Number(this.page.values.token) - 1;
    if (this.page.values.token && spans[wanted]) return wanted;
    const masked = this.page.model.causal ? -1 : tokens.indexOf(this.page.model.mask);
    if (masked >= 0) return masked;
    const last = spans.findLastIndex(([first, end]) => end > first);
    return last < 0 ? spans.length - 1 : last;
  }

  choose(i) {
    this.page.set("token", i + 1);
    this.page.redraw();
    this.steps.querySelector(`.chip:nth-of-type(${i + 1})`)?.focus();
  }

  /** The whole path in one line: each box opens its view. */
  boxes() {
    const { model } = this.page;
    const size = this.seen.first + this.seen.tokens.length;
    const box = (name, view, shape) =>
      h("a", { href: `#/${view}`, "data-view": view }, t(`home.${name}`), h("small", {}, shape));
    const words = model.causal ? "next" : "fill";
    return [
      box("text", "tokens", t("home.characters", { count: whole([...this.text].length) })),
      box("tokens", "tokens", `${size}`),
      box("vectors", "embeddings", `${size} × ${model.width}`),
      box("block", "attention", `× ${model.depth}`),
      box("logits", "lens", whole(model.vocab)),
      box("sampling", this.seen.guesses.length ? words : "home", visible(this.seen.guesses[this.chosen]?.[0].text ?? "–")),
    ];
  }

  draw() {
    this.met = new Set(); // words that are explained further up
    put(this.flow, this.boxes());
    put(this.steps, this.sentence(), this.tokens(), this.vectors(), this.block(), this.logits(), this.sampling());
    put(this.sizes, this.parameters());
  }

  sentence() {
    const { text, gap } = this;
    const [first, end] = this.seen.spans[this.chosen];
    const marked = [text.slice(0, first), h("mark", {}, text.slice(first, end)), text.slice(end)];
    const shape = t("home.characters", { count: whole([...text].length) });
    return step("text", { met: this.met, shape, links: ["tokens"] }, h("p", { class: "sentence", lang: "" }, marked), gap ? this.gaps() : null);
  }

  /** The words of the sentence: the pressed one is hidden from the BERT. */
  gaps() {
    const words = this.page.values.text.split(/\s+/).filter(Boolean);
    const hide = (i) => {
      this.page.set("token", "");
      this.page.changed("hide", i + 1);
    };
    const word = (name, i) => h("button", { type: "button", class: "quiet", "aria-pressed": String(i + 1 === this.gap), onclick: () => hide(i) }, name);
    return [h("p", { class: "note" }, t("home.hide")), h("div", { class: "chips", role: "group", "aria-label": t("home.hide"), lang: "" }, words.map(word))];
  }

  tokens() {
    const { tokens, ids, first } = this.seen;
    const chip = (name, i) =>
      h(
        "button",
        { type: "button", class: "chip", "aria-pressed": String(i === this.chosen), onclick: () => this.choose(i) },
        visible(name),
        h("small", {}, String(ids[i])),
      );
    const values = { vocab: whole(this.page.model.vocab) };
    const more = first ? h("span", { class: "note" }, t("home.earlier", { count: whole(first) })) : null;
    const chips = h("div", { class: "chips", role: "group", "aria-label": t("home.choose"), lang: "" }, tokens.map(chip));
    return step("tokens", { met: this.met, shape: `[${first + tokens.length}]`, values, links: ["tokens"] }, more, chips);
  }

  vectors() {
    const { embedding, tokens, first } = this.seen;
    const { width } = this.page.model;
    const shape = `[${first + tokens.length} × ${width}]`;
    const names = Object.keys(embedding);
    const line = (name, i) => {
      const sign = name === "sum" ? "=" : i ? "+" : "";
      return h("div", { class: "term" }, h("b", { "aria-hidden": "true" }, sign), strip(t(`home.${name}.vector`), embedding[name][this.chosen], width));
    };
    const rotary = !this.seen.rotary ? null : h("p", { class: "note" }, t("home.rotary"));
    return step("vectors", { met: this.met, shape, links: ["embeddings"] }, names.length > 2 ? names.map(line) : line("token", 0), rotary);
  }

  block() {
    const { model, values } = this.page;
    const { block, mlp_width: wide, pre_norm: pre } = this.seen;
    const i = this.chosen;
    const size = (name) => h("span", { class: "note" }, t("home.norm", { size: fixed(block.sizes[name][i], 2) }));
    const term = (sign, name, width = model.width) =>
      h("div", { class: "term" }, h("b", { "aria-hidden": "true" }, sign), strip(t(`home.block.${name}`), block[name][i], width), size(name));
    const norm = (name) => (model.depth && block.sizes[name].some(Boolean) ? term("→", name) : null);
    const part = (title, shape, ...inside) => h("section", { class: "inner" }, h("h3", {}, title, h("code", {}, shape)), ...inside);
    const active = t(block.active[i] < IDLE ? "home.idle" : "home.active", { share: percent(block.active[i]) });
    return step(
      "block",
      { met: this.met, shape: `× ${model.depth}`, values: { depth: model.depth, layer: values.layer }, links: ["patterns", "attention", "lens", "ablate"] },
      h("div", { class: "layers", role: "group", "aria-label": t("field.layer") }, this.layers()),
      h("p", { class: "formula" }, pre ? "x ← x + attention(norm(x));  x ← x + MLP(norm(x))" : "x ← norm(x + attention(x));  x ← norm(x + MLP(x))"),
      term("", "before"),
      pre ? norm("attention_norm") : null,
      part(t("home.attention"), `${model.heads} × ${Math.round(model.width / model.heads)}`, this.heads(), this.looks()),
      term("+", "attention"),
      norm(pre ? "mlp_norm" : "attention_norm"),
      part(
        t("home.mlp"),
        `${model.width} → ${wide} → ${model.width}`,
        h("p", {}, gloss(t("home.mlp.about"), this.met)),
        h("p", { class: "formula" }, "MLP(x) = W₂ · f(W₁ · x)"),
        block.sizes.mlp_hidden[i] ? [strip(t("home.block.mlp_hidden"), block.mlp_hidden[i], wide), h("p", { class: "note" }, active)] : null,
      ),
      term("+", "mlp"),
      pre ? null : norm("mlp_norm"),
      term("=", "after"),
      this.seen.plain || !pre ? null : h("p", { class: "note" }, t("home.normed")),
    );
  }

  layers() {
    const { depth } = this.page.model;
    const at = this.page.number("layer", 1, depth);
    const pill = (_, i) =>
      h(
        "button",
        {
          type: "button",
          class: "quiet",
          "aria-pressed": String(i + 1 === at),
          "aria-label": `${t("field.layer")} ${i + 1}`,
          onclick: () => this.page.changed("layer", i + 1),
        },
        String(i + 1),
      );
    return Array.from({ length: depth }, pill);
  }

  heads() {
    const { heads } = this.page.model;
    if (heads < 2) return null;
    return row(pick(this.page, "head", Array.from({ length: heads }, (_, i) => [String(i + 1), String(i + 1)])));
  }

  /** One head: the query against every key, its scores, the softmax under the mask, and the values mixed by it. */
  looks() {
    const { head, tokens, first } = this.seen;
    if (!head) return h("p", { class: "note" }, t("home.none"));
    const i = this.chosen;
    const { scores, size } = head;
    const shares = head.weights[i];
    const masked = (k) => this.page.model.causal && k > i;
    const score = (k) => (masked(k) ? "−∞" : scores ? fixed(scores[i][k], 2) : "–");
    const line = (name, k) =>
      h(
        "tr",
        { class: masked(k) ? "away" : null },
        h("th", { scope: "row", lang: "" }, visible(name)),
        h("td", {}, score(k)),
        h("td", { class: "seen" }, masked(k) ? t("home.masked") : "✓"),
        h("td", {}, h("div", { class: "bar" }, h("i", { style: { "--share": String(shares[k]) } }))),
        h("td", {}, percent(shares[k])),
      );
    const names = ["home.key", "home.score", "home.mask", "home.softmax"];
    const top = names.map((key, c) => h("th", { scope: "col", class: c === 2 ? "seen" : null, colspan: c === 3 ? "2" : null }, t(key)));
    const label = t("home.looks", { token: visible(tokens[i]) });
    const best = shares.indexOf(Math.max(...shares));
    const product = (k) => t("home.product", { query: visible(tokens[i]), key: visible(tokens[k]), dot: fixed(scores[i][k] * Math.sqrt(size), 2), size, score: fixed(scores[i][k], 2) });
    const vectors = (name, k) => strip(`${name} ${visible(tokens[k])}`, head[name][k], size);
    return [
      h("p", { class: "formula" }, `q = W_q · x,  k = W_k · x,  v = W_v · x;  softmax(q · k / √${size}) · v`),
      vectors("q", i),
      vectors("k", best),
      scores ? h("p", { class: "note" }, product(best)) : null,
      h("p", {}, label),
      h("div", { class: "wide", tabindex: "0", role: "group", "aria-label": label }, h("table", { class: "looks" }, h("thead", {}, h("tr", {}, top)), h("tbody", {}, tokens.map(line)))),
      first ? h("p", { class: "note" }, t("home.unshown", { count: whole(first) })) : null,
      h("p", {}, t("home.mix")),
      vectors("v", best),
      strip(t("home.mixed"), head.mix[i], size),
      h("details", {}, h("summary", {}, t("home.every")), tokens.flatMap((_, k) => [vectors("k", k), vectors("v", k)])),
    ];
  }

  logits() {
    const { model } = this.page;
    const guesses = this.seen.guesses[this.chosen];
    const links = model.causal ? ["next", "lens"] : ["fill", "lens"];
    const shape = `[${whole(model.vocab)}]`;
    if (!guesses) return step("logits", { met: this.met, shape, links: ["finetuned"] }, h("p", { class: "note" }, t("home.headless")));
    const rows = guesses.map((one) => ({ name: one.text, share: one.probability, value: percent(one.probability) }));
    const asked = t(model.causal ? "home.after" : "home.at", { token: visible(this.seen.tokens[this.chosen]) });
    const hidden = this.page.values.text.split(/\s+/).filter(Boolean)[this.gap - 1];
    const truth = hidden && this.seen.tokens[this.chosen] === model.mask ? ` ${t("home.truth", { word: hidden })}` : "";
    return step("logits", { met: this.met, shape, links }, h("p", { class: "note" }, asked, truth), bars(rows));
  }

  sampling() {
    const { causal } = this.page.model;
    const links = causal ? ["next", "generate", "chat"] : ["fill", "beside"];
    return step("sampling", { met: this.met, links }, causal && this.seen.head ? this.cache() : null);
  }

  /** Keys and values that are kept while a GPT writes, and their memory as the text grows. */
  cache() {
    const { cache_bytes: each, first, tokens } = this.seen;
    const { context, depth } = this.page.model;
    const size = first + tokens.length;
    const row = (count) => ({ name: t("home.cached", { count: whole(count) }), share: count / context, value: bytes(count * each) });
    const counts = [size, size + 1, Math.round(context / 2), context].filter((count) => count <= context);
    return h(
      "section",
      { class: "inner" },
      h("h3", {}, t("home.cache"), h("code", {}, `2 × ${depth} × ${size}`)),
      h("p", {}, t("home.cache.about", { size: whole(size), next: whole(size + 1), each: bytes(each) })),
      bars(counts.map(row), null, { best: false }),
    );
  }

  /** Where the parameters are, as one bar. */
  parameters() {
    const { parameters } = this.seen;
    const total = Object.values(parameters).reduce((sum, count) => sum + count, 0);
    const shown = PARTS.filter((name) => parameters[name]);
    const share = (name) => parameters[name] / total;
    const words = (name) => `${t(`home.part.${name}`)} ${percent(share(name))}`;
    return [
      h("h2", {}, t("home.parameters", { count: short(total) })),
      h("div", { class: "stack", role: "img", "aria-label": shown.map(words).join(", ") }, shown.map((name) => h("i", { class: name, title: words(name), style: { "--share": String(share(name)) } }))),
      h("ul", { class: "keys" }, shown.map((name) => h("li", {}, h("i", { class: name }), `${t(`home.part.${name}`)} `, h("b", {}, short(parameters[name])), ` ${percent(share(name))}`))),
      h("p", { class: "note" }, t("home.tied")),
    ];
  }
}

export default {
  name: "home",
  needs: (model) => model.tokenizer && !model.can.includes("cross_attention"),
  defaults: () => ({ text: "", layer: "1", head: "1", token: "", hide: "" }),

  build(page) {
    const path = new Path(page);
    const { model } = page;
    const facts = t("home.facts", {
      ...{ parameters: short(model.parameters), depth: model.depth, width: model.width, heads: model.heads },
      ...{ context: whole(model.context), vocab: whole(model.vocab) },
    });
    return [
      card(area(page, "text", 2), row(modelField(page))),
      h("p", { class: "note" }, facts),
      path.flow,
      card(path.steps),
      card(path.sizes),
    ];
  },
};

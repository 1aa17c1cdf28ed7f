// Tokens as they are generated, coloured by probability; opening one shows alternatives to continue from.
import { post, stream } from "../api.js";
import { h, put } from "../dom.js";
import { act, area, button, card, modelField, number, range, row } from "../fields.js";
import { percent, strength } from "../numbers.js";
import { bars, visible } from "../parts.js";
import { t } from "../words.js";

const ALTERNATIVES = 8;

function wishes(page) {
  const top = page.number("topk", 0, 1000);
  const seed = page.values.seed.trim();
  return {
    max_tokens: page.number("length", 1, 512),
    temperature: page.number("temperature", 0, 2),
    top_p: page.number("topp", 0.05, 1),
    ...(top ? { top_k: top } : {}),
    ...(seed ? { seed: Number(seed) } : {}),
    logprobs: ALTERNATIVES,
  };
}

/** One model's text: the prompt, and the tokens generated after it. */
class Sheet {
  constructor(page) {
    this.page = page;
    this.name = page.values.model;
    const { name } = this;
    page.write = (signal) => {
      this.begin(page.values.text);
      return this.write(signal);
    };
    this.text = h("p", { class: "text", lang: "" });
    this.panel = h("div", {});
    this.end = h("p", { class: "note" });
    this.live = h("p", { class: "hidden", role: "log", "aria-label": t("generate.written", { name }) });
    this.node = h(
      "section",
      { class: "card", "aria-label": name },
      !page.values.compare && h("h2", {}, name),
      this.text,
      this.end,
      this.panel,
      this.live,
    );
  }

  /** `prompt` is a text, or tokens whose text is `shown`. */
  begin(prompt, shown = prompt) {
    this.prompt = prompt;
    this.shown = shown;
    this.tokens = [];
    put(this.text, h("span", { class: "given" }, shown));
    put(this.panel);
    put(this.end);
    put(this.live);
  }

  async write(signal) {
    const body = { model: this.name, prompt: this.prompt, ...wishes(this.page) };
    this.asked = body.max_tokens;
    for await (const event of stream("v1/completions", body, signal)) {
      const [said] = event.choices;
      const { tokens = [], token_logprobs: logprobs, top_logprobs: others } = said.logprobs ?? {};
      tokens.forEach((name, i) => this.add(name, tokens.length === 1 ? said.text : "", logprobs[i], others[i]));
      if (said.finish_reason) this.finish(said.finish_reason);
    }
  }

  /** A token with its name and text; the bytes of a character have no text until the last. */
  add(name, text, logprob, others) {
    const at = this.tokens.length;
    const p = Math.exp(logprob);
    // not a button, because a line break inside a button would not break the line
    const node = h(
      "span",
      {
        class: "token",
        role: "button",
        tabindex: "0",
        title: percent(p),
        "aria-expanded": "false",
        "data-p": p.toPrecision(6),
        style: { "--p": String(strength(p)) },
        onclick: () => this.open(at),
        onkeydown: (event) => ["Enter", " "].includes(event.key) && (event.preventDefault(), this.open(at)),
      },
      /\S/.test(text) ? text.replace(/\n/g, "↵\n") : visible(name),
    );
    this.tokens.push({ name, text, others, node });
    this.text.append(node, ...(/\S/.test(text) ? [] : text.replace(/[^\n]/g, "")));
  }

  finish(why) {
    const full = why === "length" && this.tokens.length < this.asked;
    const words = { count: this.tokens.length, context: this.page.about.models.find(({ name }) => name === this.name).context };
    put(this.end, t("generate.end", { ...words, why: t(full ? "finish.context" : `finish.${why}`, words) }));
    put(this.live, this.tokens.map((token) => token.text).join(""));
  }

  /** The alternatives to a token; choosing one continues from it. */
  open(at) {
    const token = this.tokens[at];
    this.tokens.forEach((one) => one.node.setAttribute("aria-expanded", String(one === token)));
    const rows = Object.entries(token.others ?? {}).map(([name, logprob]) => ({
      name,
      share: Math.exp(logprob),
      mine: name === token.name,
    }));
    rows.sort((one, other) => other.share - one.share);
    put(
      this.panel,
      h("h3", {}, t("generate.instead", { token: visible(token.name) })),
      bars([...rows, rest(rows)], (chosen) => this.branch(at, chosen.name)),
      h("p", { class: "note" }, t("generate.branch")),
    );
  }

  /** Continues from another token and keeps the tokens before it. */
  branch(at, chosen) {
    const before = this.tokens.slice(0, at);
    const written = [...before.map((token) => token.name), chosen];
    const shown = this.shown + before.map((token) => token.text).join("") + (chosen.startsWith("bytes:") ? "" : chosen);
    return this.page.run(async (signal) => {
      const body = {
        model: this.name,
        written,
        ...(Array.isArray(this.prompt) ? { tokens: this.prompt } : { prompt: this.prompt }),
      };
      const { tokens } = await post("studio/branch", body, signal);
      this.begin(tokens, shown);
      await this.write(signal);
    });
  }
}

/** The total probability of all other tokens, so that the bars sum to 1. */
const rest = (rows) => {
  const share = Math.max(0, 1 - rows.reduce((sum, row) => sum + row.share, 0));
  return { name: t("rest"), share, kind: "rest" };
};

export default {
  name: "generate",
  waits: true,
  needs: (model) => model.can.includes("generate"),
  defaults: () => ({
    text: "",
    temperature: "0.8",
    topk: "0",
    topp: "0.95",
    length: "40",
    seed: "0",
  }),

  build(page) {
    const sheet = new Sheet(page);
    const start = () => page.run("write");
    return [
      card(
        area(page, "text", 2, { onkeydown: (event) => event.ctrlKey && event.key === "Enter" && start() }),
        row(modelField(page), number(page, "seed", { min: 0, placeholder: t("any") })),
        row(
          range(page, "temperature", { min: 0, max: 2, step: 0.05 }, (v) => (v === "0" ? t("greedy") : v)),
          range(page, "topk", { min: 0, max: 100, step: 1 }, (v) => (v === "0" ? t("off") : v)),
          range(page, "topp", { min: 0.05, max: 1, step: 0.05 }, (v) => (v === "1" ? t("off") : v)),
          range(page, "length", { min: 1, max: 200, step: 1 }),
        ),
        act(
          button(t("generate.write"), start, { id: "write" }),
          button(t("stop"), () => page.stop(), { class: "quiet" }),
          h("span", { class: "scale" }, "0.01%", h("i", {}), "100%"),
        ),
      ),
      sheet.node,
    ];
  },
};

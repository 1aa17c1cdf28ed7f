// The same sentence under both masks: what a GPT sees of it, and what a BERT sees.
import { post } from "../api.js";
import { h, put } from "../dom.js";
import { card, line, pick, range, row } from "../fields.js";
import { fixed, percent } from "../numbers.js";
import { bars, maskPicture } from "../parts.js";
import { state } from "../state.js";
import { t } from "../words.js";

const writers = (about) => about.models.filter((model) => model.can.includes("score"));
const fillers = (about) => about.models.filter((model) => model.can.includes("fill") && model.mask);

const shared = (models) => (models.find((model) => model.name === state.model) ?? models[0])?.name ?? "";

export default {
  name: "beside",
  compares: false, // it is about two models
  needs: (model) => model.can.includes("score") || (model.can.includes("fill") && model.mask),
  defaults: (page) => ({
    text: "",
    place: "4",
    gpt: shared(writers(page.about)),
    bert: shared(fillers(page.about)),
  }),

  reads: ({ values }) => [values.gpt, values.bert].filter(Boolean),

  build(page) {
    const sides = h("div", { class: "pair" });
    const slot = h("div", { class: "field" });
    const count = () => Math.max(1, page.values.text.trim().split(/\s+/).length);
    const slider = () => put(slot, range(page, "place", { min: 1, max: count(), step: 1 }));
    let words = count();
    page.work = async (signal) => {
      if (count() !== words) slider();
      words = count();
      const place = page.number("place", 1, words) - 1;
      const seen = await post(
        "studio/beside",
        { text: page.values.text, place, gpt: page.values.gpt || null, bert: page.values.bert || null },
        signal,
      );
      put(sides, side("gpt", seen.gpt, seen), side("bert", seen.bert, seen));
    };
    slider();
    const named = (models) => models.map((model) => [model.name, model.name]);
    return [
      card(
        line(page, "text"),
        row(
          slot,
          writers(page.about).length ? pick(page, "gpt", named(writers(page.about))) : null,
          fillers(page.about).length ? pick(page, "bert", named(fillers(page.about))) : null,
        ),
      ),
      sides,
    ];
  },
};

function side(kind, one, { words, place }) {
  if (!one)
    return h(
      "section",
      { class: "card empty" },
      h("h2", {}, t(`beside.${kind}`)),
      h("p", {}, t(`beside.${kind}.need`)),
      h("pre", {}, h("code", {}, t("beside.command"))),
    );
  const visible = (i) => kind === "bert" || i < place;
  const word = (text, i) =>
    h(
      "li",
      { class: i === place ? "asked" : visible(i) ? null : "away", style: { "--p": String(one.looks[i]) } },
      i === place && kind === "gpt" ? "?" : text,
      h("small", {}, visible(i) ? percent(one.looks[i]) : t("beside.unseen")),
    );
  return card(
    h("h2", {}, t(`beside.${kind}`)),
    h("p", { class: "note" }, t(`beside.${kind}.about`, { word: words[place] })),
    h("ol", { class: "words", lang: "" }, one.words.map(word)),
    h("p", { class: "note" }, t("beside.looks")),
    maskPicture(one.mask, t(`beside.${kind}.mask`), kind === "gpt" && !place ? -1 : one.row),
    h("p", { class: "note" }, t(`beside.${kind}.mask`)),
    h("h3", {}, t(`beside.${kind}.guesses`)),
    bars(one.guesses.map((guess) => ({ name: guess.text, share: guess.probability }))),
    h(
      "p",
      { class: "note" },
      t(one.unknown ? "beside.unknown" : "beside.word", {
        word: words[place],
        logprob: fixed(one.logprob),
        p: percent(Math.exp(one.logprob)),
        tokens: one.tokens,
      }),
    ),
  );
}

// Where a model learnt a text: its longest matches in the training text, and what is new.
import { post } from "../api.js";
import { h, put } from "../dom.js";
import { area, card, line, modelField, range, row } from "../fields.js";
import { fixed, percent, whole } from "../numbers.js";
import { bars, facts } from "../parts.js";
import { t } from "../words.js";

/** The text in pieces, those of a match marked; where matches overlap, the longest has the letters. */
function marked(text, matches) {
  const letters = [...text]; // the server counts characters, not UTF-16 units
  const owners = letters.map((_, at) => matches.findIndex(({ start, end }) => start <= at && at < end));
  const pieces = [];
  letters.forEach((letter, at) => {
    if (at && owners[at] === owners[at - 1]) pieces.at(-1).text += letter;
    else pieces.push({ text: letter, match: matches[owners[at]] });
  });
  return pieces.map((piece) => (piece.match ? h("mark", {}, piece.text) : piece.text));
}

const sentence = (one) => h("li", {}, marked(one.text, [one]));

const match = (one) =>
  card(
    h("h2", {}, t("trace.match", { text: one.text })),
    h("p", { class: "note" }, t("trace.times", { tokens: one.tokens, count: one.count, documents: one.documents })),
    h("ul", {}, one.passages.map(sentence)),
  );

export default {
  name: "trace",
  needs: (model) => model.trained,
  defaults: () => ({ text: "", part: "", nearest: "0" }),

  build(page) {
    const [shown, numbers, found] = [h("p", { lang: "" }), h("div"), h("div", { lang: "" })];
    page.work = async (signal) => {
      const { model, text, part } = page.values;
      const words = text.includes(part) ? part : "";
      const body = { model, text, words, nearest: page.number("nearest", 0, 10) };
      const { trace: seen } = await post("v1/trace", body, signal);
      put(shown, marked(text, seen.matches));
      const shares = Object.entries(seen.novelty).map(([n, share]) => [t("trace.new", { n }), percent(share)]);
      put(numbers, facts([[t("trace.tokens"), whole(seen.tokens)], ...shares]));
      const near = seen.nearest.map(({ text: name, similarity }) => ({ name, share: Math.max(0, similarity), value: fixed(similarity, 2) }));
      put(found, seen.matches.map(match), near.length > 0 && card(h("h2", {}, t("trace.nearest")), bars(near)));
    };
    const select = ({ target }) => {
      const chosen = target.value.slice(target.selectionStart, target.selectionEnd);
      document.getElementById("field-part").value = chosen;
      page.changed("part", chosen);
    };
    return [
      card(
        area(page, "text", 3, { onselect: select }),
        h("p", { class: "note" }, t("trace.select")),
        row(modelField(page), line(page, "part"), range(page, "nearest", { min: 0, max: 10, step: 1 })),
      ),
      card(shown, numbers, h("p", { class: "note" }, t("trace.hint"))),
      found,
    ];
  },
};

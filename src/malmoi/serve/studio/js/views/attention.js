// Who looks at whom: every head small, one head large, as lines or as a matrix.
import { post } from "../api.js";
import { h, put } from "../dom.js";
import { area, button, card, check, line, modelField, pick, row } from "../fields.js";
import { fixed } from "../numbers.js";
import { table } from "../parts.js";
import { headGrid } from "../pictures/grid.js";
import { lines } from "../pictures/lines.js";
import { matrix } from "../pictures/matrix.js";
import { savePng, saveSvg } from "../save.js";
import { t } from "../words.js";

const PICTURES = { lines, matrix };

export default {
  name: "attention",
  defaults: () => ({ text: t("attention.sample"), pair: "", words: "no", layer: "1", head: "1", picture: "lines" }),
  needs: (model) => model.tokenizer,

  build(page) {
    const large = h("div", {});
    const small = h("div", {});
    const numbers = h("div", {});
    let seen = null;
    const draw = () => {
      const layer = Math.min(page.number("layer", 1, 1000), seen.weights.length) - 1;
      const head = Math.min(page.number("head", 1, 1000), seen.weights[0].length) - 1;
      const weights = seen.weights[layer][head];
      const label = t("attention.one", { layer: layer + 1, head: head + 1 });
      put(large, h("h2", {}, label), PICTURES[page.values.picture in PICTURES ? page.values.picture : "lines"](seen.names, weights, label));
      put(small, h("h2", {}, t("attention.all")), headGrid(seen.weights, [layer, head], (l, k) => {
        page.set("layer", l + 1);
        page.set("head", k + 1);
        draw();
      }));
      put(numbers, table([t("attention.from"), ...seen.names], weights.map((values, i) => [seen.names[i], ...values.map((value) => fixed(value))])));
    };
    page.work = async (signal) => {
      const body = { model: page.values.model, text: page.values.text, pair: page.model.causal ? null : page.values.pair || null, words: page.values.words === "yes" };
      seen = await post("studio/attention", body, signal);
      draw();
    };
    const save = (how) => () => how(large.querySelector("svg"), `attention-${page.values.layer}-${page.values.head}`);
    return [
      card(area(page, "text", 2), row(modelField(page), page.model.causal ? null : line(page, "pair"), pick(page, "picture", [["lines", t("picture.lines")], ["matrix", t("picture.matrix")]]), check(page, "words"))),
      h("div", { class: "pair" }, card(large, row(button(t("save.svg"), save(saveSvg), { class: "quiet" }), button(t("save.png"), save(savePng), { class: "quiet" }))), card(small)),
      h("details", { class: "card" }, h("summary", {}, t("numbers")), numbers),
    ];
  },
};

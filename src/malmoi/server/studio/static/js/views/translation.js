// A translation with its attention to the source.
import { post } from "../api.js";
import { h, put } from "../dom.js";
import { area, card, modelField, number, row } from "../fields.js";
import { fixed } from "../numbers.js";
import { table, visible } from "../parts.js";
import { matrix } from "../pictures/matrix.js";
import { t } from "../words.js";

export default {
  name: "translation",
  needs: (model) => model.can.includes("cross_attention"),
  defaults: () => ({ text: "", layer: "-1" }),

  build(page) {
    const [said, large, numbers] = [h("p", {}), h("div"), h("div")];
    page.work = async (signal) => {
      const { model, text } = page.values;
      const layer = page.number("layer", -1, page.model.depth - 1);
      const seen = await post("studio/translation", { model, text, layer }, signal);
      said.textContent = seen.translation;
      put(large, matrix(seen.target, seen.weights, t("translation.title"), 0, seen.source));
      const rows = seen.weights.map((values, i) => [visible(seen.target[i]), ...values.map((value) => fixed(value))]);
      put(numbers, table([t("attention.from"), ...seen.source.map(visible)], rows));
    };
    return [
      card(area(page, "text", 2), row(modelField(page), number(page, "layer"))),
      card(said, large),
      h("details", { class: "card" }, h("summary", {}, t("numbers")), numbers),
    ];
  },
};

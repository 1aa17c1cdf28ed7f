// A translation with its attention to the source.
import { post } from "../api.js";
import { h, put } from "../dom.js";
import { area, card, modelField, pick, row } from "../fields.js";
import { fixed } from "../numbers.js";
import { table, visible } from "../parts.js";
import { matrix } from "../pictures/matrix.js";
import { t } from "../words.js";

export default {
  name: "translation",
  needs: (model) => model.can.includes("cross_attention"),
  defaults: ({ model }) => ({ text: "", layer: String(model?.depth ?? 1) }),

  build(page) {
    const [said, large, numbers] = [h("p", {}), h("div"), h("div")];
    page.work = async (signal) => {
      const { model, text } = page.values;
      const seen = await post("studio/translation", { model, text, layer: page.values.layer - 1 }, signal);
      said.textContent = seen.translation;
      const label = t("translation.title");
      put(large, h("div", { class: "wide", tabindex: "0", role: "group", "aria-label": label }, matrix(seen.target, seen.weights, label, 0, seen.source)));
      const rows = seen.weights.map((values, i) => [visible(seen.target[i]), ...values.map((value) => fixed(value))]);
      put(numbers, table([t("attention.from"), ...seen.source.map(visible)], rows));
    };
    const layers = Array.from({ length: page.model.depth }, (_, i) => [String(i + 1), t("lens.layer", { layer: i + 1 })]);
    return [
      card(area(page, "text", 2), row(modelField(page), pick(page, "layer", layers))),
      card(said, large),
      h("details", { class: "card" }, h("summary", {}, t("numbers")), numbers),
    ];
  },
};

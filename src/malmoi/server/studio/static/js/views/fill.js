// What a BERT would put in place of each mask.
import { post } from "../api.js";
import { h, put } from "../dom.js";
import { area, button, card, modelField, range, row } from "../fields.js";
import { bars } from "../parts.js";
import { t } from "../words.js";

export default {
  name: "fill",
  needs: (model) => model.can.includes("fill") && model.mask,
  defaults: (page) => ({ text: t("fill.sample").replaceAll("[MASK]", page.models[0]?.mask ?? "[MASK]"), top: "5" }),

  build(page) {
    const found = h("div", { class: "pair" });
    const text = area(page, "text", 2);
    const write = (words) => {
      text.querySelector("textarea").value = words;
      page.set("text", words);
      page.run();
    };
    page.work = async (signal) => {
      const body = { model: page.values.model, text: page.values.text, top: page.number("top", 1, 50) };
      const masks = (await post("v1/fill", body, signal)).fills;
      put(
        found,
        masks.map((fills, i) =>
          card(
            h("h2", {}, t("fill.mask", { number: i + 1 })),
            bars(
              fills.map((one) => ({ name: one.token, share: one.probability, text: one.text })),
              (chosen) => write(chosen.text),
            ),
          ),
        ),
      );
    };
    const insert = () => write(`${page.values.text.trimEnd()} ${page.model.mask}`);
    return [
      card(
        text,
        row(
          modelField(page),
          range(page, "top", { min: 1, max: 20, step: 1 }),
          button(t("fill.insert", { mask: page.model.mask }), insert, { class: "quiet" }),
        ),
      ),
      found,
      h("p", { class: "note" }, t("fill.hint")),
    ];
  },
};

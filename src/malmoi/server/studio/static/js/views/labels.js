// What a fine-tuned model says of a text: its label, or every label that holds.
import { post } from "../api.js";
import { h, put } from "../dom.js";
import { area, card, modelField, row } from "../fields.js";
import { bars } from "../parts.js";
import { t } from "../words.js";

export default {
  name: "labels",
  needs: (model) => model.classifies,
  defaults: () => ({ text: "" }),

  build(page) {
    const found = h("div", {});
    page.work = async (signal) => {
      const body = { model: page.values.model, text: page.values.text };
      const [one] = (await post("v1/classify", body, signal)).data;
      const held = one.labels ?? [one.label];
      const rows = Object.entries(one.scores).map(([name, share]) => ({ name, share, right: held.includes(name) }));
      rows.sort((a, b) => b.share - a.share);
      put(found, card(h("h2", {}, held.join(", ") || t("labels.none")), bars(rows)));
    };
    return [card(area(page, "text", 3), row(modelField(page))), found, h("p", { class: "note" }, t("labels.hint"))];
  },
};

// What each layer would say if it were the last.
import { post } from "../api.js";
import { h, put } from "../dom.js";
import { area, card, modelField, row } from "../fields.js";
import { percent } from "../numbers.js";
import { bars, visible } from "../parts.js";
import { t } from "../words.js";

const TOP = 8;

export default {
  name: "lens",
  needs: (model) => model.can.includes("logits"),
  defaults: (page) => ({ text: t(page.models[0]?.causal ? "lens.sample" : "fill.sample").replaceAll("[MASK]", page.models[0]?.mask ?? "[MASK]") }),

  build(page) {
    const grid = h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": t("lens.title") });
    const panel = h("div", { "aria-live": "polite" });
    page.work = async (signal) => {
      const seen = await post("studio/lens", { model: page.values.model, text: page.values.text, top: TOP }, signal);
      const open = (layer, place, node) => {
        grid.querySelectorAll("[aria-expanded]").forEach((one) => one.setAttribute("aria-expanded", String(one === node)));
        put(panel, h("h3", {}, t("lens.cell", { layer: named(layer), token: visible(seen.tokens[place]) })),
          bars(seen.layers[layer][place].map((guess) => ({ name: guess.text, share: guess.probability }))));
      };
      const cell = (guesses, layer, place) => h("td", {}, h("button", {
        type: "button", "aria-expanded": "false", title: percent(guesses[0].probability), style: { "--p": String(guesses[0].probability) },
        onclick: (event) => open(layer, place, event.currentTarget),
      }, visible(guesses[0].text)));
      const rows = seen.layers.map((places, layer) => h("tr", {}, h("th", { scope: "row" }, named(layer)), places.map((guesses, place) => cell(guesses, layer, place))));
      const head = h("tr", {}, h("td", {}), seen.tokens.map((token) => h("th", { scope: "col" }, visible(token))));
      const lastCell = rows.at(-1).querySelector("td:last-child button");
      put(grid, h("table", { class: "lens" }, h("thead", {}, head), h("tbody", {}, rows.reverse())));
      lastCell.click();
    };
    const named = (layer) => (layer ? t("lens.layer", { layer }) : t("lens.embedding"));
    return [card(area(page, "text", 2), row(modelField(page))), card(grid, h("p", { class: "note" }, t("lens.hint"))), card(panel)];
  },
};

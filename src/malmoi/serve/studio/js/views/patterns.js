// Attention patterns: drawn from the predicate itself, with what they cost.
import { post } from "../api.js";
import { h, put } from "../dom.js";
import { button, card, line, range, row } from "../fields.js";
import { bytes, percent, whole } from "../numbers.js";
import { bars, facts, maskPicture } from "../parts.js";
import { t } from "../words.js";

const KNOWN = [
  ["full", "full"], ["causal", "causal"], ["banded", "causal & local:8"], ["strided", "causal & strided:8"], ["fixed", "causal & fixed:8,2"],
  ["prefix", "causal | prefix:8"], ["two", "causal & local:8 ; causal & column:8"],
];

export default {
  name: "patterns",
  alone: () => true,
  defaults: () => ({ pattern: "causal & strided:8", drawn: "32", at: "11", heads: "12" }),

  build(page) {
    const found = h("div", {});
    const others = card();
    const costs = {}; // by pattern and length: they do not change
    const typed = line(page, "pattern", { class: "mono" });
    const chips = h("div", { class: "chips", role: "group", "aria-label": t("patterns.known") });
    const models = page.about.models.flatMap((model) => [...new Set(model.attention)].map((text) => [`${model.name}: ${text}`, text]));
    const choose = (text) => {
      typed.querySelector("input").value = text;
      page.set("pattern", text);
      page.run();
    };
    const furnish = () => put(chips, [...KNOWN.map(([name, text]) => [t(`pattern.${name}`), text]), ...models].map(([name, text]) =>
      button(name, () => choose(text), { class: "quiet", "aria-pressed": String(text === page.values.pattern) })));
    page.work = async (signal) => {
      furnish();
      const body = { pattern: page.values.pattern, length: page.number("drawn", 4, 64), at: 2 ** page.number("at", 6, 12), heads: page.number("heads", 1, 96) };
      const drawn = await post("studio/pattern", body, signal);
      const label = t("patterns.picture", { pattern: page.values.pattern });
      put(found,
        facts([[t("patterns.pairs", { at: whole(drawn.at) }), whole(drawn.pairs)], [t("patterns.share"), percent(drawn.share)], [t("patterns.tiles"), percent(drawn.tiles)],
          [t("patterns.memory"), bytes(drawn.memory)], [t("patterns.causal"), t(drawn.causal ? "yes" : "no")]]),
        h("div", { class: "pair" }, drawn.masks.map((mask, i) => card(drawn.masks.length > 1 ? h("h2", {}, t("patterns.group", { number: i + 1 })) : null, maskPicture(mask, label))), others),
        h("p", { class: "note" }, t("patterns.axes")));
      await compare(body, drawn.share, signal);
    };
    /** The known patterns' shares at the same length, as they come. */
    const compare = async (body, share, signal) => {
      const rows = [{ name: page.values.pattern, share, right: true }];
      for (const [name, pattern] of KNOWN.filter(([, text]) => text !== page.values.pattern)) {
        costs[`${pattern} ${body.at}`] ??= (await post("studio/pattern", { ...body, pattern, length: 1, heads: 2 }, signal)).share;
        rows.push({ name: t(`pattern.${name}`), share: costs[`${pattern} ${body.at}`] });
      }
      put(others, h("h2", {}, t("patterns.others")), bars(rows));
    };
    furnish();
    return [
      card(chips, h("div", { class: "row" }, typed),
        row(range(page, "drawn", { min: 4, max: 64, step: 1 }), range(page, "at", { min: 6, max: 12, step: 1 }, (v) => whole(2 ** v)), range(page, "heads", { min: 1, max: 96, step: 1 }))),
      found,
    ];
  },
};

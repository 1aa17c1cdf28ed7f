// How each tokenizer splits the same text.
import { post } from "../api.js";
import { h, put } from "../dom.js";
import { area, card } from "../fields.js";
import { fixed, whole } from "../numbers.js";
import { facts, visible } from "../parts.js";
import { t } from "../words.js";

/** A token as in the vocabulary, its id, and its text if that differs. */
const piece = (one) => {
  const other = !one.special && !one.bytes && one.text !== one.shown && one.text !== one.shown.replace(/^##/, "");
  return h(
    "li",
    { class: one.special ? "special" : one.unknown ? "unknown" : one.bytes ? "broken" : null, title: one.token },
    h("span", {}, one.bytes ?? visible(one.shown)),
    other && h("i", {}, t("tokens.from", { text: visible(one.text) })),
    h("small", {}, String(one.id)),
  );
};

export default {
  name: "tokens",
  compares: false, // it shows every tokenizer
  needs: (model) => model.tokenizer,
  defaults: () => ({ text: "" }),

  build(page) {
    const found = h("div", {});
    page.work = async (signal) => {
      const { cuts, characters, bytes, words } = await post("studio/tokens", { text: page.values.text }, signal);
      const cut = (one) => {
        const count = one.pieces.filter((p) => !p.special).length;
        return card(
          h("h2", {}, one.models.join(", ")),
          h("p", { class: "note" }, t("tokens.kind", { kind: t(`kind.${one.kind}`), vocab: whole(one.vocab) })),
          facts([
            [t("tokens.count"), whole(count)],
            [t("tokens.each"), count ? fixed(characters / count, 2) : "–"],
            [t("tokens.unknown"), whole(one.unknown)],
          ]),
          h("ol", { class: "pieces" }, one.pieces.map(piece)),
        );
      };
      put(
        found,
        h(
          "p",
          { class: "note" },
          t("tokens.text", { characters: whole(characters), bytes: whole(bytes), words: whole(words) }),
        ),
        cuts.map(cut),
      );
    };
    return [card(area(page, "text", 3)), found];
  },
};

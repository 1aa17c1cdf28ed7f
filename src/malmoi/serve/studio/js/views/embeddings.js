// Texts as points: near means alike.
import { post } from "../api.js";
import { h, put, s } from "../dom.js";
import { area, card, modelField, pick, row } from "../fields.js";
import { fixed, percent } from "../numbers.js";
import { bars } from "../parts.js";
import { t } from "../words.js";

const WIDEST = 460;
const HEIGHT = 360;
const EDGE = 24;

export default {
  name: "embeddings",
  needs: (model) => model.tokenizer,
  defaults: () => ({ texts: t("embeddings.sample"), layer: "-1", pool: "mean", text: "1" }),

  build(page) {
    const plane = h("div", {});
    const near = h("div", { "aria-live": "polite" });
    const layers = Array.from({ length: page.model.depth + 1 }, (_, i) => [String(i ? i - page.model.depth - 1 : -page.model.depth - 1), i ? t("lens.layer", { layer: i }) : t("lens.embedding")]);
    page.work = async (signal) => {
      const texts = page.values.texts.split("\n").map((text) => text.trim()).filter(Boolean);
      const seen = await post("studio/embeddings", { model: page.values.model, texts, layer: page.number("layer", -1000, 1000), pool: page.values.pool }, signal);
      const choose = (i) => {
        page.set("text", i + 1);
        put(near, h("h2", {}, t("embeddings.near", { text: texts[i] })), bars(seen.neighbours[i].map((one) => ({ name: texts[one.index], share: Math.max(0, one.cosine), value: fixed(one.cosine) }))));
        plane.querySelectorAll(".dot").forEach((dot, j) => {
          dot.classList.toggle("on", j === i);
          dot.classList.toggle("near", seen.neighbours[i].slice(0, 3).some((one) => one.index === j));
        });
      };
      put(plane, picture(texts, seen.points, choose), h("p", { class: "note" }, t("embeddings.share", { first: percent(seen.explained[0]), second: percent(seen.explained[1]) })));
      choose(Math.min(page.number("text", 1, texts.length), texts.length) - 1);
    };
    return [
      card(area(page, "texts", 8), row(modelField(page), pick(page, "layer", layers.reverse()), pick(page, "pool", [["mean", t("pool.mean")], ["cls", t("pool.cls")]]))),
      h("div", { class: "pair" }, card(plane), card(near)),
    ];
  },
};

function picture(texts, points, choose) {
  const width = Math.min(WIDEST, innerWidth - 76);
  const [x, y] = [0, 1].map((i) => {
    const values = points.map((point) => point[i]);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    return (value) => (value - low) / (high - low || 1);
  });
  const dot = (text, i) => {
    const [px, py] = [EDGE + x(points[i][0]) * (width - 2 * EDGE), HEIGHT - EDGE - y(points[i][1]) * (HEIGHT - 2 * EDGE)];
    const right = px > width / 2;
    return s("g", {
      class: "dot", tabindex: "0", role: "button", "aria-label": text, onclick: () => choose(i),
      onkeydown: (event) => ["Enter", " "].includes(event.key) && (event.preventDefault(), choose(i)),
    }, s("circle", { cx: px, cy: py, r: 7 }), s("text", { class: "soft", x: px + (right ? -11 : 11), y: py + 4, "text-anchor": right ? "end" : "start" }, text.length > 20 ? `${text.slice(0, 19)}…` : text));
  };
  return s("svg", { class: "picture", viewBox: `0 0 ${width} ${HEIGHT}`, role: "group", "aria-label": t("embeddings.title") }, texts.map(dot));
}

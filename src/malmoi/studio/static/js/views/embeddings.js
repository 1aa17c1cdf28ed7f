// Texts as points in a plane.
import { post } from "../api.js";
import { h, put } from "../dom.js";
import { area, card, modelField, pick, row } from "../fields.js";
import { fixed, percent } from "../numbers.js";
import { bars } from "../parts.js";
import { plane } from "../pictures/plane.js";
import { fit } from "../pictures/fit.js";
import { languageFor } from "../state.js";
import { t } from "../words.js";

const MARKED = 3; // neighbours that the plane shows
const LITTLE = 0.4; // of the variance on the plane: less, and distances on it mislead
const ALIKE = 0.6; // mean cosine of two texts above which all vectors point one way

class Cloud {
  constructor(page) {
    this.page = page;
    [this.plane, this.near] = [h("div"), h("div", { "aria-live": "polite" })];
    this.share = h("p", { class: "note" });
    this.chosen = 0;
    page.work = (signal) => this.read(signal);
    page.draw = () => this.seen && this.show();
  }

  async read(signal) {
    const { model, texts, pool } = this.page.values;
    this.texts = texts
      .split("\n")
      .map((text) => text.trim())
      .filter(Boolean);
    if (this.texts.length < 2) throw new Error(t("embeddings.few"));
    const body = { model, texts: this.texts, layer: this.page.number("layer", -1 - this.page.model.depth, -1), pool };
    this.seen = await post("studio/embeddings", body, signal);
    const [first, second] = this.seen.explained.map(percent);
    const little = this.seen.explained[0] + this.seen.explained[1] < LITTLE;
    const alike = this.seen.cosine > ALIKE && t("embeddings.alike", { cosine: fixed(this.seen.cosine, 2) });
    put(this.share, t("embeddings.share", { first, second }), little && ` ${t("embeddings.little")}`, alike && ` ${alike}`);
    const given = { label: t("embeddings.title"), choose: (i) => this.choose(i) };
    fit(this.plane, (width) => {
      const drawn = plane(this.texts, this.seen.points, { ...given, width });
      this.mark(drawn);
      return drawn;
    });
    this.show();
  }

  choose(chosen) {
    this.page.set("chosen", chosen + 1);
    this.page.redraw();
  }

  /** A text's neighbours: in a list, and marked on the plane. */
  show() {
    const chosen = this.page.number("chosen", 1, this.texts.length) - 1;
    const near = this.seen.neighbours[chosen];
    const bar = ({ index, cosine }) => ({ name: this.texts[index], share: Math.max(0, cosine), value: fixed(cosine) });
    put(this.near, h("h2", {}, t("embeddings.near", { text: this.texts[chosen] })), bars(near.map(bar)));
    this.chosen = chosen;
    this.mark(this.plane);
  }

  mark(drawn) {
    const near = this.seen.neighbours[this.chosen]?.slice(0, MARKED).map((one) => one.index) ?? [];
    const dots = [...drawn.querySelectorAll(".dot")];
    dots.forEach((dot, i) => {
      dot.classList.toggle("on", i === this.chosen);
      dot.classList.toggle("near", near.includes(i));
    });
  }
}

export default {
  name: "embeddings",
  needs: (model) => model.can.includes("embed"),
  defaults: ({ model }) => ({ texts: t(`embeddings.sample.${languageFor(model)}`), layer: "-1", pool: "mean", chosen: "1" }),

  build(page) {
    const cloud = new Cloud(page);
    const { depth } = page.model;
    const layers = Array.from({ length: depth + 1 }, (_, back) => [String(-1 - back), layerName(depth - back)]);
    const pools = ["mean", "cls"].map((name) => [name, t(`pool.${name}`)]);
    return [
      card(area(page, "texts", 8), row(modelField(page), pick(page, "layer", layers), pick(page, "pool", pools))),
      h("div", { class: "pair" }, card(cloud.plane, cloud.share), card(cloud.near)),
    ];
  },
};

const layerName = (layer) => (layer ? t("lens.layer", { layer }) : t("lens.embedding"));

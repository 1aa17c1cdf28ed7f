// A linear probe on each layer, with the most frequent label and a control task.
import { post } from "../api.js";
import { h, put } from "../dom.js";
import { act, area, button, card, modelField, pick, row } from "../fields.js";
import { percent } from "../numbers.js";
import { table } from "../parts.js";
import { chart } from "../pictures/chart.js";
import { fit } from "../pictures/fit.js";
import { languageFor } from "../state.js";
import { t } from "../words.js";

const COLUMNS = ["upos", "xpos", "deprel"];

class Probe {
  constructor(page) {
    this.page = page;
    [this.picture, this.said, this.numbers] = [h("div"), h("p"), h("div")];
    this.file = h("input", { type: "file", id: "probe-file", accept: ".conllu,.tsv,.txt" });
    page.work = (signal) => this.read(signal);
  }

  async read(signal) {
    const { model, labelled, column } = this.page.values;
    const [file] = document.getElementById("probe-file").files; // one field for all models
    const lines = file ? await file.text() : labelled;
    const language = languageFor(this.page.model);
    const found = await post("studio/probe", { model, lines, label: column, language }, signal);
    const { layers, majority, labels, train, test } = found;
    put(this.said, t("probe.said", { labels: labels.length, train, test, majority: percent(majority) }));
    const series = [
      { name: t("probe.accuracy"), label: t("probe.accuracy"), hue: "var(--a)", points: layers.map((one) => [one.layer, one.accuracy]) },
      { name: t("probe.control"), label: t("probe.control"), hue: "var(--b)", points: layers.map((one) => [one.layer, one.control]) },
      { name: t("probe.majority"), label: t("probe.majority"), hue: "var(--soft)", dashed: true, points: layers.map((one) => [one.layer, majority]) },
    ];
    fit(this.picture, (width) => chart(series, { width, across: t("field.layer"), up: t("probe.accuracy"), read: percent, floor: 0 }));
    const rows = layers.map((one) => [one.layer || t("lens.embedding"), percent(one.accuracy), percent(one.control)]);
    put(this.numbers, table([t("field.layer"), t("probe.accuracy"), t("probe.control")], rows));
  }
}

export default {
  name: "probe",
  waits: true,
  needs: (model) => model.tokenizer && !model.can.includes("cross_attention"),
  defaults: () => ({ labelled: "", column: "upos" }),

  build(page) {
    const probe = new Probe(page);
    const columns = COLUMNS.map((name) => [name, t(`column.${name}`)]);
    return [
      card(
        area(page, "labelled", 4, { placeholder: t("probe.sample") }),
        h("p", { class: "note" }, t("probe.shape")),
        row(
          modelField(page),
          h("div", { class: "field" }, h("label", { for: "probe-file" }, t("probe.file")), probe.file),
          pick(page, "column", columns),
        ),
        act(button(t("probe.do"), () => page.run(), { id: "probe" })),
      ),
      card(probe.said, probe.picture, h("p", { class: "note" }, t("probe.hint")), h("details", {}, h("summary", {}, t("numbers")), probe.numbers)),
    ];
  },
};

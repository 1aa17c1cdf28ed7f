// A chart of a single point, drawn without a browser. Prints the dot and the texts.
const node = (tag) => ({
  tag,
  given: {},
  children: [],
  style: { setProperty() {} },
  addEventListener() {},
  setAttribute(name, value) {
    this.given[name] = value;
  },
  append(...some) {
    this.children.push(...some);
  },
});
globalThis.document = { createElementNS: (_, tag) => node(tag) };
const { chart } = await import("./pictures/chart.js");
const every = (one) => [one, ...(one.children ?? []).flatMap(every)];
const series = [{ name: "run", hue: "red", points: [[17, 0.46]] }];
const found = every(chart(series, { width: 600, across: "step", up: "" }));
const dot = found.find((one) => one.tag === "circle").given;
const texts = found.filter((one) => one.tag === "text").map((one) => one.children[0]);
console.log(JSON.stringify({ dot, texts }));

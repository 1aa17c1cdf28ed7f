// A page of the studio without a browser: a clock, timers and a server that are moved by hand. Prints what was seen.
const [timers, asked] = [[], []];
let clock = 0;
globalThis.setTimeout = (work, ms) => timers.push({ work, ms });
globalThis.clearTimeout = () => timers.splice(0);
Object.defineProperty(globalThis, "performance", { value: { now: () => clock } });
globalThis.history = { replaceState() {} };
globalThis.document = { documentElement: { lang: "en" } };
globalThis.sessionStorage = { getItem: () => null };
globalThis.fetch = (path, { signal }) =>
  new Promise((answer, refuse) => {
    asked.push({ signal, answer });
    signal.addEventListener("abort", () => refuse(new Error("aborted")));
  });

class Node {
  classes = new Set();
  classList = {
    add: (name) => this.classes.add(name),
    remove: (name) => this.classes.delete(name),
    contains: (name) => this.classes.has(name),
  };
  replaceChildren(...all) {
    this.text = all.join("");
  }
  scrollIntoView() {}
}

const { Page } = await import("./page.js");
const { post } = await import("./api.js");
const places = { status: new Node(), shown: new Node() };
const page = new Page({ name: "lens", defaults: () => ({ text: "" }) }, { models: [] }, {}, places);
page.work = (signal) => post("studio/lens", {}, signal);
const seen = [];
const look = () => seen.push({ status: places.status.text, stale: places.shown.classes.has("stale") });
const settle = () => new Promise((done) => setImmediate(done));
const pauses = [];

async function answered(ms, error = null) {
  clock += ms;
  asked.at(-1).answer({ ok: !error, status: error ? 500 : 200, json: async () => ({ error }) });
  await settle();
  look();
}
function typed(key) {
  page.changed("text", key);
  pauses.push(timers.at(-1).ms);
  look();
}
const waited = () => timers.splice(0).forEach(({ work }) => work());

page.run();
await answered(10); // fast
typed("a");
waited();
await answered(2000); // slow
typed("ab");
waited();
clock += 500;
typed("abc"); // before the answer came: that request is given up now, not when the next one starts
const givenUp = asked.at(-1).signal.aborted;
await settle();
waited();
await answered(60_000); // very slow
typed("abcd");
waited();
await answered(10, { message: "failed" });
const { particle } = await import("./words.js");
const [object, way] = [["사람", "거기"], ["서울"]];
const particles = [
  ...object.map((word) => word + particle(word, "을")),
  ...way.map((word) => word + particle(word, "으로")),
  ...["GPT"].map((word) => word + particle(word, "을")),
  ...["3", "1"].map((word) => word + particle(word, "으로")),
];
console.log(JSON.stringify({ particles, seen, pauses, givenUp, runs: asked.length }));
process.exit(0);

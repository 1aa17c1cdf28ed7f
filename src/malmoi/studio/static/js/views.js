// Every view, in the order of the menu. To add one:
//  1. js/views/NAME.js: `export default { name, needs, defaults, build }`.
//     needs(model): whether a loaded model supports it (models as in studio/about); alone(about): needs no model.
//     defaults(page): its settings as strings. `text` is the sentence that all views share, `model` the shared model
//     (every view has it); both, and every other setting, are read from and kept in the address by the page.
//     build(page): elements, the first being the card with the fields; sets page.work = async (signal) => …,
//     which runs at once and after each change (`waits: true`: only on request). See page.js for the page's methods.
//     When two models are compared it is called for each: everything below the fields appears twice except `shared`
//     cards, with the same settings for both. `compares: false` turns this off.
//  2. its import and its place in a group below.
//  3. its words in words/en.json and ko.json: NAME.name, .title, .lead, .need, .command (and field.X for new fields).
//  4. its numbers: a typed function in studio/*.py under `model_view`, imported in app.py.
//  5. its name in VIEWS of tests/studio/test_studio.py, which opens every view in both languages and on a phone.
import ablate from "./views/ablate.js";
import attention from "./views/attention.js";
import beside from "./views/beside.js";
import chat from "./views/chat.js";
import embeddings from "./views/embeddings.js";
import fill from "./views/fill.js";
import finetuned from "./views/finetuned.js";
import generate from "./views/generate.js";
import home from "./views/home.js";
import hour from "./views/hour.js";
import lens from "./views/lens.js";
import next from "./views/next.js";
import patterns from "./views/patterns.js";
import probe from "./views/probe.js";
import replay from "./views/replay.js";
import shots from "./views/shots.js";
import tokens from "./views/tokens.js";
import train from "./views/train.js";
import translation from "./views/translation.js";

export const GROUPS = {
  start: [home, hour],
  text: [tokens, embeddings],
  inside: [attention, patterns, lens, ablate, probe],
  words: [next, generate, chat, fill, beside],
  tasks: [finetuned, shots, translation],
  training: [train, replay],
};
export const VIEWS = Object.values(GROUPS).flat();
export const named = (name) => VIEWS.find((view) => view.name === name);

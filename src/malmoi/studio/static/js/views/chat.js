// A streamed conversation with a model through its chat template.
import { stream } from "../api.js";
import { h, put } from "../dom.js";
import { act, area, button, card, line, modelField, range, row, shared } from "../fields.js";
import { t } from "../words.js";

class Chat {
  constructor(page) {
    this.page = page;
    this.messages = []; // {role, content}
    this.log = h("div", { class: "chat", role: "log", "aria-label": t("chat.log"), lang: "" });
    page.send = (signal) => this.send(signal);
    page.draw = () => this.clear();
  }

  /** The model's input: the instruction and the whole conversation. */
  get asked() {
    const { instruction } = this.page.values;
    return [...(instruction.trim() ? [{ role: "system", content: instruction }] : []), ...this.messages];
  }

  async send(signal) {
    const said = this.page.values.message.trim();
    if (!said) return;
    this.say("user", said);
    const { model, temperature, seed, length } = this.page.values;
    const body = { model, messages: this.asked, temperature: Number(temperature), seed: Number(seed), max_tokens: Number(length) };
    const reply = this.say("assistant", "");
    try {
      for await (const event of stream("v1/chat/completions", body, signal)) {
        const [{ delta, finish_reason: why } = {}] = event.choices;
        reply.message.content += delta?.content ?? "";
        put(reply.text, reply.message.content);
        if (why === "length") reply.node.append(h("small", {}, t("finish.length")));
      }
    } catch (error) {
      if (!reply.message.content) this.drop(reply);
      throw error;
    }
  }

  say(role, content) {
    const message = { role, content };
    this.messages.push(message);
    const text = h("p", {}, content);
    const node = h("div", { class: role }, h("b", {}, t(`chat.${role}`)), text);
    this.log.append(node);
    return { message, text, node };
  }

  /** Removes a reply that never started. */
  drop({ message, node }) {
    this.messages.splice(this.messages.indexOf(message), 1);
    node.remove();
  }

  clear() {
    this.messages = [];
    put(this.log);
  }
}

export default {
  name: "chat",
  waits: true,
  needs: (model) => model.template && model.can.includes("chat"),
  defaults: () => ({ message: "", instruction: "", temperature: "0.7", length: "200", seed: "0" }),

  build(page) {
    const chat = new Chat(page);
    const field = () => document.getElementById("field-message");
    const send = () => {
      page.run("send"); // each side has read the message by now
      field().value = "";
      page.set("message", "");
      field().focus();
    };
    const clear = () => {
      page.stop();
      page.redraw();
      field().focus();
    };
    const onkeydown = (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      send();
    };
    return [
      card(
        row(modelField(page), line(page, "instruction")),
        row(
          range(page, "temperature", { min: 0, max: 2, step: 0.05 }),
          range(page, "length", { min: 16, max: 1000, step: 8 }),
          line(page, "seed", { type: "number", min: 0, step: 1 }),
        ),
      ),
      card(chat.log),
      shared(
        area(page, "message", 2, { oninput: (event) => page.set("message", event.target.value), onkeydown }),
        act(
          button(t("chat.send"), send, { id: "send" }),
          button(t("stop"), () => page.stop(), { class: "quiet" }),
          button(t("chat.clear"), clear, { class: "quiet" }),
        ),
        h("p", { class: "note" }, t("chat.hint")),
      ),
    ];
  },
};

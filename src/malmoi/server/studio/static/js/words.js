// What the page says, in Korean or English: one dictionary each, the same keys in both but for refusals.
import { get } from "./api.js";

export const LANGUAGES = ["en", "ko"];
let dictionary = {};

export function preferred() {
  const kept = localStorage.getItem("malmoi.language");
  return LANGUAGES.includes(kept) ? kept : navigator.language.startsWith("ko") ? "ko" : "en";
}

export async function speak(language) {
  dictionary = await get(`words/${language}.json`);
  document.documentElement.lang = language;
}

/** A refusal by its code, else by its type, else as the server says it: in English that needs no other words. */
export function refusal({ code, type, param, message }) {
  const key = [`refused.${code}`, `refused.${type}`].find((one) => one in dictionary);
  return key ? t(key, { param }) : message;
}

/** The words of a key, with {names} replaced. */
export function t(key, values = {}) {
  return Object.entries(values).reduce(
    (text, [name, value]) => text.replaceAll(`{${name}}`, value),
    dictionary[key] ?? key,
  );
}

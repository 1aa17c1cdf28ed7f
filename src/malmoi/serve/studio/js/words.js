// What the page says, in Korean or English: one dictionary each, the same keys in both.
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

/** The words of a key, with {names} replaced. */
export function t(key, values = {}) {
  return Object.entries(values).reduce(
    (text, [name, value]) => text.replaceAll(`{${name}}`, value),
    dictionary[key] ?? key,
  );
}

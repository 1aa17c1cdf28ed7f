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

export const has = (key) => key in dictionary;

/** The words of a key: {name} is its value, {name:one|many} depends on a number, {name:을} is the particle after it. */
export function t(key, values = {}) {
  return (dictionary[key] ?? key).replace(/\{([a-z]+)(?::([^}]+))?\}/g, (all, name, form) => {
    if (!(name in values)) return all;
    const value = String(values[name]);
    if (!form) return value;
    return form.includes("|") ? form.split("|")[value === "1" ? 0 : 1] : particle(value, form);
  });
}

const PARTICLES = { 을: "를", 은: "는", 이: "가", 과: "와", 으로: "로" };

/** 을 or 를, by whether the word ends in a consonant as it is read aloud. */
export function particle(word, form) {
  const last = word.trimEnd().at(-1) ?? "";
  const syllable = last.charCodeAt(0) - 0xac00;
  const hangul = syllable >= 0 && syllable < 11172;
  const final = hangul ? syllable % 28 > 0 : /[013678lmn]/i.test(last);
  const rieul = hangul ? syllable % 28 === 8 : /[178lr]/i.test(last);
  return final && !(form === "으로" && rieul) ? form : PARTICLES[form];
}

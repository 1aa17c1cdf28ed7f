// The page's strings in Korean and English: one dictionary each, with the same keys except for errors.
import { get } from "./api.js";
import { bytes, fixed, percent, short, whole } from "./numbers.js";

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

/** The text of an error: the server's where that is Korean, else by its code, else by its type, else the server's. */
export function refusal({ code, type, param, message }) {
  if (/(니다|세요)[.)]/.test(message)) return message;
  const key = [`refused.${code}`, `refused.${type}`].find((one) => one in dictionary);
  return key ? t(key, { param }) : message;
}

export const has = (key) => key in dictionary;

/** The string of a key, with its values. */
export const t = (key, values = {}) => spell(dictionary[key] ?? key, values);

const NUMBERS = { "%": percent, "~": short, B: bytes, ",": (value) => whole(Math.round(value)) };

/**
 * A sentence with its values: {name} is replaced by a value, {name:%}, {name:,}, {name:~}, {name:B} and {name:.2} by a number as
 * a share, whole, short, as bytes or with so many digits, {name:one|many} depends on a number, {name:을} is a particle.
 */
export function spell(sentence, values) {
  return sentence.replace(/\{([a-z]+)(?::([^}]+))?\}/g, (all, name, form) => {
    if (!(name in values)) return all;
    if (/^\.\d$/.test(form)) return fixed(values[name], Number(form[1]));
    if (form in NUMBERS) return NUMBERS[form](values[name]);
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

// Formats numbers for people.
export function percent(p) {
  if (p < 0) return `−${percent(-p)}`;
  if (p >= 0.9995) return "100%";
  if (p >= 0.0001) return `${(100 * p).toFixed(p >= 0.1 ? 1 : 2)}%`;
  return p > 0 ? "<0.01%" : "0%";
}

export const fixed = (x, digits = 3) => x.toFixed(digits).replace("-", "−");
export const whole = (n) => n.toLocaleString("en-US");

/** With three digits and a word of the page's language: 10.5M, 1050만; Korean has none below 만. */
export function short(n) {
  const korean = document.documentElement?.lang === "ko";
  const notation = korean && Math.abs(n) < 1e4 ? "standard" : "compact";
  return n.toLocaleString(korean ? "ko" : "en", { notation, maximumSignificantDigits: 3, useGrouping: true });
}

export function bytes(n) {
  for (const [size, sign] of [
    [2 ** 30, "GiB"],
    [2 ** 20, "MiB"],
    [2 ** 10, "KiB"],
  ])
    if (n >= size) return `${+(n / size).toPrecision(3)} ${sign}`;
  return `${n} B`;
}

/** Colour strength of a probability, by its logarithm from 1 to 1 in 10,000. */
export const strength = (p) => Math.max(0, Math.min(1, 1 + Math.log10(Math.max(p, 1e-9)) / 4));

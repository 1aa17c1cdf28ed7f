// Formats numbers for people.
export const percent = (p) =>
  p >= 0.9995
    ? "100%"
    : p >= 0.1
      ? `${(100 * p).toFixed(1)}%`
      : p >= 0.0001
        ? `${(100 * p).toFixed(2)}%`
        : p > 0
          ? "<0.01%"
          : "0%";
export const fixed = (x, digits = 3) => x.toFixed(digits).replace("-", "−");
export const whole = (n) => n.toLocaleString("en-US");

export function short(n) {
  for (const [size, sign] of [
    [1e9, "B"],
    [1e6, "M"],
    [1e3, "k"],
  ])
    if (Math.abs(n) >= size) return `${+(n / size).toPrecision(3)}${sign}`;
  return `${+n.toPrecision(3)}`;
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

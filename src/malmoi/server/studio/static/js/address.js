// Where we are and with which settings, in the address: #/attention?text=…&layer=2
export function read() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { name: path, values: Object.fromEntries(new URLSearchParams(query)) };
}

/** Writes the settings that differ from a view's own, without a new entry in the history. */
export function write(name, values, defaults) {
  const changed = Object.entries(values).filter(([key, value]) => value !== (defaults[key] ?? ""));
  const query = new URLSearchParams(changed).toString();
  history.replaceState(null, "", `#/${name}${query ? `?${query}` : ""}`);
}

// Requests to the server. An error carries the server's message, code and type; a stream yields its events.
export class Refused extends Error {
  constructor({ message, code, type, param }, status) {
    super(message);
    Object.assign(this, { code, type, param, status });
  }
}

export const get = (path, signal) => ask(path, { signal }).then((answer) => answer.json());
export const post = (path, body, signal) => ask(path, sent(body, signal)).then((answer) => answer.json());

/** Server-sent events as values, up to [DONE]. */
export async function* stream(path, body, signal) {
  const answer = await ask(path, sent({ ...body, stream: true }, signal));
  let rest = "";
  for await (const part of texts(answer.body)) {
    const lines = (rest + part).split("\n");
    rest = lines.pop();
    for (const line of lines.map((one) => one.trim())) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data:")) yield checked(JSON.parse(line.slice(5)));
    }
  }
}

function checked(event) {
  if (event.error) throw new Refused(event.error, 500);
  return event;
}

async function* texts(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let step = await reader.read(); !step.done; step = await reader.read()) yield step.value;
}

const sent = (body, signal) => ({
  method: "POST",
  body: JSON.stringify(body),
  signal,
  headers: { "Content-Type": "application/json" },
});

async function ask(path, options) {
  const key = sessionStorage.getItem("malmoi.key");
  const language = { "Accept-Language": document.documentElement.lang }; // of refusals
  const headers = { ...options.headers, ...language, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const answer = await fetch(path, { ...options, headers });
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => ({}));
  throw new Refused(said.error ?? { message: `${answer.status} ${answer.statusText}` }, answer.status);
}

// The way to the server: the key, plain JSON, and streams of events.

const KEY = "strata.key";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const getKey = () => sessionStorage.getItem(KEY) ?? "";

export function setKey(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

async function ask(path, options) {
  const key = getKey();
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const reply = await fetch(path, { ...options, headers });
  if (reply.ok) return reply;
  let message = `status ${reply.status}`;
  try {
    message = (await reply.json()).error.message;
  } catch {
    // no JSON: the status has to do
  }
  throw new ApiError(reply.status, message);
}

export const getJson = async (path, signal) => (await ask(path, { signal })).json();

// Yields the JSON of every event until [DONE].
export async function* postStream(path, body, signal) {
  const headers = { "content-type": "application/json" };
  const reply = await ask(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      if (event === "data: [DONE]") return;
      const content = JSON.parse(event.slice(6));
      if (content.error) throw new ApiError(500, content.error.message);
      yield content;
    }
  }
}

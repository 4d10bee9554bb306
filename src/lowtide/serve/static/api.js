// Requests to this server: the key, errors in words, streams of events.

import { byId } from "./dom.js";

const KEY = "lowtide-key";

/** A refusal or a failure, with a message for people. */
export class Failure extends Error {
  constructor(message, status = 0, retryS = 0) {
    super(message);
    this.status = status;
    this.retryS = retryS;
  }
}

/** Send a request and return its response. Asks for the key once the server wants one. */
export async function ask(path, body = null, signal = undefined) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { "content-type": "application/json" };
    if (key !== null) headers.authorization = `Bearer ${key}`;
    const request = { headers, signal };
    if (body !== null) Object.assign(request, { method: "POST", body: JSON.stringify(body) });
    let response;
    try {
      response = await fetch(path, request);
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new Failure("The server cannot be reached. Is it still running?");
    }
    if (response.ok) return response;
    const message = await toldBy(response);
    if (response.status !== 401) {
      throw new Failure(message, response.status, Number(response.headers.get("retry-after")));
    }
    if (sessionStorage.getItem(KEY) === key) await newKey(key !== null);
  }
}

async function toldBy(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status} without a word.`;
  }
}

let asking = null;

/** Wait for the user's key; requests that want one at the same time share the question. */
function newKey(isWrong) {
  asking ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    if (isWrong) byId("key-note").textContent = "That was not the key. It is kept for this tab alone.";
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.addEventListener("close", resolve, { once: true });
    dialog.showModal();
  }).then(() => {
    sessionStorage.setItem(KEY, byId("key").value.trim());
    byId("key").value = "";
    asking = null;
  });
  return asking;
}

/** Yield a response's server-sent events as [name, data]. */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(() => {
        throw new Failure("The connection to the server broke off. Is it still running?");
      });
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const fields = {};
        for (const line of part.split("\n")) {
          const colon = line.indexOf(": ");
          if (colon > 0) fields[line.slice(0, colon)] = line.slice(colon + 2);
        }
        if (fields.data !== undefined) yield [fields.event ?? "message", fields.data];
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

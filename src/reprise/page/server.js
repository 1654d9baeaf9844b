// Talks to the server. The API key is a header, never a part of an address.
import { $ } from "./dom.js";

const KEY = "reprise-key";
let asking = null;

export class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

const headers = (more) => {
  const key = sessionStorage.getItem(KEY);
  return { ...(key ? { authorization: `Bearer ${key}` } : {}), ...more };
};

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

function askKey(sentence) {
  asking ??= new Promise((resolve) => {
    const dialog = $("ask-key");
    $("key-error").textContent = sentence;
    $("key").value = "";
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    $("key-form").addEventListener("submit", () => {
      sessionStorage.setItem(KEY, $("key").value.trim());
      asking = null;
      resolve();
    }, { once: true });
    if (!dialog.open) dialog.showModal();
  });
  return asking;
}

export async function send(path, options = {}) {
  for (;;) {
    const had = hasKey();
    const response = await fetch(path, { ...options, headers: headers(options.headers), cache: "no-store" });
    if (response.status === 401) { await askKey(had ? "The server does not know this key." : ""); continue; }
    if (!response.ok) {
      let message = `The server answered with status ${response.status}.`;
      try { message = (await response.json()).error.message ?? message; } catch { /* not JSON: the status says it */ }
      throw new Refused(response.status, message);
    }
    return response;
  }
}

export const get = async (path) => (await send(path)).json();
export const post = (path, body, signal) => send(path, {
  method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" }, signal });

// The events of a stream: {id, name, data}.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const event = { id: "", name: "message", data: "" };
      for (const line of block.split("\n")) {
        const at = line.indexOf(": ");
        if (at <= 0) continue;
        const field = line.slice(0, at), text = line.slice(at + 2);
        if (field === "event") event.name = text;
        else if (field in event) event[field] = text;
      }
      if (event.data) yield event;
    }
  }
}

// Watches the server while the page is seen: calls `hear` with each event, and `state` with whether it is connected.
export function watch(hear, state) {
  let lastId = "", stop = null, pause = 1000;
  async function run() {
    for (;;) {
      if (document.hidden) await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
      if (document.hidden) continue;
      stop = new AbortController();
      try {
        const response = await send("/v1/events", { headers: lastId ? { "last-event-id": lastId } : {}, signal: stop.signal });
        state(true);
        pause = 1000;
        for await (const event of events(response)) {
          if (event.id) lastId = event.id;
          hear(event.name, JSON.parse(event.data));
        }
      } catch { /* told below, and tried again */ }
      if (document.hidden) continue;
      state(false);
      await new Promise((resolve) => setTimeout(resolve, pause));
      pause = Math.min(15000, pause * 2);
    }
  }
  document.addEventListener("visibilitychange", () => document.hidden && stop?.abort());
  run();
}

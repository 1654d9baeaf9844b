// A chat whose prompt is computed while one types. Messages are a tree: an edit or another answer is a branch.
import { $, h, put, shown, oneLine } from "./dom.js";
import { num, seconds } from "./format.js";
import { isSeveral, model, stateOf } from "./models.js";
import { events, get, post } from "./server.js";
import { find, stack, SOURCES } from "./requests.js";

const TYPING_MS = 350;
const root = { children: [], at: 0 };
const MOST_IMAGE_BYTES = 20e6;
let waitingPictures = [];
let running = null, timer = 0, filling = null, filled = "", editing = null, edited = "";

const path = () => {
  const found = [];
  for (let node = root; node.children.length; ) { node = node.children[node.at]; found.push(node); }
  return found;
};
const sent = (nodes) => nodes.map(({ role, content, reasoning, calls }) => ({ role, content,
  ...(reasoning ? { reasoning_content: reasoning } : {}), ...(calls?.length ? { tool_calls: calls } : {}) }));
// A message of images and text is a list of parts.
const words = (content) => (typeof content === "string" ? content : content.map((part) => part.text ?? "").join(""));
const picturesOf = (content) => (typeof content === "string" ? [] : content.filter((part) => part.image_url).map((part) => part.image_url.url));
const composed = (text, pictures) => (pictures.length ? [...pictures.map((url) => ({ type: "image_url", image_url: { url } })), ...(text ? [{ type: "text", text }] : [])] : text);
const asked = () => (isSeveral() ? { model: model() } : {});
const above = (node) => { const all = path(); return all.slice(0, all.indexOf(node)); };

function grow(parent, node) {
  parent.children.push(Object.assign(node, { parent, children: [], at: 0 }));
  parent.at = parent.children.length - 1;
  return node;
}

async function answer(parent) {
  clearTimeout(timer);
  filling?.abort();
  const before = parent === root ? [] : path().slice(0, path().indexOf(parent) + 1);
  const node = grow(parent, { role: "assistant", content: "", reasoning: "", calls: [], state: "waits", model: model() });
  running = new AbortController();
  const began = performance.now();
  draw();
  try {
    const response = await post("/v1/chat/completions", { ...asked(), messages: sent(before), stream: true, stream_options: { include_usage: true } }, running.signal);
    for await (const event of events(response)) {
      if (event.data === "[DONE]") break;
      const chunk = JSON.parse(event.data), delta = chunk.choices?.[0]?.delta ?? {};
      if (chunk.error) throw new Error(chunk.error.message);
      node.id = chunk.id ?? node.id;
      const piece = (delta.reasoning_content ?? delta.reasoning ?? "") + (delta.content ?? "");
      if ((piece || delta.tool_calls) && node.ttft === undefined) node.ttft = (performance.now() - began) / 1000;
      node.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
      node.content += delta.content ?? "";
      for (const call of delta.tool_calls ?? []) {
        const known = (node.calls[call.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
        known.id ||= call.id ?? "";
        known.function.name += call.function?.name ?? "";
        known.function.arguments += call.function?.arguments ?? "";
      }
      if (chunk.usage) node.usage = chunk.usage;
      if (piece) show(node);
    }
    node.state = "done";
  } catch (error) {
    node.state = error.name === "AbortError" ? "stopped" : "failed";
    if (node.state === "failed") node.error = error.message;
  }
  running = null;
  draw();
  $("spoken").textContent = shown(node.content, 2000);
  if (node.id) { const known = find(node.id); if (known) recorded(known); else await report(node); }
}

// The record comes with the events, mostly; where they are late, it is looked for once.
export function recorded(record) {
  for (const node of path()) if (node.id === record.id && !node.record) { node.record = record; draw(); }
}

async function report(node) {
  await new Promise((resolve) => setTimeout(resolve, 1500));
  if (!node.record) (await get("/v1/cache/requests?limit=40")).data.forEach(recorded);
}

// While one types: the server computes what cannot change any more.
function typed() {
  clearTimeout(timer);
  const text = $("draft").value, content = composed(text, waitingPictures), key = `${waitingPictures.length} ${text}`;
  if (running || text.trim().length < 2) return;
  timer = setTimeout(async () => {
    if (key === filled) return;
    filling?.abort();
    filling = new AbortController();
    try {
      const told = await (await post("/v1/prefill", { ...asked(), messages: [...sent(path()), { role: "user", content }], partial: true }, filling.signal)).json();
      filled = key;
      $("draft-note").textContent = `${num(told.prompt_tokens)} tokens are ready before you send`;
    } catch (error) { if (error.name !== "AbortError") $("draft-note").textContent = ""; }
  }, TYPING_MS);
}

function show(node) {
  const said = document.querySelector(`[data-node="${node.number}"] .said`);
  const thought = document.querySelector(`[data-node="${node.number}"] .thought`);
  if (!said || (node.reasoning && !thought)) return draw();
  said.textContent = shown(node.content, 200000);
  if (thought) thought.textContent = shown(node.reasoning, 200000);
}

function draw() {
  const nodes = path();
  nodes.forEach((node, at) => { node.number = at; });
  put($("messages"), nodes.map((node) => h("li", { class: `message ${node.role}`, "data-node": node.number }, head(node), body(node), node.role === "assistant" ? after(node) : null)));
  if (!nodes.length) put($("messages"), h("li", { class: "empty", style: { margin: "auto", "text-align": "center", "max-width": "26rem" } }, "What you write is computed while you type. Under each answer stands what was reused, and how long the first token took."));
  $("send").textContent = running ? "Stop" : "Send";
}

function head(node) {
  const all = node.parent.children, at = all.indexOf(node);
  const turn = (step) => { node.parent.at = (at + step + all.length) % all.length; draw(); };
  return h("div", { class: "who" }, node.role === "user" ? "You" : isSeveral() && node.model ? oneLine(node.model.split("/").at(-1), 40) : "Model",
    all.length > 1 ? h("span", {}, h("button", { class: "quiet", type: "button", "aria-label": "Earlier branch", disabled: running !== null, onclick: () => turn(-1) }, "‹"), `${at + 1} of ${all.length}`, h("button", { class: "quiet", type: "button", "aria-label": "Later branch", disabled: running !== null, onclick: () => turn(1) }, "›")) : null,
    running ? null : node.role === "user" ? h("button", { class: "quiet", type: "button", onclick: () => { editing = node; edited = words(node.content); draw(); } }, "Edit")
      : h("button", { class: "quiet", type: "button", onclick: () => answer(node.parent) }, "Regenerate"));
}

function body(node) {
  if (editing !== node) {
    const calls = (node.calls ?? []).filter(Boolean).map((call) => h("pre", { class: "text" }, `${shown(call.function.name, 200)}(${shown(call.function.arguments, 20000)})`));
    const pictures = picturesOf(node.content), text = words(node.content);
    return [pictures.length ? thumbnails(pictures) : null, node.reasoning ? h("div", { class: "thought said-before" }, shown(node.reasoning, 200000)) : null, h("div", { class: "said" }, text ? shown(text, 200000) : node.state === "waits" ? waiting(node) : ""), calls];
  }
  const area = h("textarea", { "aria-label": "Edit the message" });
  // What is shown is drawn again while one edits.
  area.value = edited;
  area.addEventListener("input", () => { edited = area.value; });
  setTimeout(() => area.focus());
  return h("div", {}, area, h("div", { class: "tools" },
    h("button", { type: "button", class: "quiet", onclick: () => { editing = null; draw(); } }, "Cancel"),
    h("button", { type: "button", class: "primary", onclick: () => { editing = null; answer(grow(node.parent, { role: "user", content: composed(edited, picturesOf(node.content)) })); } }, "Send as a branch")));
}

const thumbnails = (pictures, remove) => h("div", { class: "pictures" }, pictures.map((url, at) => h("span", {},
  h("img", { src: url, alt: `Image ${at + 1}` }),
  remove ? h("button", { class: "quiet", type: "button", "aria-label": `Leave out image ${at + 1}`, onclick: () => remove(at) }, "×") : null)));

// Images go with the next message: chosen, pasted or dropped.
function drawPictures() {
  put($("pictures"), waitingPictures.length ? thumbnails(waitingPictures, (at) => { waitingPictures.splice(at, 1); drawPictures(); typed(); }) : null);
}
async function add(files) {
  for (const file of [...files].filter((each) => each.type.startsWith("image/"))) {
    if (file.size > MOST_IMAGE_BYTES) { $("draft-note").textContent = `${oneLine(file.name, 60)} is larger than 20 MB`; continue; }
    waitingPictures.push(await new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.addEventListener("load", () => resolve(reader.result));
      reader.addEventListener("error", () => reject(reader.error));
      reader.readAsDataURL(file);
    }));
  }
  drawPictures();
  typed();
}

const waiting = (node) => (stateOf(node.model) === "ready" ? "…" : `${oneLine(node.model, 60)} is being loaded …`);

// The weights that the latest answer waits for have come nearer.
export function waited() {
  const node = path().at(-1);
  if (node?.state === "waits" && !node.content && !node.reasoning) draw();
}

function after(node) {
  const record = node.record;
  const said = SOURCES.filter(([name]) => record?.sources?.[name] > 0).map(([name, label]) => `${num(record.sources[name])} ${label}`).join(", ");
  return h("div", { class: "after" },
    node.ttft !== undefined ? h("span", {}, "first token after ", h("strong", {}, seconds(node.ttft))) : null,
    record?.sources ? [stack(record.sources), h("span", { class: "reuse" }, said)] : node.usage ? h("span", {}, `${num(node.usage.prompt_tokens)} tokens, ${num(node.usage.prompt_tokens_details?.cached_tokens ?? 0)} reused`) : null,
    node.state === "stopped" ? h("span", {}, "stopped") : null, node.error ? h("span", { class: "error" }, shown(node.error, 600)) : null);
}

export function begin() {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) return running.abort();
    const text = $("draft").value, content = composed(text, waitingPictures);
    if (!text.trim() && !waitingPictures.length) return;
    $("draft").value = "";
    waitingPictures = [];
    drawPictures();
    $("draft-note").textContent = "";
    filled = "";
    answer(grow(path().at(-1) ?? root, { role: "user", content }));
  });
  $("draft").addEventListener("input", typed);
  $("draft").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("composer").requestSubmit(); }
    if (event.key === "Escape") running?.abort();
  });
  $("draft").addEventListener("paste", (event) => {
    if (![...event.clipboardData.files].some((file) => file.type.startsWith("image/"))) return;
    event.preventDefault();
    add(event.clipboardData.files);
  });
  $("view-chat").addEventListener("dragover", (event) => event.preventDefault());
  $("view-chat").addEventListener("drop", (event) => { event.preventDefault(); add(event.dataTransfer.files); });
  $("add-image").addEventListener("click", () => $("image-file").click());
  $("image-file").addEventListener("change", (event) => { add(event.currentTarget.files); event.currentTarget.value = ""; });
  $("new-chat").addEventListener("click", () => { running?.abort(); root.children = []; root.at = 0; editing = null; draw(); $("draft").focus(); });
  draw();
}

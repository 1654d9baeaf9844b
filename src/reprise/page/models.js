// The models of one server: which one the tree and the chat are of, and where the weights of each are.
import { $, h, put, oneLine } from "./dom.js";
import { bytes, num, seconds } from "./format.js";
import { post } from "./server.js";

let list = [], chosen = null, onChoice = () => {}, error = "";
const asked = new Map();

export const isSeveral = () => list.length > 1;
export const model = () => chosen;
// Aliases of the same weights have one cache; what happens in it is told under the name of the first of them.
export const engine = () => list.find((each) => each.id === chosen)?.engine ?? chosen;
export const stateOf = (id) => list.find((each) => each.id === id)?.state ?? "ready";
// A path for the model that is chosen; the server has its own first model where there is only one.
export const of = (path) => (isSeveral() ? `${path}${path.includes("?") ? "&" : "?"}model=${encodeURIComponent(chosen)}` : path);
export const hasTree = () => !isSeveral() || list.find((each) => each.id === chosen).has_been_loaded;

export function set(models) {
  if (JSON.stringify(models) === JSON.stringify(list)) return;
  const names = (all) => all.map((each) => `${each.id} ${each.has_been_loaded}`).join("\n"), isNew = names(models) !== names(list);
  list = models;
  chosen = list.some((each) => each.id === chosen) ? chosen : list[0]?.id ?? null;
  draw();
  if (isNew) { drawChoice(); onChoice(); }
}

function drawChoice() {
  const choice = $("model-choice");
  $("choice").hidden = !isSeveral();
  $("model").hidden = isSeveral();
  put(choice, list.map((each) => h("option", { value: each.id }, oneLine(each.id, 60))));
  choice.value = chosen;
}

function draw() {
  $("models").hidden = list.length === 0;
  const head = (name, cell = "num") => h("th", { class: cell, scope: "col" }, name);
  const hasDisk = list.some((each) => each.bytes_on_disk !== null);
  put($("models-body"), h("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Models, a line each" }, h("table", {},
    h("thead", {}, h("tr", {}, head("model", ""), head("weights", ""), head("in memory"), head("KV kept"), hasDisk ? head("on disk", "num extra") : null, head("running", "num extra"), head("waiting", "num extra"), head("loaded", "num extra"), h("td"))),
    h("tbody", {}, list.map((each) => line(each, hasDisk))))),
    error ? h("p", { class: "error", role: "alert" }, oneLine(error, 600)) : null);
}

function line(each, hasDisk) {
  const cell = (name, value, text, more = "") => h("td", { class: `num${more}`, "data-is": name, "data-value": value }, text);
  const name = isSeveral() ? h("button", { class: "link", type: "button", id: `show-${each.id}`, "aria-label": `Show the cache of ${each.id}`, onclick: () => choose(each.id) }, oneLine(each.id, 80)) : oneLine(each.id, 80);
  const kept = each.bytes_kv + each.bytes_snapshots;
  return h("tr", { "data-model": each.id, class: isSeveral() && each.id === chosen ? "chosen" : null },
    h("th", { scope: "row" }, name), h("td", {}, h("span", { class: "weights", "data-is": each.state }, each.state)),
    cell("weights", each.bytes_weights, each.engine !== each.id ? "" : each.bytes_weights ? bytes(each.bytes_weights) : each.bytes ? `0 of ${bytes(each.bytes)}` : "0"), cell("kept", kept, each.engine === each.id ? bytes(kept) : `with ${oneLine(each.engine, 40)}`),
    hasDisk ? cell("disk", each.bytes_on_disk ?? 0, bytes(each.bytes_on_disk), " extra") : null,
    cell("running", each.running, num(each.running), " extra"), cell("queued", each.queued, num(each.queued), " extra"),
    cell("loads", each.loads, each.loads ? `${num(each.loads)} × in ${seconds(each.load_s / each.loads)}` : "never", " extra"),
    h("td", { class: "act" }, action(each)));
}

function action(each) {
  const verb = asked.get(each.id) ?? (each.state === "ready" ? "unload" : "load"), isUnderWay = asked.has(each.id) || each.state === "loading";
  const text = isUnderWay ? (verb === "unload" ? "Unloading…" : "Loading…") : verb === "unload" ? "Unload" : "Load";
  return h("button", { type: "button", id: `${verb}-${each.id}`, "aria-label": `${text} ${each.id}`, disabled: isUnderWay,
    title: verb === "unload" ? "Frees the weights as soon as nothing runs on them. The cache stays." : null, onclick: () => act(each.id, verb) }, text);
}

async function act(id, verb) {
  asked.set(id, verb);
  error = "";
  draw();
  try {
    const told = await (await post(`/v1/models/${id.split("/").map(encodeURIComponent).join("/")}/${verb}`, {})).json();
    list = list.map((each) => (each.id === id ? { ...each, state: told.state } : each));
  } catch (refused) { error = refused.message; }
  asked.delete(id);
  draw();
}

export function choose(id) {
  if (id === chosen) return;
  chosen = id;
  $("model-choice").value = id;
  draw();
  onChoice();
}

export function begin(whenChosen) {
  onChoice = whenChosen;
  $("model-choice").addEventListener("change", (event) => choose(event.currentTarget.value));
}

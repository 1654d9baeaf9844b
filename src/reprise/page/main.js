// Joins the parts: views, theme, and what the server tells.
import { $, put } from "./dom.js";
import { get, watch } from "./server.js";
import * as tree from "./tree.js";
import * as requests from "./requests.js";
import * as panels from "./panels.js";
import * as models from "./models.js";
import * as chat from "./chat.js";
import * as clients from "./clients.js";

const VIEWS = ["cache", "chat", "connect"];
const THEME = "reprise-theme";

// At most one call under way, and one behind it; not more often than `pause`.
function calmly(work, pause) {
  let isRunning = false, isWanted = false;
  return async function again() {
    if (isRunning) { isWanted = true; return; }
    isRunning = true;
    try { await work(); } catch { /* told by the state; the next event tries again */ }
    setTimeout(() => { isRunning = false; if (isWanted) { isWanted = false; again(); } }, pause);
  };
}

const loadTree = calmly(tree.load, 1500);
const loadOverview = calmly(async () => {
  const told = await get("/v1/cache/overview");
  models.set(told.models);
  const name = models.model() ?? told.model;
  put($("model"), name);
  $("model").title = name;
  document.title = `${name.split("/").at(-1)} · Reprise`;
  panels.overview(told);
  clients.draw(name);
}, 1000);

const running = new Map();
function showRunning() {
  const all = [...running.values()];
  requests.setRunning(all);
  // What another model runs is not on this tree.
  tree.setRunning(models.isSeveral() ? all.filter((each) => each.model === models.engine()) : all);
}

function hear(name, body) {
  switch (name) {
    case "snapshot":
      running.clear();
      for (const each of body.requests) running.set(each.id, each);
      models.set(body.models);
      panels.counters(body.counters);
      showRunning();
      loadTree();
      loadOverview();
      loadRequests();
      break;
    case "request":
      if (!running.has(body.id)) loadTree();
      running.set(body.id, body);
      showRunning();
      break;
    case "request.gone":
      running.delete(body.id);
      showRunning();
      loadTree();
      loadOverview();
      break;
    case "request.ended":
      requests.add(body);
      chat.recorded(body);
      loadOverview();
      break;
    case "tree": if (!models.isSeveral() || body.model === models.engine()) loadTree(); break;
    case "models": models.set(body.models); chat.waited(); break;
    case "counters":
      panels.counters(body);
      state(body.idle ? "idle" : "busy", body.idle ? "idle" : `${body.decoding + body.prefilling} running`);
      if (body.idle) loadOverview();
      break;
  }
}

const loadRequests = calmly(async () => requests.setRecords((await get("/v1/cache/requests?limit=40")).data), 1000);

function state(is, text) {
  if ($("state").dataset.is === is && $("state").textContent === text) return;
  $("state").dataset.is = is;
  $("state").textContent = text;
}

function view() {
  const wanted = location.hash.slice(1), name = VIEWS.includes(wanted) ? wanted : "cache";
  for (const each of VIEWS) $(`view-${each}`).hidden = each !== name;
  for (const link of document.querySelectorAll("[data-view]")) {
    if (link.dataset.view === name) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  if (name === "chat") $("draft").focus({ preventScroll: true });
}

function theme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => localStorage.getItem(THEME);
  const apply = () => {
    const name = chosen() ?? (dark.matches ? "dark" : "light");
    document.documentElement.dataset.theme = name;
    $("theme").textContent = name === "dark" ? "Light" : "Dark";
  };
  $("theme").addEventListener("click", () => {
    localStorage.setItem(THEME, document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    apply();
  });
  dark.addEventListener("change", apply);
  apply();
}

theme();
tree.begin();
requests.begin();
models.begin(() => { tree.forget(); panels.forget(); loadTree(); loadOverview(); });
chat.begin();
view();
addEventListener("hashchange", view);
state("lost", "connecting");
watch(hear, (isConnected) => isConnected ? state("idle", "idle") : state("lost", "not connected"));

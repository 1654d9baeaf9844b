// The one number on top, memory, what breaks prefixes, and load.
import { $, h, s, put, shown, oneLine } from "./dom.js";
import { many, num, bytes, seconds, parts, share, ago, rate } from "./format.js";
import { isSeveral, model, of } from "./models.js";
import { get, hasKey } from "./server.js";
import { choose, facts } from "./tree.js";

const PARTS = [["weights", "weights"], ["running", "KV of running requests"], ["kept", "KV kept"], ["checkpoints", "checkpoints"],
  ["incoming", "coming from disk"], ["images", "images encoded"], ["embeddings", "vectors of texts"], ["work", "MLX’s work"], ["pool", "MLX’s free pool"], ["other", "everything else"]];
const DRAFTED_FROM = { answer: "the answer itself", prediction: "the client’s prediction", history: "earlier text", grammar: "the grammar", head: "the model’s head", "draft-model": "the draft model" };
const history = [];
let last = null, next = null, replayed = null, isReplaying = false;

export function overview(told) {
  last = told;
  hero(told);
  memory(told);
  breakers(told.breakers, told.changes);
  load(told.health, told.load);
  drafts(told.drafts);
}

function drafts(told) {
  $("drafts").hidden = told === null;
  if (told === null) return;
  $("drafts-note").textContent = told.drafted === 0 ? "" : `${many(told.accepted, "token")} took no pass of their own, which ${told.saved_s < 0 ? "cost" : "saved"} ${seconds(Math.abs(told.saved_s))} of decoding`;
  $("drafts-note").dataset.seconds = told.saved_s;
  const line = (name, from, each) => h("tr", { "data-source": name },
    h("th", { scope: "row" }, from), h("td", { class: "num" }, num(each.drafted)), h("td", { class: "num" }, num(each.accepted)), h("td", { class: "num" }, share(each.accepted, each.drafted)));
  const head = (name, cell = "num") => h("th", { class: cell, scope: "col" }, name);
  const sources = Object.entries(told.sources);
  put($("drafts-body"), sources.length ? h("table", {},
    h("thead", {}, h("tr", {}, head("from", ""), head("tokens drafted"), head("accepted"), head("share"))),
    h("tbody", {}, sources.map(([name, each]) => line(name, DRAFTED_FROM[name] ?? name, each)), sources.length > 1 ? line("all", h("strong", {}, "all"), told) : null))
    : h("p", { class: "empty" }, "Nothing was drafted yet: no answer repeated enough of what was said before."));
}

function hero({ savings, created }) {
  put($("saved"), (savings.saved_today_s ? parts(savings.saved_today_s) : [["0", "s"]]).map(([amount, unit]) => [amount, h("span", { class: "unit" }, unit)]));
  $("saved").dataset.seconds = savings.saved_s;
  const since = new Date(created * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
  // Passes over a few tokens do not tell how long a prompt takes.
  const none = savings.reused ? "not known yet: too little was computed at once" : "nothing was reused yet";
  put($("saved-sub"), !savings.saved_s ? none : savings.saved_s === savings.saved_today_s ? "today, since the server started" : `today; ${seconds(savings.saved_s)} since ${since}`);
  const known = savings.reused + savings.computed;
  const figure = (id, source, name, value, note) => h("div", {}, h("dt", {}, source ? h("i", { class: `c-${source}`, style: { width: ".6rem", height: ".6rem", "border-radius": "2px" } }) : null, name), h("dd", { id }, num(value)), h("dd", { class: "figure-note" }, note));
  put($("figures"),
    figure("reused", "memory", "reused", savings.reused, known ? `${share(savings.reused, known)} of all prompt tokens` : "no prompts yet"),
    figure("computed", "computed", "computed", savings.computed, savings.prefill_tokens_per_s ? `at ${rate(savings.prefill_tokens_per_s)} tokens/s` : "while someone waited"),
    figure("ahead", "ahead", "prefilled ahead", savings.prefilled_ahead, `${num(savings.ahead)} of the reused tokens`),
    figure("lost", null, "could have been reused", savings.lost, savings.lost ? `${seconds(savings.lost_s)} spent recomputing it` : "nothing was lost"));
}

function memory({ memory: told, disk }) {
  const total = told.process + told.untouched;
  $("memory-note").textContent = `${bytes(told.process)} by the system's count`;
  const budgeted = told.parts.running + told.parts.kept + told.parts.checkpoints + told.parts.incoming + told.parts.images + told.parts.embeddings;
  put($("memory-body"),
    h("div", { class: "parts", role: "img", "aria-label": PARTS.map(([name, label]) => `${label} ${bytes(told.parts[name])}`).join(", ") },
      PARTS.filter(([name]) => told.parts[name] > 0).map(([name]) => h("span", { class: `p-${name}`, style: { flex: `${told.parts[name] / total} 1 0` } }))),
    h("table", {}, h("tbody", {}, PARTS.filter(([name]) => told.parts[name] > 0).map(([name, label]) => h("tr", {},
      h("th", { scope: "row" }, h("span", { class: "key" }, h("i", { class: `p-${name}` }), label)), h("td", { class: "num", id: `memory-${name}`, "data-bytes": told.parts[name] }, bytes(told.parts[name])))),
      told.untouched ? h("tr", {}, h("th", { scope: "row" }, "not in memory yet"), h("td", { class: "num" }, `−${bytes(told.untouched)}`)) : null,
      h("tr", {}, h("th", { scope: "row" }, h("strong", {}, "the process")), h("td", { class: "num" }, h("strong", { id: "memory-process", "data-bytes": told.process }, bytes(told.process)))))),
    told.budget ? [h("h3", {}, `Budget: ${bytes(budgeted)} of ${bytes(told.budget)}`), h("div", { class: "meter" }, h("span", { class: "accent", style: { width: `${Math.min(100, (100 * budgeted) / told.budget)}%` } })),
      told.running_most ? h("p", { class: "note", id: "running-most", "data-bytes": told.running_most }, `Running requests have had up to ${bytes(told.running_most)} of it beside what is kept: room to grow, and what is not stored yet.`) : null] : null,
    disk ? [h("h3", {}, "Disk"), h("dl", { class: "facts" }, facts([["Held", `${bytes(disk.bytes)} of ${bytes(disk.budget)}`], ["Written today", disk.bytes_written_daily ? `${bytes(disk.bytes_written_today)} of ${bytes(disk.bytes_written_daily)}` : bytes(disk.bytes_written_today)], ["Written since startup", bytes(disk.bytes_written)]])), [disk.trouble, disk.spared].filter(Boolean).map((why) => h("p", { class: "note" }, why))] : null,
    h("h3", {}, `With 1 GiB less, these${isSeveral() ? ` of ${oneLine(model(), 40)}` : ""} would go first`),
    next === null ? h("button", { type: "button", id: "show-next", onclick: showNext }, "Show") : nextTable(),
    h("h3", {}, `With another budget, the latest requests${isSeveral() ? ` to ${oneLine(model(), 40)}` : ""} would have`),
    replayed === null ? h("button", { type: "button", id: "show-budgets", disabled: isReplaying, onclick: replay }, isReplaying ? "Replaying…" : "Replay them") : budgetTable());
}

// What was asked for another model.
export function forget() { next = replayed = null; }

async function showNext() {
  next = await get(of("/v1/cache/evictions"));
  memory(last);
}

function nextTable() {
  if (!next.data.length) return h("p", { class: "empty" }, "Nothing may be evicted now.");
  const head = (name, cell = "num") => h("th", { class: cell, scope: "col" }, name);
  return h("div", {}, h("table", {}, h("thead", {}, h("tr", {}, head("", ""), head("last use", ""), head("to compute again"), head("frees"))), h("tbody", {}, next.data.slice(0, 8).map((each) => h("tr", {},
    h("td", {}, h("button", { class: "link", type: "button", onclick: () => { location.hash = "#cache"; choose(each.edge); $("tree").scrollIntoView(); } }, `${each.kind} at token ${num(each.position)}`)),
    h("td", {}, ago(each.age_s)), h("td", { class: "num" }, many(each.cost_tokens, "token")), h("td", { class: "num" }, bytes(each.bytes)))))),
    h("p", { class: "note" }, `${next.has_more ? "The first " : ""}${many(next.data.length, "item")}: ${bytes(next.bytes)}`));
}

async function replay() {
  isReplaying = true;
  memory(last);
  try { replayed = await get(of("/v1/cache/budgets")); } finally {
    isReplaying = false;
    memory(last);
  }
}

function budgetTable() {
  if (!replayed.data.length) return h("p", { class: "empty" }, "There are no chats to replay yet.");
  return h("div", {}, h("table", {}, h("tbody", {}, replayed.data.map((each) => h("tr", {},
    h("th", { scope: "row" }, each.factor === 1 ? `${bytes(each.budget)}, as now` : bytes(each.budget)), h("td", { class: "num" }, `reused ${share(each.reused, each.prompt)}`),
    h("td", { class: "num" }, each.factor === 1 || each.saved_s === null ? "" : each.saved_s > 0 ? `saved ${seconds(each.saved_s)}` : each.saved_s < 0 ? `cost ${seconds(-each.saved_s)}` : "no difference"))))),
    h("p", { class: "note" }, `Replayed from ${num(replayed.requests)} requests.`));
}

function breakers(list, changes) {
  const most = Math.max(...list.map((each) => each.seconds), 1e-9), told = new Set();
  // What several have in common is said once, where it cost most.
  const news = (notes) => notes.filter((note) => !told.has(note) && told.add(note));
  put($("breakers-body"), [list.length ? list.map((each) => h("div", { class: "breaker", "data-reason": each.reason },
    h("h3", {}, each.reason, h("span", { "data-seconds": each.seconds }, seconds(each.seconds))),
    h("div", { class: "meter" }, h("span", { style: { width: `${(100 * each.seconds) / most}%` } })),
    h("p", { class: "note" }, `${many(each.requests, "request")}, ${many(each.tokens, "token")}. `, each.advice),
    each.actual_text && each.expected_text ? h("p", { class: "note mono clip", style: { "max-width": "100%" } }, oneLine(each.expected_text, 46), " → ", oneLine(each.actual_text, 46)) : null,
    news(each.notes).slice(0, 2).map((note) => h("p", { class: "note" }, shown(note, 300))))) : h("p", { class: "empty" }, "Nothing so far: every chat continued where it left off."), changes.length ? changeTable(changes) : null]);
}

function changeTable(changes) {
  const head = (name, cell = "num") => h("th", { class: cell, scope: "col" }, name);
  return [h("h3", {}, "Computed, and what a cache without a bound would have"), h("table", { id: "changes" },
    h("thead", {}, h("tr", {}, head("prompt", ""), head("requests"), head("computed"), head("at best"))),
    h("tbody", {}, changes.map((each) => h("tr", { "data-reason": each.reason },
      h("th", { scope: "row" }, each.reason), h("td", { class: "num" }, num(each.requests)), h("td", { class: "num" }, num(each.computed)), h("td", { class: "num" }, num(each.at_best))))))];
}

export function counters(health) {
  history.push([performance.now() / 1000, health.generated, health.prefilled + health.settled]);
  while (history.length > 240) history.shift();
  if (!last) return;
  const { queued, prefilling, decoding, decode_groups, longest_gap_s } = health;
  last.health = health;
  last.load = { ...last.load, queued, prefilling, decoding, decode_groups, longest_gap_s };
  load(health, last.load);
}

function speeds() {
  return history.slice(1).map(([at, made, filled], index) => {
    const [before, madeBefore, filledBefore] = history[index], over = Math.max(0.25, at - before);
    return { at, decode: (made - madeBefore) / over, prefill: (filled - filledBefore) / over };
  });
}

function load(health, told) {
  const rates = speeds(), now = performance.now() / 1000, latest = rates.length && now - rates.at(-1).at < 2 && !health.idle ? rates.at(-1) : { decode: 0, prefill: 0 };
  const notes = [hasKey() ? "of all keys" : "", told.longest_gap_s ? `longest gap between two tokens ${seconds(told.longest_gap_s)}` : "", told.quiet ?? ""];
  $("load-note").textContent = notes.filter(Boolean).join("; ");
  const cell = (id, value, name) => h("div", {}, h("b", { id }, value), h("span", {}, name));
  const groups = told.decode_groups.length ? `in groups of ${told.decode_groups.join(", ")}` : "decoding";
  put($("load-body"), h("div", { class: "grid4" }, cell("decode-speed", rate(latest.decode), "tokens/s generated"), cell("prefill-speed", rate(latest.prefill), "tokens/s prefilled"),
    cell("decoding", num(health.decoding), groups), cell("prefilling", num(health.prefilling), "prefilling"), cell("queued", num(health.queued), "waiting")), spark(rates, now));
}

function spark(rates, now) {
  const width = 600, height = 60, span = 120, most = Math.max(1, ...rates.map((each) => each.decode));
  const line = rates.filter((each) => now - each.at < span).map((each) => `${((1 - (now - each.at) / span) * width).toFixed(1)} ${(height - 2 - (each.decode / most) * (height - 6)).toFixed(1)}`);
  const path = line.length > 1 ? `M${line.join("L")}` : `M0 ${height - 2}H${width}`;
  return s("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": `Tokens per second over two minutes, at most ${num(most)}` },
    line.length > 1 ? s("path", { class: "area", d: `${path}V${height}H${line[0].split(" ")[0]}Z` }) : null, s("path", { d: path }));
}

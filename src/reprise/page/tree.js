// The prefix tree: from left to right by token, chats as branches below the trunk that they share.
import { $, h, s, put, shown, oneLine } from "./dom.js";
import { many, num, bytes, ago } from "./format.js";
import { of, hasTree } from "./models.js";
import { get } from "./server.js";

// In units of the text's size, which grows with the window; a character is about so wide.
const ROW = 24, LEFT = 14, TOP = 26, LABEL = 240, CHARACTER = 6.9;
// The server tells how an edge begins: all of its text, where it has no more tokens than these.
const BEGINNING = 24;
// Without the template's own markup, which every chat has.
const label = (text) => oneLine(text.replace(/<[|｜][^<>]{1,40}[|｜]>\s*(system|user|assistant|tool)?|^(system|user|assistant|tool)\s/g, " "), 120);
const USES = { stored: "stored", resumed: "resumed by a request", settled: "prefilled ahead" };
let nodes = new Map(), totals = {}, hasMore = false, zoom = 1, chosen = null, asTable = false, found = new Set(), running = [], reached = "";
const opened = new Map();

export async function load() {
  if (!hasTree()) { nodes = new Map(); totals = {}; hasMore = false; return draw(); }
  const path = of("/v1/cache/tree?limit=300"), told = await get(path);
  // Another model may have been chosen meanwhile.
  if (path !== of("/v1/cache/tree?limit=300")) return;
  nodes = new Map(told.data.map((node) => [node.id, node]));
  for (const id of [...opened.keys()]) {
    if (!nodes.has(id)) { opened.delete(id); continue; }
    try { for (const node of (await get(of(`/v1/cache/tree?under=${id}&limit=${opened.get(id)}`))).data) nodes.set(node.id, node); }
    catch { opened.delete(id); }
  }
  totals = told.totals;
  hasMore = told.has_more;
  draw();
}

export function setRunning(list) { running = list; if (nodes.size) draw(); }

// Another model's tree follows.
export function forget() {
  opened.clear();
  found = new Set();
  chosen = null;
  nodes = new Map();
  document.querySelector(".tree-body").classList.remove("has-edge");
  put($("edge"));
}

function arrange() {
  const children = new Map([...nodes.keys()].map((id) => [id, []]));
  const roots = [];
  for (const node of nodes.values()) (children.get(node.parent) ?? roots).push(node);
  const placed = [];
  let row = 0, end = 1;
  // Depth first without recursion: the first branch goes on in its parent's row, the others get rows of their own.
  const stack = roots.reverse().map((node) => ({ node, first: false, y: 0, text: "", isWhole: true }));
  while (stack.length) {
    const item = stack.pop();
    if (item.more) { placed.push({ ...item, row: row++ }); continue; }
    const { node, first, y } = item;
    // A row is called by what it began with, as far as that is known without a gap.
    const text = !first ? node.text : item.isWhole ? item.text + node.text : item.text;
    const isWhole = (!first || item.isWhole) && node.tokens <= BEGINNING, title = label(text);
    const own = first ? y : row++;
    // What leaves within the edge, on disk alone, gets a row; what begins at its end may go on in its own.
    const stop = node.start + node.tokens, below = children.get(node.id).sort((a, b) => (b.start === stop) - (a.start === stop));
    const goesOn = below.length > 0 && below[0].start === stop;
    placed.push({ node, row: own, from: y, isFirst: first, isLeaf: !goesOn, title });
    end = Math.max(end, node.start + node.tokens);
    const hidden = node.children - below.length;
    if (hidden > 0) stack.push({ more: hidden, node, row: 0 });
    for (let at = below.length - 1; at >= 0; at -= 1) stack.push({ node: below[at], first: goesOn && at === 0, y: own, text, isWhole });
  }
  return { placed, rows: row, end };
}

function draw() {
  const box = $("tree-scroll"), all = [...nodes.values()].filter((node) => node.tokens > 0);
  const onDisk = all.filter((node) => !node.in_memory).reduce((sum, node) => sum + node.tokens, 0);
  $("tree-note").textContent = all.length === 0
    ? (hasTree() ? "nothing is stored yet" : "this model was not loaded yet")
    : `${many(totals.tokens, "token")} in ${many(Math.max(0, totals.edges - 1), "part")}, ${bytes(totals.bytes)}${onDisk ? `; ${many(onDisk, "token")} on disk alone` : ""}${hasMore ? `; the ${many(all.length, "part")} used last are drawn` : ""}`;
  if (asTable) return put(box, table());
  if (all.length === 0) return put(box, h("p", { class: "empty", style: { padding: "1rem" } }, hasTree() ? "The first request fills it. Try the chat, or connect a client." : "Which text it has on disk is known once it is loaded: load it below, or send it a request."));
  const { placed, rows, end } = arrange();
  const size = parseFloat(getComputedStyle(document.documentElement).fontSize) / 16, wide = (box.clientWidth - 2) / size;
  const width = Math.max(320, wide * zoom), height = TOP + rows * ROW + 10;
  const span = width - LEFT - LABEL * Math.min(1, wide / 900) - 14;
  const x = (token) => LEFT + span * Math.sqrt(token / end);
  const y = (row) => TOP + row * ROW + ROW / 2;
  const svg = s("svg", { width: width * size, height: height * size, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `${many(all.length, "part")} of the cache` });
  for (const at of steps(end, x)) {
    svg.append(s("line", { class: "grid", x1: x(at), x2: x(at), y1: TOP - 6, y2: height - 4 }), s("text", { class: "axis", x: x(at), y: 14, "text-anchor": at === 0 ? "start" : "middle" }, num(at)));
  }
  const byRequest = new Map(running.map((request) => [request.id, request]));
  const rowOf = new Map();
  for (const item of placed) {
    if (item.more) {
      const label = s("text", { class: "more", x: x(item.node.start + item.node.tokens) + 10, y: y(item.row) + 4, "data-stop": "", tabindex: -1, role: "button", id: `more-${item.node.id}` }, `${num(item.more)} more`);
      const open = () => { opened.set(item.node.id, Math.min(1000, (opened.get(item.node.id) ?? 60) * 2)); load(); };
      label.addEventListener("click", open);
      label.addEventListener("keydown", (event) => event.key === "Enter" && open());
      label.addEventListener("keydown", walk);
      svg.append(label);
    } else if (item.node.tokens > 0) { rowOf.set(item.node.id, item.row); svg.append(edge(item, x, y, width)); }
  }
  // Above all lines, and not in the way of a click.
  svg.append(s("g", { class: "ticks" }, all.filter((node) => rowOf.has(node.id)).map((node) => node.checkpoints.map((each) => s("circle", {
    class: `tick${each.superseded ? " old" : ""}${each.pinned ? " pin" : ""}`, cx: x(each.position), cy: y(rowOf.get(node.id)), r: each.pinned ? 4.5 : 3 })))));
  for (const node of nodes.values()) {
    for (const id of node.requests) {
      const request = byRequest.get(id);
      if (!request) continue;
      const at = x(Math.min(end, request.position)), line = y(rowOf.get(node.id) ?? 0);
      svg.append(s("circle", { class: "runner", cx: at, cy: line, r: 5 }), s("text", { class: "runner-label", x: at + 8, y: line - 5 }, request.purpose === "settle" ? "prefilling ahead" : request.phase));
    }
  }
  put(box, svg);
  stay(svg.querySelector(`[id="${reached}"]`) ?? svg.querySelector("[data-stop]"));
}

// The tree is one stop of the Tab key; the arrows walk in it.
function stay(stop) {
  for (const other of stop?.ownerSVGElement.querySelectorAll("[tabindex='0']") ?? []) other.setAttribute("tabindex", -1);
  stop?.setAttribute("tabindex", 0);
}

function walk(event) {
  const all = [...event.currentTarget.ownerSVGElement.querySelectorAll("[data-stop]")], at = all.indexOf(event.currentTarget);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  const stop = all[Math.max(0, Math.min(all.length - 1, to))];
  reached = stop.id;
  stay(stop);
  stop.focus();
}

function edge({ node, row, from, isFirst, isLeaf, title }, x, y, width) {
  const left = x(node.start), right = Math.max(left + 2, x(node.start + node.tokens)), line = y(row);
  const inMemory = node.in_memory, held = inMemory ? node.bytes : node.disk_bytes;
  const weight = Math.min(9, 1.5 + Math.log2(1 + held / 4096) * 0.5);
  const fade = Math.max(0.38, 1 - Math.log10(1 + node.age_s / 30) * 0.2);
  const room = Math.max(8, Math.floor((width - right - 16) / CHARACTER)), whole = isLeaf ? title || many(node.tokens, "token") : oneLine(node.text, 60);
  const said = isLeaf && whole.length > room ? `${whole.slice(0, room - 1).trimEnd()}…` : whole;
  const group = s("g", {
    class: `edge${node.disk_bytes ? " on-disk" : ""}${inMemory ? "" : " disk-only"}${chosen === node.id ? " chosen" : ""}${found.has(node.id) ? " found" : ""}`,
    "data-stop": "", tabindex: -1, role: "button", id: `edge-${node.id}`, "data-id": node.id,
    "aria-label": `${num(node.tokens)} tokens from ${num(node.start)}, ${bytes(held)}${inMemory ? (node.disk_bytes ? ", on disk too" : "") : " on disk alone"}, ${USES[node.last_use]}, ${ago(node.age_s)}: ${said}`,
  },
  s("rect", { class: "hit", x: left, y: line - ROW / 2, width: isLeaf ? Math.max(1, width - left - 8) : right - left, height: ROW, rx: 4 }));
  if (!isFirst && row !== from) {
    group.append(s("path", { class: "join", d: `M${left - 6} ${y(from)} v${line - y(from) - 6} q0 6 6 6` }));
  }
  group.append(s("path", { class: "run", d: `M${left} ${line}H${right}`, "stroke-width": weight, opacity: fade }));
  if (inMemory && node.disk_bytes) group.append(s("path", { class: "disk", d: `M${left} ${line + weight / 2 + 3}H${right}` }));
  if (isLeaf) group.append(s("text", { x: right + 10, y: line + 4 }, said));
  group.addEventListener("click", () => choose(node.id));
  group.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(node.id); }
  });
  group.addEventListener("keydown", walk);
  return group;
}

// Powers of two and the end, as far as their numbers have room beside each other.
function steps(end, x) {
  const found = [0];
  for (let at = 16; at < end; at *= 2) if (x(at) - x(found.at(-1)) > 34 && x(end) - x(at) > 40) found.push(at);
  return [...found, end];
}

function table() {
  const rows = [...nodes.values()].filter((node) => node.tokens > 0).map((node) => h("tr", {},
    h("td", { class: "num" }, num(node.start)), h("td", { class: "num" }, num(node.tokens)), h("td", { class: "num" }, node.in_memory ? bytes(node.bytes) : "–"),
    h("td", { class: "num" }, node.disk_bytes ? bytes(node.disk_bytes) : "–"), h("td", {}, ago(node.age_s)), h("td", {}, USES[node.last_use]),
    h("td", { class: "clip" }, h("button", { class: "link", type: "button", id: `row-${node.id}`, onclick: () => choose(node.id) }, oneLine(node.text, 80) || "open"))));
  return h("table", {}, h("thead", {}, h("tr", {}, ...["from", "tokens", "memory", "disk"].map((name) => h("th", { class: "num", scope: "col" }, name)), ...["last use", "", "begins with"].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows));
}

export async function choose(id) {
  chosen = chosen === id ? null : id;
  reached = `edge-${id}`;
  document.querySelector(".tree-body").classList.toggle("has-edge", chosen !== null);
  draw();
  const panel = $("edge"), node = nodes.get(chosen);
  if (!node) return put(panel);
  const text = h("div", { class: "text", tabindex: 0, role: "region", "aria-label": "Text" }, "…");
  const more = h("button", { type: "button", hidden: true }, "Read on");
  let offset = 0;
  const read = async () => {
    try {
      const told = await get(of(`/v1/cache/tree/${id}?offset=${offset}&limit=1024`));
      text.textContent = (offset === 0 ? "" : text.textContent) + shown(told.text, 40000);
      offset += 1024;
      more.hidden = !told.has_more;
    } catch (error) { text.textContent = error.message; }
  };
  more.addEventListener("click", read);
  put(panel,
    h("h3", { style: { "margin-top": "0" } }, `Tokens ${num(node.start)} to ${num(node.start + node.tokens)}`),
    h("dl", {}, facts([["Tokens", num(node.tokens)], ["In memory", node.in_memory ? bytes(node.bytes) : "no"], ["On disk", node.disk_bytes ? bytes(node.disk_bytes) : "no"],
      ["Last use", `${USES[node.last_use]}, ${ago(node.age_s)}`], ...(node.in_memory ? [["Used", `${num(node.uses)} ×`]] : []), ["Continues in", `${num(node.children)} ${node.children === 1 ? "branch" : "branches"}`]])),
    text, more,
    node.checkpoints.length ? [h("h3", {}, "Checkpoints"), h("table", {}, h("tbody", {}, node.checkpoints.slice(-12).map((each) => h("tr", {},
      h("td", { class: "num" }, num(each.position)), h("td", {}, each.kind ?? "on disk", each.superseded ? " (superseded)" : "", each.pinned ? " (pinned)" : ""), h("td", { class: "num" }, each.bytes || each.disk_bytes ? bytes(each.bytes || each.disk_bytes) : "")))))] : null);
  await read();
}

export const facts = (list) => list.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]);

export function begin() {
  $("zoom-in").addEventListener("click", () => { zoom = Math.min(16, zoom * 1.5); draw(); });
  $("zoom-out").addEventListener("click", () => { zoom = Math.max(1, zoom / 1.5); draw(); });
  $("as-table").addEventListener("click", (event) => {
    asTable = !asTable;
    event.currentTarget.setAttribute("aria-pressed", asTable);
    draw();
  });
  $("search").addEventListener("submit", async (event) => {
    event.preventDefault();
    const query = $("query").value.trim();
    if (query.length < 2) { found = new Set(); return draw(); }
    try {
      const told = await get(of(`/v1/cache/tree/search?q=${encodeURIComponent(query)}`));
      found = new Set(told.data.map((each) => each.id));
      draw();
      $("tree-note").textContent = `${num(found.size)} ${found.size === 1 ? "part has" : "parts have"} “${query}”${told.has_more ? `; the ${num(told.searched)} used last were searched` : ""}`;
      document.querySelector(".edge.found")?.scrollIntoView({ block: "center", inline: "nearest" });
    } catch (error) { $("tree-note").textContent = error.message; }
  });
  $("query").addEventListener("input", (event) => { if (!event.currentTarget.value) { found = new Set(); draw(); } });
  document.querySelector(".tree-body").addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || chosen === null) return;
    choose(chosen);
    document.getElementById(reached)?.focus();
  });
  new ResizeObserver(() => nodes.size && draw()).observe($("tree-scroll"));
  const mark = (draws) => s("svg", { width: 26, height: 12, "aria-hidden": "true", class: "edge" }, draws);
  put($("tree-legend"),
    h("span", { class: "key" }, mark(s("path", { class: "run", d: "M2 6H24", "stroke-width": 5 })), "in memory; thicker holds more, paler is older"),
    h("span", { class: "key" }, mark([s("path", { class: "run", d: "M2 4H24", "stroke-width": 4 }), s("path", { class: "disk", d: "M2 10H24" })]), "on disk, too"),
    h("span", { class: "key" }, s("svg", { width: 26, height: 12, "aria-hidden": "true", class: "edge disk-only" }, s("path", { class: "run", d: "M2 6H24", "stroke-width": 3 })), "on disk alone"),
    h("span", { class: "key" }, mark(s("circle", { class: "tick", cx: 13, cy: 6, r: 3.5 })), "checkpoint"),
    h("span", { class: "key" }, mark(s("circle", { class: "tick pin", cx: 13, cy: 6, r: 4.5 })), "pinned"),
    h("span", { class: "key" }, mark(s("circle", { class: "runner", cx: 13, cy: 6, r: 5 })), "running"));
}

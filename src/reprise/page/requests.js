// Requests: where each prompt's tokens came from, why the rest was computed, and what the first token waited for.
import { $, h, put, shown, oneLine } from "./dom.js";
import { many, num, seconds, clock, rate } from "./format.js";
import { isSeveral } from "./models.js";
import { facts } from "./tree.js";

export const SOURCES = [["memory", "from memory"], ["disk", "from disk"], ["ahead", "prefilled while idle"], ["shared", "shared in flight"], ["computed", "computed"]];
const SPANS = [["render", "render"], ["queue", "queue"], ["load", "load"], ["images", "images"], ["prefill", "prefill"], ["first_token", "first token"]];
const MOST = 60, FIRST = 10;
let isLong = false, records = [], running = [], open = new Set();

export const setRecords = (list) => { records = list; draw(); };
export const setRunning = (list) => { running = list; draw(); };
export function add(record) { records = [record, ...records.filter((each) => each.id !== record.id)].slice(0, MOST); draw(); }
export const find = (id) => records.find((each) => each.id === id);

export function stack(sources, scale = 100) {
  const total = Object.values(sources).reduce((sum, each) => sum + each, 0);
  const said = SOURCES.filter(([name]) => sources[name] > 0).map(([name, label]) => `${num(sources[name])} ${label}`).join(", ");
  return h("span", { class: "stack", role: "img", "aria-label": said, title: said, style: { width: `${scale}%` } },
    SOURCES.filter(([name]) => sources[name] > 0).map(([name]) => h("span", { class: `c-${name}`, style: { flex: `${sources[name] / total} 1 0` } })));
}

function draw() {
  const most = Math.max(1, ...records.map((each) => each.prompt_tokens ?? 0), ...running.map((each) => each.prompt_tokens));
  const rows = [...running.map((each) => runningRow(each, most)), ...records.slice(0, isLong ? MOST : FIRST).map((each) => row(each, most))];
  const more = records.length > FIRST ? h("button", { type: "button", class: "quiet", id: "more-requests", onclick: () => { isLong = !isLong; draw(); } }, isLong ? "Show fewer" : `Show ${num(records.length - FIRST)} more`) : null;
  put($("request-list"), rows.length ? [rows, more] : h("p", { class: "empty" }, "No requests yet."));
}

const wide = (tokens, most) => Math.max(4, 100 * Math.sqrt(tokens / most));

function runningRow(request, most) {
  const reused = request.reused ?? 0, total = request.prompt_tokens;
  const parts = { memory: reused, computed: Math.max(0, Math.min(request.position, total) - reused), left: 0 };
  const what = request.purpose === "settle" ? "prefilling ahead" : request.purpose === "prefill" ? "prefill" : request.phase;
  const name = [isSeveral() ? oneLine(request.model.split("/").at(-1), 40) : "", what, request.chat ? oneLine(request.chat, 40) : ""].filter(Boolean).join(" · ");
  return h("div", { class: "request running" }, h("div", { class: "row" },
    h("span", { class: "faint" }, "now"), h("span", { class: "api clip" }, name),
    h("span", { class: "bar-cell stack-line" }, h("span", { class: "stack", style: { width: `${wide(total, most) * 0.78}%` } },
      h("span", { class: "c-memory", style: { width: `${(100 * parts.memory) / total}%` } }), h("span", { class: "c-computed", style: { width: `${(100 * parts.computed) / total}%` } })),
    h("span", { class: "faint" }, num(total))),
    h("span", { class: "why" }, request.generated > 0 ? `${num(request.generated)} tokens generated` : `${num(Math.min(request.position, total))} of ${num(total)}`), h("span", { class: "num ttft" }, seconds(request.age_s))));
}

function row(record, most) {
  const isOpen = open.has(record.id), has = record.prompt_tokens !== undefined;
  const button = h("button", {
    class: "row", type: "button", id: `request-${record.id}`, "aria-expanded": isOpen,
    onclick: () => { if (isOpen) open.delete(record.id); else open.add(record.id); draw(); },
  },
  h("span", { class: "faint" }, clock(record.created)), h("span", { class: "api clip" }, oneLine([isSeveral() ? record.model.split("/").at(-1) : "", record.api, record.chat].filter(Boolean).join(" · "), 60)),
  has ? h("span", { class: "bar-cell stack-line" }, h("span", { style: { width: `${wide(record.prompt_tokens, most) * 0.78}%` } }, stack(record.sources)), h("span", { class: "faint" }, [num(record.prompt_tokens), ...(record.images?.length ? [many(record.images.length, "image")] : [])].join(" · ")))
    : h("span", { class: "bar-cell faint clip" }, oneLine(record.error ?? record.ended, 90)),
  h("span", { class: "why" }, has ? record.reason : `${record.ended}${record.status ? ` (${record.status})` : ""}`), h("span", { class: "num ttft" }, record.ttft_s === null || record.ttft_s === undefined ? "" : seconds(record.ttft_s)));
  return h("div", { class: "request", "data-id": record.id }, button, isOpen ? detail(record) : null);
}

function detail(record) {
  const told = record.explanation, shared = told?.shared_text ?? "";
  const before = `${shared.length > 120 ? "…" : ""}${shown(shared.slice(-120))}`;
  return h("div", { class: "detail" },
    record.spans ? firstToken(record) : null,
    told && told.diverged_at !== null ? [
      h("div", {}, h("strong", {}, `Diverged at token ${num(told.diverged_at)}${told.part ? `, in ${told.part}` : ""}`)),
      h("div", { class: "sides" },
        h("div", {}, h("b", {}, "What was stored"), h("pre", { class: "text" }, h("mark", {}, before), shown(told.expected_text))),
        h("div", {}, h("b", {}, "What was sent"), h("pre", { class: "text" }, h("mark", {}, before), shown(told.actual_text))))] : null,
    told?.advice ? h("p", {}, told.advice) : null,
    record.notes.length ? h("ul", { class: "note" }, record.notes.map((note) => h("li", {}, shown(note, 600)))) : null,
    h("dl", { class: "facts", style: { "max-width": "34rem" } }, facts([
      ["Request", h("span", { class: "mono" }, record.id)], ...(isSeveral() ? [["Model", oneLine(record.model, 200)]] : []), ["Ended", record.ended],
      ...(record.session ? [["Session", h("span", { class: "mono" }, oneLine(record.session, 80))], ["Agent", oneLine(record.agent ?? "main", 80)]] : []),
      ...(record.agent ? [["Started by", oneLine(record.parent_agent ?? "main", 80)]] : []),
      ...(record.sources ? SOURCES.map(([name, label]) => [label[0].toUpperCase() + label.slice(1), num(record.sources[name])]) : []),
      ...(record.images ?? []).map((image) => ["Image", `${image.width} × ${image.height}, ${many(image.tokens, "token")} at ${num(image.start)}, ${image.reused ? "reused" : "computed"}`]),
      ...(record.generated !== undefined ? [["Generated", `${num(record.generated)} tokens, ${rate(record.decode_tokens_per_s)}/s`], ["Prefill", `${rate(record.prefill_tokens_per_s)} tokens/s`], ["Waiting saved", seconds(record.saved_s)], ...(record.drafted ? [["Drafted", `${num(record.accepted)} of ${many(record.drafted, "token")} accepted`]] : [])] : [])])),
    record.error ? h("p", { class: "error" }, shown(record.error, 1000)) : null);
}

function firstToken(record) {
  const total = Object.values(record.spans).reduce((sum, each) => sum + each, 0);
  const spent = SPANS.filter(([name]) => name !== "images" || record.spans.images > 0);
  return h("div", {}, h("div", { class: "note", style: { "margin-bottom": ".35rem" } }, "First token after ", h("strong", { "data-ttft": total }, seconds(total))),
    h("div", { class: "spans", role: "img", "aria-label": spent.map(([name, label]) => `${label} ${seconds(record.spans[name])}`).join(", ") },
      spent.map(([name]) => h("span", { class: `s-${name}`, style: { flex: `${record.spans[name] / (total || 1)} 1 0` } }))),
    h("p", { class: "legend", style: { "margin-top": ".4rem" } }, spent.map(([name, label]) => h("span", { class: "key" }, h("i", { class: `s-${name}` }), `${label} ${seconds(record.spans[name])}`))));
}

export function begin() {
  put($("source-legend"), SOURCES.map(([name, label]) => h("span", { class: "key" }, h("i", { class: `c-${name}` }), label)));
}

// The API as /openapi.json describes it: the endpoints by group, with their fields. Nothing comes from elsewhere.
import { $, h, put } from "./dom.js";
import { get } from "./server.js";

const METHODS = ["get", "post", "put", "patch", "delete"];

const named = (reference) => reference.split("/").at(-1);

// A schema as a person would say it: `string`, `list of ChatMessage`, `"json" or object`.
function typeText(schema) {
  if (!schema) return "";
  if (schema.$ref) return named(schema.$ref);
  const either = schema.anyOf ?? schema.oneOf;
  if (either) return either.filter((each) => each.type !== "null").map(typeText).join(" or ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(" or ");
  if (schema.type === "array") return `list of ${typeText(schema.items) || "anything"}`;
  return schema.type ?? "anything";
}

function fields(rows) {
  if (rows.length === 0) return null;
  return h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "field"), h("th", {}, "type"), h("th", {}, "what it is"))),
    h("tbody", {}, rows.map((row) => h("tr", {},
      h("td", {}, h("code", {}, row.name), row.required ? " (required)" : ""), h("td", {}, row.type), h("td", {}, row.text)))));
}

const parameterRows = (parameters) => (parameters ?? []).map((each) => ({
  name: each.name, required: each.required, type: `${typeText(each.schema)}, in the ${each.in}`, text: each.description ?? "" }));

function bodyRows(schema) {
  const required = new Set(schema?.required ?? []);
  return Object.entries(schema?.properties ?? {}).map(([name, each]) => ({
    name, required: required.has(name), type: typeText(each), text: each.description ?? "" }));
}

// The names of the schemas that fields of this one have, and so on below them, each once.
function below(name, schemas, seen = new Set([name])) {
  for (const [, reference] of JSON.stringify(schemas[name] ?? {}).matchAll(/"\$ref":"([^"]+)"/g)) {
    const inner = named(reference);
    if (!seen.has(inner)) { seen.add(inner); below(inner, schemas, seen); }
  }
  return seen;
}

function endpoint(path, method, told, schemas) {
  const schema = told.requestBody?.content?.["application/json"]?.schema;
  const name = schema?.$ref ? named(schema.$ref) : null;
  const body = name ? schemas[name] : schema;
  const inner = name ? [...below(name, schemas)].filter((each) => each !== name && schemas[each]?.properties) : [];
  return h("details", { id: `${method} ${path}` },
    h("summary", {}, h("code", {}, `${method.toUpperCase()} ${path}`), " ", (told.description ?? "").split("\n")[0]),
    h("div", { class: "text" }, told.description ?? ""),
    fields([...parameterRows(told.parameters), ...bodyRows(body)]),
    inner.map((each) => h("details", {}, h("summary", {}, h("code", {}, each)), fields(bodyRows(schemas[each])))));
}

const spec = await get("/openapi.json");
const schemas = spec.components?.schemas ?? {};
const groups = new Map();
let count = 0;
for (const [path, methods] of Object.entries(spec.paths)) {
  for (const method of METHODS.filter((each) => each in methods)) {
    const told = methods[method], group = told.tags?.[0] ?? "Server";
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push(endpoint(path, method, told, schemas));
    count += 1;
  }
}
put($("about"), `${count} endpoints of ${spec.info.title} ${spec.info.version}. The same for programs: /openapi.json`);
put($("endpoints"), [...groups].map(([group, all]) => h("section", { class: "panel" },
  h("header", {}, h("h2", {}, group)), all)));

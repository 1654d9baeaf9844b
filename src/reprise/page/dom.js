// Elements from values. Whatever comes from the server becomes a text node or an attribute's value, never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [rule, what] of Object.entries(value)) element.style.setProperty(rule, what);
    else if (name === "value" || name === "disabled" || name === "hidden") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

export const h = (tag, properties, ...children) => fill(document.createElement(tag), properties, children);
export const s = (tag, properties, ...children) => fill(document.createElementNS(SVG, tag), properties, children);
export const $ = (id) => document.getElementById(id);

// Replaces what an element holds, and keeps the focus on the element of the same id.
export function put(element, ...children) {
  const focused = element.contains(document.activeElement) ? document.activeElement.id : "";
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : document.createTextNode(String(child)))));
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
}

// What cannot be seen is named, so that it neither hides nor reorders anything; long texts are cut.
export function shown(text, most = 4000) {
  const cut = text.length > most ? `${text.slice(0, most)} …` : text;
  return cut.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g,
    (each) => `\u2423${each.charCodeAt(0).toString(16).padStart(4, "0")}`);
}
export const oneLine = (text, most = 120) => shown(text.replace(/\s+/g, " ").trim(), most);

// Elements, numbers and data. Texts of a run only ever become text nodes.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  for (const each of children.flat()) {
    if (each != null && each !== false) {
      node.append(each instanceof Node ? each : document.createTextNode(String(each)));
    }
  }
  return node;
}
export const el = (tag, attributes, ...children) =>
  fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

export const EXPORTED = (() => {
  const node = document.getElementById("exported");
  return node && JSON.parse(node.textContent);
})();

export async function get(name, query = {}) {
  if (EXPORTED) return fromFile(name, query);
  const response = await fetch(`/api/${name}?${new URLSearchParams(query)}`);
  if (response.status === 401) {
    location.reload(); // to the form of the key
    throw new Error("the server asks for the key again");
  }
  return response.json();
}

function fromFile(name, query) {
  const parts = {
    timeline: ["step", "count"], table: ["step"], rollout: ["step", "index"],
    changes: ["before", "after"], example: ["step", "index"],
  };
  const words = name === "runs" ? [] : ["run", ...(parts[name] || [])].map((each) => query[each]);
  const found = EXPORTED[[name, ...words].join(" ")];
  return found || { error: "this file does not have these data; serve the run folder for them" };
}

export function number(value, digits = 4) {
  if (value == null || typeof value === "boolean") return value == null ? "–" : String(value);
  if (typeof value !== "number") return visible(String(value));
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return value.toLocaleString("en");
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

export function seconds(value) {
  if (value == null) return "–";
  if (value < 1e-3) return `${number(value * 1e6, 3)} µs`;
  if (value < 1) return `${number(value * 1e3, 3)} ms`;
  if (value < 120) return `${number(value, 3)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 120) return `${minutes} min`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export const clock = (time) => new Date(time * 1000).toLocaleTimeString("en-GB");

// Control characters as pictures, and those that turn the direction of text by their number.
export function visible(text) {
  return text
    .replace(/[\u0000-\u0008\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
    .replace(/\u007f/g, "\u2421")
    .replace(/[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g,
      (c) => `⟨${c.charCodeAt(0).toString(16)}⟩`);
}

export const oneLine = (text) => visible(text).replace(/\s*\n\s*/g, " ⏎ ");

export function link(page, query, ...children) {
  return el("a", { href: hash(page, query) }, ...children);
}

export function hash(page, query) {
  const given = Object.entries(query).filter(([, value]) => value != null && value !== "");
  return `#/${page}?${new URLSearchParams(given)}`;
}

export function choice(label, values, current, choose) {
  const options = values.map((each) => {
    const [value, text] = Array.isArray(each) ? each : [each, each];
    return el("option", { value, selected: String(value) === String(current) }, text);
  });
  const onchange = (event) => choose(event.target.value);
  return el("label", { class: "dim" }, label, " ", el("select", { onchange }, ...options));
}

export function note(text, kind = "dim") {
  return el("p", { class: kind }, visible(text));
}

export function table(columns, rows, options = {}) {
  const head = columns.map((column) => el("th", {
    class: [column.n && "n", column.sort && "sort", column.sorted && "sorted"]
      .filter(Boolean).join(" "),
    onclick: column.sort, title: column.title,
  }, column.name, column.sorted === 1 ? " ↑" : column.sorted === -1 ? " ↓" : ""));
  const body = rows.map((row) => el("tr", options.row ? options.row(row) : {},
    ...columns.map((column) => el("td", { class: column.n ? "n" : column.kind },
      column.show(row)))));
  const named = columns.some((column) => column.name);
  return el("table", {}, named && el("thead", {}, el("tr", {}, ...head)),
    el("tbody", {}, ...body));
}

export function remembered(name, value) {
  try {
    if (value !== undefined) localStorage.setItem(`tiller.${name}`, value);
    return localStorage.getItem(`tiller.${name}`);
  } catch {
    return null;
  }
}

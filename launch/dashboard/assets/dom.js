// What every view is made of: elements whose text is only ever text, numbers as people read them, and requests with the token.

export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined).map(node));
  return made;
}

const node = (child) => (child instanceof Node ? child : document.createTextNode(printable(String(child))));

// Control characters are shown, not obeyed.
export const printable = (text) =>
  text.replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g, (each) => {
    const code = each.codePointAt(0);
    return code < 32 ? String.fromCodePoint(0x2400 + code) : `\\u${code.toString(16).padStart(4, "0")}`;
  });

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(2);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(digits)));
}

export const bytes = (value) => {
  if (typeof value !== "number") return "–";
  const at = Math.min(4, Math.floor(Math.log2(Math.max(value, 1)) / 10));
  return `${Number((value / 1024 ** at).toPrecision(3))} ${["B", "KiB", "MiB", "GiB", "TiB"][at]}`;
};

export function seconds(value) {
  if (typeof value !== "number" || Number.isNaN(value)) return "–";
  if (value < 1) return `${value < 1e-6 ? 0 : number(value * 1000, 3)} ms`;
  if (value < 100) return `${number(value, 3)} s`;
  const whole = Math.round(value), hours = Math.floor(whole / 3600), minutes = Math.floor((whole % 3600) / 60);
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${whole % 60} s`;
}

export const clock = (time) => (time ? new Date(time * 1000).toLocaleString("sv") : "–");
export const percent = (share) => (share > 0 && share < 0.001 ? "< 0.1\u00a0%" : `${Number((share * 100).toFixed(1))}\u00a0%`);

export class Failed extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

export const token = {
  get: () => sessionStorage.getItem("rondo-token") ?? "",
  set: (value) => sessionStorage.setItem("rondo-token", value),
};

// The answer's JSON, or its bytes; Failed with the words of one that is no success, or that nobody answers. `sent`: a body, of a POST.
export async function ask(path, query = {}, sent = undefined, bytes = false) {
  const search = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== ""));
  const headers = token.get() ? { Authorization: `Bearer ${token.get()}` } : {};
  let answer;
  try {
    const body = sent && { method: "POST", body: JSON.stringify(sent) };
    answer = await fetch(`api/${path}${search.size ? `?${search}` : ""}`, { headers: { ...headers, ...(sent && { "Content-Type": "application/json" }) }, ...body });
  } catch {
    throw new Failed(0, "The dashboard does not answer. Start it again with `rondo view`.");
  }
  if (bytes && answer.ok) return answer.blob();
  const told = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Failed(answer.status, told.error?.message ?? `${answer.status} ${answer.statusText}`);
  return told;
}

export const of = (run, path, query, sent, bytes) => ask(`runs/${encodeURIComponent(run)}${path}`, query, sent, bytes);

export function table(heads, rows, attributes = {}) {
  const head = el("tr", {}, heads.map((each) => el("th", { scope: "col" }, each)));
  const body = rows.map((row) => el("tr", {}, row.map((cell) => (cell instanceof HTMLTableCellElement ? cell : el("td", { class: /^[-\d.,–]/.test(String(cell)) ? "figure" : null }, cell)))));
  return el("div", { class: "wide" }, el("table", attributes, el("thead", {}, head), el("tbody", {}, body)));
}

export const empty = (words) => el("p", { class: "empty" }, words);
export const card = (title, ...children) => el("section", { class: "card" }, title === null ? null : el("h2", {}, title), ...children);

// A label in front of what one chooses or types with.
export const field = (label, input) => el("label", { class: "field" }, el("span", {}, label), input);
export const select = (options, value, onchange) =>
  el("select", { onchange: (event) => onchange(event.target.value) }, options.map(([id, text]) => el("option", { value: id, selected: id === value }, text)));

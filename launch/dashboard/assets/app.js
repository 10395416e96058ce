// The page: which view and which runs are shown, in the address, so that a link shows the same; asks again while it is looked at.
//
//   #/curves?runs=a,b&search=kl        a view is a function (place, state) -> refresh, which is called every few seconds

import { Failed, ask, el, empty, token } from "./dom.js";
import { bus } from "./bus.js";
import { curves } from "./curves.js";
import { evaluation } from "./evaluation.js";
import { health } from "./health.js";
import { memory } from "./memory.js";
import { overview } from "./overview.js";
import { samples } from "./samples.js";
import { timeline } from "./timeline.js";

const VIEWS = { overview, curves, timeline, samples, evaluation, health, bus, memory };
const NAMES = { overview: "Overview", curves: "Curves", timeline: "Timeline", samples: "Samples", evaluation: "Evaluation", health: "Health", bus: "Bus & weights", memory: "Memory" };
const PERIOD_MS = 2000, OVER_MS = 15000;

const at = (id) => document.getElementById(id);
let runs = [], view = "", refresh = null, timer = 0, drawing = 0;

function address() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return [VIEWS[path] ? path : "overview", new URLSearchParams(query)];
}

// What views know of the page: runs with their colours, and settings that stand in the address.
const state = {
  get all() { return runs; },
  get shown() {
    const chosen = this.get("runs")?.split(",");
    const found = runs.filter((run) => !chosen || chosen.includes(run.id));
    return found.length ? found : runs;
  },
  get one() { return this.shown.find((run) => run.id === this.get("run")) ?? this.shown[0]; },
  get: (name) => address()[1].get(name),
  set(changes, again = true, of = null) {
    const [path, query] = address();
    if (of && of !== path) return;
    for (const [name, value] of Object.entries(changes)) value === null || value === "" ? query.delete(name) : query.set(name, value);
    const text = query.toString();
    history.replaceState(null, "", `#/${path}${text ? `?${text}` : ""}`);
    if (again) draw();
  },
  redraw: () => draw(),
};

function chrome() {
  at("views").replaceChildren(...Object.entries(NAMES).map(([id, name], number) => {
    const query = new URLSearchParams([["runs", state.get("runs")]].filter(([, value]) => value)).toString();
    return el("a", { href: `#/${id}${query ? `?${query}` : ""}`, "aria-current": id === view ? "page" : null, title: `key ${number + 1}` }, name);
  }));
  at("views").querySelector("[aria-current]")?.scrollIntoView({ inline: "nearest", block: "nearest" });
  const shown = new Set(state.shown.map((run) => run.id));
  at("runs").replaceChildren(...runs.map((run) => el("button", {
    type: "button", class: `run c${run.colour}`, "aria-pressed": String(shown.has(run.id)), title: `${run.path}: ${run.words}`,
    onclick: () => {
      if (runs.length === 1) return;
      shown.has(run.id) && shown.size > 1 ? shown.delete(run.id) : shown.add(run.id);
      state.set({ runs: shown.size === runs.length ? null : runs.filter((each) => shown.has(each.id)).map((each) => each.id).join(",") });
    },
  }, el("i", { class: `state ${run.state}`, "aria-hidden": "true" }), run.id)));
}

function trouble(error) {
  const place = at("trouble");
  place.hidden = !error;
  if (!error) return;
  if (!(error instanceof Failed)) throw error;
  place.replaceChildren(error.status === 401 || error.status === 429 ? `${error.message} ` : error.message);
  if (error.status === 401) {
    const input = el("input", { type: "password", "aria-label": "Token", placeholder: "token", autocomplete: "off" });
    const take = () => { token.set(input.value.trim()); start(); };
    input.addEventListener("keydown", (event) => event.key === "Enter" && take());
    place.append(input, el("button", { type: "button", onclick: take }, "Use it"));
  }
}

async function draw() {
  const mine = ++drawing;
  clearTimeout(timer);
  view = address()[0];
  chrome();
  document.title = `${NAMES[view]} · rondo`;
  const place = at("main");
  const made = el("div", { class: view });
  if (!place.childElementCount) place.replaceChildren(empty("Reading…"));
  try {
    const again = await VIEWS[view](made, state);
    if (mine !== drawing) return;
    place.replaceChildren(made);
    refresh = again;
    trouble(null);
  } catch (error) {
    if (mine !== drawing) return;
    if (place.firstElementChild.matches(".empty")) place.replaceChildren(empty("Nothing to show yet."));
    refresh = null;
    trouble(error);
  }
  later();
}

const later = () => {
  clearTimeout(timer);
  const alive = runs.some((run) => run.alive || run.share < 1);
  timer = setTimeout(again, alive ? PERIOD_MS : OVER_MS);
};

async function again() {
  const mine = drawing;
  if (document.visibilityState === "visible") {
    try {
      await look();
      if (mine === drawing) await refresh?.();
      if (mine === drawing) { chrome(); trouble(null); }
    } catch (error) {
      if (mine === drawing) trouble(error);
    }
  }
  if (mine === drawing) later();
}

async function look() {
  const found = await ask("runs");
  runs = found.map((run, number) => ({ ...run, colour: number % 8 }));
}

async function start() {
  try {
    await look();
  } catch (error) {
    if (!at("main").childElementCount) at("main").replaceChildren(empty("No run to show."));
    trouble(error);
    if (error.status !== 401) timer = setTimeout(start, PERIOD_MS);
    return;
  }
  draw();
}

// The token comes behind the # of the address that `rondo view` prints, and is taken out of it.
const shown = /^#token=(\w+)/.exec(location.hash);
if (shown) {
  token.set(shown[1]);
  history.replaceState(null, "", "#/overview");
}
const kept = localStorage.getItem("rondo-theme");
if (kept) document.documentElement.dataset.theme = kept;
at("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("rondo-theme", document.documentElement.dataset.theme);
  draw();
});
addEventListener("hashchange", () => runs.length && draw());
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
  const id = Object.keys(VIEWS)[Number(event.key) - 1];
  if (id) location.hash = `#/${id}`;
  if (event.key === "/") { const search = document.querySelector("input[type=search]"); if (search) { event.preventDefault(); search.focus(); } }
});
document.addEventListener("visibilitychange", () => document.visibilityState === "visible" && again());
start();

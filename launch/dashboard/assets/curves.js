// Curves: every metric a chart, runs overlaid; smoothed here, thinned out by the server; a drag zooms into steps for all of them.

import { chart, colour } from "./chart.js";
import { card, el, empty, field, of, percent, select } from "./dom.js";

const FIRST = ["reward_mean", "loss", "entropy", "kl", "approx_kl", "grad_norm", "staleness_mean", "step_s", "wait_s", "clip_fraction", "truncated_fraction", "log_prob_gap"];
const HIDDEN = new Set(["time", "version", "step"]);
const PAGE = 12, ASKED = 40;

export async function curves(place, state) {
  const names = await Promise.all(state.shown.map((run) => of(run.id, "/names").then((found) => found.names)));
  const every = [...new Set(names.flat())].filter((name) => !HIDDEN.has(name));
  every.sort((a, b) => rank(a) - rank(b));
  const search = (state.get("search") ?? "").toLowerCase(), smoothing = Number(state.get("smooth") ?? 0.6), log = state.get("log") === "1";
  const [first, last] = (state.get("steps") ?? ":").split(":").map((each) => (/^\d+$/.test(each) ? Number(each) : null));
  const wanted = every.filter((name) => name.toLowerCase().includes(search)), page = Number(state.get("more") ?? 1);
  const shown = wanted.slice(0, PAGE * page);

  const slider = el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: smoothing, onchange: (event) => state.set({ smooth: event.target.value }) });
  const typed = el("input", { type: "search", value: search, placeholder: "such as kl or reward  ( / )", onchange: (event) => state.set({ search: event.target.value, more: null }) });
  place.append(el("div", { class: "tools" },
    field("Metrics", typed), field("Smoothing", slider),
    field("Axis", select([["0", "linear"], ["1", "logarithmic"]], log ? "1" : "0", (value) => state.set({ log: value === "1" ? "1" : null }))),
    first === null && last === null ? el("span", { class: "quiet" }, "Drag over a chart to zoom.") : el("button", { type: "button", onclick: () => state.set({ steps: null }) }, `Steps ${first ?? 0} to ${last ?? "the end"} ✕`)));
  const progress = el("p", { class: "quiet" }), grid = el("div", { class: "charts" });
  place.append(progress, grid);
  if (!shown.length) grid.append(empty(every.length ? `No metric has “${search}” in its name.` : "No metrics yet: they come with the first step."));
  const boxes = shown.map((name) => { const box = el("div", { class: "chart" }); grid.append(card(name, box)); return box; });
  if (wanted.length > shown.length) place.append(el("button", { type: "button", class: "more", onclick: () => state.set({ more: page + 1 }) }, `Show more (${wanted.length - shown.length} left)`));

  let before = "";
  async function refresh() {
    const points = Math.min(1200, Math.max(200, Math.round((grid.clientWidth || 800) / 2)));
    const found = await Promise.all(state.shown.map((run) => asked(run, shown, { first, last, points })));
    const share = Math.min(1, ...found.map((each) => each.share));
    progress.textContent = share < 1 ? `${percent(share)} is read; the rest follows.` : "";
    const now = JSON.stringify(found.map((each) => Object.values(each.series).map((curve) => [curve.num, curve.mean.at(-1)])));
    if (now === before) return;
    before = now;
    shown.forEach((name, index) => {
      const lines = state.shown.map((run, at) => ({ run, curve: found[at].series[name] })).filter(({ curve }) => curve?.num)
        .map(({ run, curve }) => ({ ...curve, label: run.id, colour: colour(run) }));
      const zoom = (low, high) => state.set({ steps: `${Math.max(0, Math.floor(low))}:${Math.ceil(high)}` });
      boxes[index].replaceChildren();
      if (lines.length) chart(boxes[index], lines, { smoothing, log, zoom });
      else boxes[index].append(empty("No values here."));
    });
  }
  await refresh();
  return refresh;
}

async function asked(run, names, query) {
  const parts = [];
  for (let at = 0; at < names.length; at += ASKED) parts.push(of(run.id, "/series", { names: names.slice(at, at + ASKED).join(","), ...query }));
  const found = await Promise.all(parts);
  return { series: Object.assign({}, ...found.map((each) => each.series)), share: Math.min(1, ...found.map((each) => each.share)) };
}

const rank = (name) => { const at = FIRST.indexOf(name); return at >= 0 ? at : FIRST.length + (name.includes("/") ? 1 : 0); };

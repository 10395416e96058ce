// Overview: a card a run: its state in words, how far it is, its reward, and who waits for whom.

import { chart, colour } from "./chart.js";
import { card, clock, el, empty, number, of, percent, seconds } from "./dom.js";

const FIGURES = {
  reward_mean: ["reward", (v) => number(v, 3)], loss: ["loss", (v) => number(v, 3)], s_a_step: ["a step", seconds],
  tokens_a_s: ["tokens / s", (v) => number(v, 3)], samples_a_s: ["samples / s", (v) => number(v, 3)],
  staleness_mean: ["staleness", (v) => number(v, 3)], entropy: ["entropy", (v) => number(v, 3)], kl: ["KL", (v) => number(v, 3)],
};

export async function overview(place, state) {
  const cards = el("div", { class: "cards" });
  place.append(cards);
  async function refresh() {
    const curves = await Promise.all(state.shown.map((run) => of(run.id, "/series", { names: "reward_mean,loss", points: 300 })));
    const opened = [...cards.querySelectorAll("details")].map((each) => each.open);
    cards.replaceChildren(...state.shown.map((run) => about(run)));
    cards.querySelectorAll("details").forEach((each, index) => { each.open = opened[index] ?? each.open; });
    state.shown.forEach((run, index) => {
      const { reward_mean: reward, loss } = curves[index].series;
      const box = cards.children[index].querySelector(".spark"), curve = reward ?? loss;
      if (!curve?.num) return box.replaceChildren(empty("No step yet."));
      chart(box, [{ ...curve, label: reward ? "reward" : "loss", colour: colour(run) }], { height: 150, smoothing: 0.6, sync: "overview" });
    });
  }
  await refresh();
  return refresh;
}

function about(run) {
  const share = run.num_steps ? run.num_done / run.num_steps : 0;
  const figures = Object.entries(FIGURES).filter(([name]) => name in run.figures)
    .filter(([name]) => name !== "loss" || !("reward_mean" in run.figures));
  const left = run.alive && run.figures.s_a_step ? run.figures.s_a_step * (run.num_steps - run.num_done) : null;
  return el("article", { class: `card about c${run.colour}` },
    el("h2", {}, el("i", { class: `state ${run.state}`, "aria-hidden": "true" }), run.id, el("span", { class: "badge" }, run.state)),
    el("p", {}, run.words, run.share < 1 ? ` ${percent(run.share)} of its metrics are read so far.` : ""),
    el("div", { class: "progress" },
      el("progress", { max: 1, value: share, "aria-label": "steps done" }),
      el("span", {}, `step ${number(run.num_done)} of ${number(run.num_steps)}`, left === null ? "" : ` · ${seconds(left)} left`)),
    el("dl", { class: "figures" }, figures.map(([name, [label, shown]]) => el("div", {}, el("dt", {}, label), el("dd", {}, shown(run.figures[name]))))),
    el("div", { class: "spark" }),
    run.explanation ? words(run.explanation) : empty("Who waits for whom is told after the first steps."),
    run.evaluations.length ? el("p", { class: "quiet" }, "Evaluated: ", run.evaluations.map((each) => `version ${each.version}: ${number(each.reward, 3)}`).join(", ")) : null,
    el("p", { class: "quiet path" }, run.path, run.last_time ? ` · newest step ${clock(run.last_time)}` : ""));
}

function words(found) {
  const total = found.step_s || 1;
  const parts = Object.entries(found.trainer).filter(([, value]) => value > 0).sort((a, b) => b[1] - a[1]);
  return el("div", { class: "explanation" },
    el("h3", {}, `Who waits for whom, steps ${found.first} to ${found.last}`),
    found.findings.map((finding) => el("details", { open: finding === found.findings[0] },
      el("summary", {}, finding.text),
      el("ul", {}, finding.why.map((why) => el("li", {}, `because ${why}`)), finding.change.map((change) => el("li", { class: "change" }, `change: ${change}`))))),
    bar(parts, total),
    el("table", { class: "roles" }, el("tbody", {}, Object.entries(found.roles).map(([role, use]) => el("tr", {},
      el("th", { scope: "row" }, use.num_processes > 1 ? `${role} × ${use.num_processes}` : role),
      el("td", {}, el("meter", { value: Math.min(use.busy, 1), "aria-label": `${role} at work` }), ` ${percent(use.busy)} at work`),
      el("td", {}, Object.entries(use.waits).filter(([, part]) => part >= 0.005).sort((a, b) => b[1] - a[1]).map(([whom, part]) => `waits for ${whom} ${percent(part)}`).join(", ") || "waits for nobody"))))));
}

// The parts of a trainer's step, as wide as they are long; SVG, since a strict policy takes no style attributes.
export function bar(parts, total, caption = `A step of the trainer, ${seconds(total)}`) {
  const svg = (tag, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text) made.textContent = text;
    return made;
  };
  let at = 0;
  const picture = svg("svg", { class: "bar", viewBox: "0 0 1000 24", preserveAspectRatio: "none", role: "img", "aria-label": "parts of a step" });
  const legend = el("ul", { class: "legend" });
  parts.forEach(([name, value], index) => {
    const width = (1000 * value) / total, piece = svg("rect", { x: at, y: 0, width, height: 24, class: `p${index % 8}` });
    piece.append(svg("title", {}, `${name}: ${seconds(value)}`));
    picture.append(piece);
    at += width;
    if (value >= 0.01 * total) legend.append(el("li", {}, el("i", { class: `swatch p${index % 8}` }), `${name} ${seconds(value)}`));
  });
  return el("figure", {}, el("figcaption", {}, caption), picture, legend);
}

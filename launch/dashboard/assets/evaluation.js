// Evaluation: mean@k and pass@k of every set over versions, runs overlaid, and the same as a table.

import { chart, colour } from "./chart.js";
import { card, el, empty, number, of, table } from "./dom.js";

export async function evaluation(place, state) {
  let before = "";
  async function refresh() {
    const found = await Promise.all(state.shown.map((run) => of(run.id, "/evaluations")));
    const now = JSON.stringify(found.map((each) => each.length));
    if (now === before) return;
    before = now;
    const names = [...new Set(found.flat().flatMap((each) => Object.keys(figures(each))))];
    place.replaceChildren();
    if (!names.length) { place.append(empty("Nothing is evaluated yet. Settings under `evaluation` say what is, and when.")); return; }
    const grid = el("div", { class: "charts" });
    place.append(grid);
    const boxes = names.map((name) => { const box = el("div", { class: "chart" }); grid.append(card(name, box)); return box; });
    place.append(...state.shown.map((run, at) => card(run.id, found[at].length ? table(
      ["version", "label", "prompts", "samples", "failed", ...names], found[at].map((each) => {
        const values = figures(each);
        return [number(each.version), each.label ?? "–", number(each.num_prompts), number(each.num_samples), number(each.num_failed ?? 0), ...names.map((name) => number(values[name]))];
      })) : empty("No evaluation yet."))));
    requestAnimationFrame(() => names.forEach((name, index) => {
      const lines = state.shown.map((run, at) => {
        const points = new Map(found[at].filter((each) => Number.isFinite(figures(each)[name])).map((each) => [each.version, figures(each)[name]]));
        const x = [...points.keys()].sort((a, b) => a - b);
        return { label: run.id, colour: colour(run), x, mean: x.map((version) => points.get(version)), points: true };
      }).filter((line) => line.x.length);
      chart(boxes[index], lines, { xlabel: "version", sync: "evaluation" });
    }));
  }
  await refresh();
  return refresh;
}

function figures(told) {
  const found = { ...(told.figures ?? {}) };
  for (const [set, values] of Object.entries(told.sets ?? {})) for (const [name, value] of Object.entries(values)) if (name.includes("@")) found[`${set} ${name}`] = value;
  if (!told.sets && typeof told.reward === "number") found.reward = told.reward;
  return found;
}

// Bus and weights: where prompt groups and rows are, rings, who has which version; of a run that is over, its balance of samples.

import { chart, colour, paint } from "./chart.js";
import { bytes, card, el, empty, number, of, percent, seconds, table } from "./dom.js";

const plain = (value) => (value === null || value === "" ? "–" : typeof value === "number" ? number(value) : typeof value === "object" ? JSON.stringify(value) : String(value));

export async function bus(place, state) {
  async function refresh() {
    const found = await Promise.all(state.shown.map((run) => of(run.id, "/flow")));
    place.replaceChildren(...state.shown.map((run, at) => about(run, found[at])));
    requestAnimationFrame(() => state.shown.forEach((run, at) => draw(place.children[at]?.querySelectorAll(".chart") ?? [], run, found[at])));
  }
  await refresh();
  return refresh;
}

function about(run, told) {
  const counted = Object.entries(told.bus ?? {}), scalars = counted.filter(([, value]) => value === null || typeof value !== "object");
  const rings = told.bus?.rings ?? {}, states = told.bus?.groups ?? {}, proved = told.weights?.proved ?? {};
  const staleness = Object.entries(told.staleness ?? {}), trained = staleness.reduce((sum, [, value]) => sum + value, 0);
  return el("div", { class: "flow" },
    el("h2", { class: `c${run.colour}` }, el("i", { class: `state ${run.state}` }), run.id),
    told.unanswered ? empty(told.unanswered) : null,
    el("div", { class: "cards" },
      told.ledger ? card("Balance of samples", table(["", "samples"], [["admitted", number(told.ledger.admitted)], ["trained", number(told.ledger.trained)], ["lost", number(told.ledger.lost)], ["trained twice", number(told.ledger.trained_twice)],
        ...Object.entries(told.ledger.by_outcome ?? {}).map(([name, value]) => [name, number(value)])])) : null,
      Object.keys(states).length ? card("Prompt groups", table(["state", "groups"], Object.entries(states).map(([name, value]) => [name, plain(value)]))) : null,
      staleness.length ? card(told.staleness_of, table(["versions old", told.ledger ? "samples" : "tokens", "share"], staleness.map(([age, value]) => [age, number(value), percent(value / trained)]))) : null,
      Object.keys(rings).length ? card("Rings", table(["ring", "used", "of", "more"], Object.entries(rings).map(([name, ring]) => [name, bytes(ring.used), bytes(ring.size ?? ring.capacity ?? ring.bytes), Object.entries(ring).filter(([key]) => !["used", "size", "capacity", "bytes"].includes(key)).map(([key, value]) => `${key} ${bytes(value)}`).join(", ")]))) : null,
      told.weights ? card("Versions proved", Object.keys(proved).length ? table(["reader", "version", "behind"], Object.entries(proved).map(([name, version]) => [name, number(version), number((told.weights.committed ?? version) - version)])) : empty("No reader has proved a version yet.")) : null,
      scalars.length ? card("Counters of the coordinator", table(["", ""], scalars.map(([name, value]) => [name, plain(value)]))) : null),
    Object.keys(told.delays).length ? card("Seconds from a version's commit until a reader has it", el("div", { class: "chart" })) : null,
    card("Seconds between commits of versions", told.commits.length > 1 ? el("div", { class: "chart" }) : empty("Fewer than two versions are committed.")));
}

function draw(boxes, run, { commits, delays }) {
  const left = [...boxes], readers = Object.entries(delays).map(([name, loads], at) => ({ label: name, colour: paint(at), dash: at >= 8, x: loads.map(([version]) => version), mean: loads.map(([, value]) => value), points: true }));
  if (readers.length && left.length) chart(left.shift(), readers, { xlabel: "version", sync: "weights" });
  if (!left.length) return;
  const x = [], mean = [];
  commits.forEach(([version, time], at) => { if (at && version > (x.at(-1) ?? -1)) { x.push(version); mean.push(time - commits[at - 1][1]); } });
  chart(left[0], [{ label: run.id, colour: colour(run), x, mean, points: x.length < 60 }], { xlabel: "version", sync: "commits" });
}

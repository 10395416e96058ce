// Health: role groups with restarts and memory, what is waited for with deadlines, what happened, the ends of logs; of a live run
// where its processes stand, and what it can be asked to do.

import { actions, stacks } from "./actions.js";
import { bytes, card, clock, el, empty, field, number, of, seconds, select, table } from "./dom.js";

const HIDDEN = new Set(["time", "kind", "source", "group", "incarnation"]);
const BAD = new Set(["died", "given_up", "not_told", "quarantined", "group_error", "undelivered", "forced"]);
const shown = (event) => Object.entries(event).filter(([name]) => !HIDDEN.has(name)).map(([name, value]) => `${name}=${typeof value === "object" ? JSON.stringify(value) : typeof value === "number" && !Number.isInteger(value) ? number(value) : value}`).join("  ");

export async function health(place, state) {
  // What is typed, chosen and scrolled in stays: only what is told anew is made anew.
  const boxes = state.shown.map(() => ({ told: el("div"), logs: el("div"), can: null, below: el("div") }));
  place.append(...boxes.map((box) => { box.below.append(card("Logs", box.logs)); return el("div", { class: "run-health" }, box.told, box.below); }));
  async function refresh() {
    const found = await Promise.all(state.shown.map((run) => of(run.id, "/health")));
    found.forEach((told, at) => {
      const run = state.shown[at], box = boxes[at], scrolled = box.told.querySelector(".events")?.scrollTop ?? 0;
      if (!box.logs.querySelector("select")) { if (told.logs.length) choose(run, box.logs, told.logs, null); else box.logs.replaceChildren(empty("No logs yet.")); }
      if (told.processes.length && !box.can) { box.can = [stacks(run), actions(run)]; box.below.append(...box.can.map((each) => each.place)); }
      if (!told.processes.length && box.can) { box.can.forEach((each) => each.place.remove()); box.can = null; }
      box.can?.forEach((each) => each.know(told));
      box.told.replaceChildren(
        el("h2", { class: `c${run.colour}` }, el("i", { class: `state ${run.state}` }), run.id, el("span", { class: "quiet" }, run.words)),
        card("Role groups and services", told.groups.length ? table(["name", "state", "incarnation", "deaths", "memory", "cores", "at"], told.groups.map((each) => [
          each.name, el("span", { class: each.state === "died" || each.state === "given_up" ? "badge bad" : "badge" }, each.state || "–"), number(each.incarnation),
          each.deaths ? el("strong", { class: "bad" }, number(each.deaths)) : "0", bytes(each.rss_bytes), number(each.cores, 3), each.section || "–"])) : empty("Nothing has started yet.")),
        waits(told),
        card("What happened, newest first", told.events.length ? el("ol", { class: "events", tabindex: 0 }, told.events.map((event) => el("li", { class: BAD.has(event.kind) ? "bad" : null },
          el("time", {}, clock(event.time).slice(11)), el("b", {}, event.kind ?? "event"), el("span", {}, event.group ?? event.source ?? "", "  ", shown(event))))) : empty("Nothing has happened yet.")));
      const events = box.told.querySelector(".events");
      if (events) events.scrollTop = scrolled;
    });
  }
  await refresh();
  return refresh;
}

const left = (wait) => (wait.deadline_s === null ? "–" : el("span", { class: wait.seconds > 0.8 * wait.deadline_s ? "badge bad" : "quiet" }, seconds(Math.max(0, wait.deadline_s - wait.seconds))));

// Equal waits, of many samples say, are one row: how many, and the one that has lasted longest.
function waits(told) {
  const longest = new Map();
  for (const each of told.waits) {
    const key = JSON.stringify([each.waiter, each.name, each.peer]), known = longest.get(key) ?? { ...each, num: 0 };
    longest.set(key, { ...(each.seconds > known.seconds ? each : known), num: known.num + 1 });
  }
  if (longest.size) return card("Who waits for what", table(["who", "for what", "of whom", "waits", "for", "deadline", "left"], [...longest.values()].map((each) => [each.waiter, each.name, each.peer, number(each.num), seconds(each.seconds), each.deadline_s === null ? "none" : seconds(each.deadline_s), left(each)])));
  const sums = Object.entries(told.waits_s).map(([role, waited]) => [role, Object.entries(waited).sort((a, b) => b[1] - a[1]).slice(0, 5).map(([name, value]) => `${name} ${seconds(value)}`).join(", ")]);
  return card(sums.length ? "What was waited for longest, over the whole run, by all who waited at once" : "Who waits for what", sums.length ? table(["role", "waits"], sums) : empty(told.unanswered ?? "Nobody waits now."));
}

async function choose(run, place, names, name) {
  const file = name ?? names.find((each) => each.includes("actor-0")) ?? names[0];
  const tools = field("File", select(names.map((each) => [each, each]), file, (value) => choose(run, place, names, value)));
  try {
    const told = await of(run.id, "/log", { file });
    place.replaceChildren(tools, told.lines.length ? el("pre", { class: "log", tabindex: 0 }, told.lines.join("\n")) : empty(`${file} is empty.`));
  } catch (error) {
    place.replaceChildren(tools, empty(error.message));
  }
}

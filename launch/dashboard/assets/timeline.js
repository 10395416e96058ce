// Timeline: what each process did when, over some steps; a lane each, in it as many rows as overlap. Wheel or + and - zoom, a drag or
// arrows move; what lies under the pointer is told above.

import { bar } from "./overview.js";
import { card, el, empty, field, number, of, seconds, select } from "./dom.js";

const PATH = "critical path";
const ROW = 11, THIN = 6, HEAD = 15, RULER = 18, GAP = 5, MOST_ROWS = 24;

export async function timeline(place, state) {
  const run = state.one, step = state.get("step"), num = Number(state.get("num") ?? 1);
  const told = await of(run.id, "/timeline", { step, num });
  const pick = (value) => state.set({ step: value === null ? null : String(value) });
  const first = told.steps[0]?.step ?? 0, [oldest, newest] = told.known ?? [0, 0];
  place.append(el("div", { class: "tools" },
    state.shown.length > 1 ? field("Run", select(state.shown.map((each) => [each.id, each.id]), run.id, (value) => state.set({ run: value, step: null }))) : null,
    el("button", { type: "button", disabled: first <= oldest, onclick: () => pick(Math.max(oldest, first - num)) }, "← earlier"),
    field(`Step, ${oldest} to ${newest}`, el("input", { type: "number", class: "short", min: oldest, max: newest, value: first, onchange: (event) => pick(event.target.value) })),
    el("button", { type: "button", disabled: first + num > newest, onclick: () => pick(Math.min(newest, first + num)) }, "later →"),
    field("Steps", select(["1", "3", "10", "30"].map((each) => [each, each]), String(num), (value) => state.set({ num: value }))),
    step === null ? el("span", { class: "quiet" }, "The newest.") : el("button", { type: "button", onclick: () => pick(null) }, "Newest")));
  if (!told.steps.length) place.append(empty("No step is over yet."));
  else {
    const sums = {};
    for (const each of told.steps) for (const [name, value] of Object.entries(each.trainer)) sums[name] = (sums[name] ?? 0) + value;
    const total = told.steps.reduce((sum, each) => sum + each.step_s, 0), parts = Object.entries(sums).filter(([, value]) => value > 0).sort((a, b) => b[1] - a[1]);
    const waits = parts.filter(([name]) => name.startsWith("wait for ")), longest = told.steps.reduce((sum, each) => sum + each.longest_s, 0);
    place.append(card(`What ${told.steps.length > 1 ? `steps ${first} to ${told.steps.at(-1).step}` : `step ${first}`} took: the trainer's way through`,
      bar(parts, total, `${seconds(total)} of the trainer`),
      el("p", {}, waits.length ? `It waited ${seconds(waits.reduce((sum, [, value]) => sum + value, 0))} of ${seconds(total)}, longest for ${waits[0][0].replace("wait for ", "")}.` : "It waited for nobody.",
        longest > 0.001 ? ` ${seconds(longest)} of it was for the longest trajectories.` : "")));
    const tip = el("p", { class: "tip quiet" }, "Point at a span to see what it is."), canvas = el("canvas", { tabindex: 0, role: "img", "aria-label": `${told.lanes.length} lanes of processes over ${seconds(told.seconds)}` });
    if (told.path.length) told.lanes.unshift({ process: PATH, lane: PATH.split("-")[0], spans: told.path.map(([name, start, length]) => [name, start, length, null]) });
    const longestPieces = [...told.path].sort((a, b) => b[2] - a[2]).slice(0, 5);
    if (longestPieces.length) place.append(card("Its critical path: the longest pieces, one after another without a gap in the topmost lane", el("ol", {}, longestPieces.map(([name, start, length]) => el("li", {}, `${name}: ${seconds(length)} from ${seconds(start)}`)))));
    place.append(card("Lanes of all processes", tip, el("div", { class: "lanes" }, canvas),
      told.num_left_out ? el("p", { class: "quiet" }, `${number(told.num_left_out)} short spans are left out.`) : null));
    requestAnimationFrame(() => draw(canvas, tip, told, parts.map(([name]) => name)));
  }
  let before = newest;
  return async () => {
    if (step !== null || document.activeElement?.tagName === "CANVAS") return;
    const now = await of(run.id, "/timeline", { num });
    if ((now.known?.[1] ?? 0) > before) { before = now.known[1]; state.redraw(); }
  };
}

// Rows of a lane in which spans do not overlap, first come first.
function rows(spans) {
  const ends = [];
  return spans.map(([name, start, length, step]) => {
    let row = ends.findIndex((end) => end <= start + 1e-9);
    if (row < 0) row = ends.length < MOST_ROWS ? ends.length : MOST_ROWS - 1;
    ends[row] = start + length;
    return { name, start, length, step, row };
  });
}

// `parts`: of the step, whose colours in the bar above are those of the critical path.
function draw(canvas, tip, told, parts) {
  const css = getComputedStyle(document.documentElement), paint = (name) => css.getPropertyValue(name).trim();
  const hue = (name) => { let sum = 0; for (const letter of name) sum = (sum * 31 + letter.codePointAt(0)) >>> 0; return paint(name.startsWith("wait") ? "--line" : `--c${sum % 8}`); };
  let y = RULER;
  const lanes = told.lanes.map((lane) => {
    const spans = rows(lane.spans), deep = Math.max(1, ...spans.map((span) => span.row + 1)), at = y;
    const row = deep > 6 ? THIN : ROW;
    y += HEAD + deep * row + GAP;
    return { row, name: lane.lane === lane.process.split("-")[0] ? lane.process : `${lane.process}  ${lane.lane}`, spans, at };
  });
  const height = y;
  let from = 0, length = told.seconds || 1, width = 0;
  const pen = canvas.getContext("2d");

  function show() {
    const ratio = devicePixelRatio || 1;
    width = canvas.parentElement.clientWidth;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.height = `${height}px`;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "11px system-ui, sans-serif";
    const scale = width / length, tick = 10 ** Math.floor(Math.log10(length / 4)), ticks = length / tick > 12 ? tick * 5 : tick;
    pen.fillStyle = paint("--faint");
    pen.strokeStyle = paint("--grid");
    for (let at = Math.ceil(from / ticks) * ticks; at < from + length; at += ticks) {
      const x = (at - from) * scale;
      pen.beginPath(); pen.moveTo(x, RULER - 4); pen.lineTo(x, height); pen.stroke();
      const mark = seconds(Number(at.toPrecision(6)));
      if (x + 3 + pen.measureText(mark).width <= width) pen.fillText(mark, x + 3, 11);
    }
    for (const { name, spans, at, row } of lanes) {
      for (const span of spans) {
        const x = (span.start - from) * scale, wide = Math.max(span.length * scale, 0.8);
        if (x + wide < 0 || x > width) continue;
        pen.fillStyle = name === PATH ? paint(`--c${(parts.indexOf(span.name) + 8) % 8}`) : hue(span.name);
        pen.fillRect(x, at + HEAD + span.row * row, wide, row - (row === ROW ? 2 : 1));
      }
      pen.fillStyle = paint("--text");
      pen.fillText(name, 4, at + HEAD - 4);
    }
    pen.strokeStyle = paint("--accent");
    pen.setLineDash([3, 3]);
    for (const step of told.steps) {
      const x = (step.start - told.start - from) * scale;
      pen.beginPath(); pen.moveTo(x, 0); pen.lineTo(x, height); pen.stroke();
    }
    pen.setLineDash([]);
  }

  function zoom(factor, around) {
    const at = from + (around / width) * length;
    length = Math.min(Math.max(length * factor, 1e-5), 2 * (told.seconds || 1));
    from = at - (around / width) * length;
    show();
  }
  const move = (share) => { from += share * length; show(); };

  canvas.addEventListener("wheel", (event) => { if (!event.ctrlKey && Math.abs(event.deltaY) < 1) return; event.preventDefault(); zoom(event.deltaY > 0 ? 1.2 : 1 / 1.2, event.offsetX); }, { passive: false });
  let held = null;
  canvas.addEventListener("pointerdown", (event) => { held = event.offsetX; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { held = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (held !== null) { move((held - event.offsetX) / width); held = event.offsetX; return; }
    const time = from + (event.offsetX / width) * length, slack = (2 / width) * length;
    const lane = lanes.findLast((each) => each.at <= event.offsetY), row = lane ? Math.floor((event.offsetY - lane.at - HEAD) / lane.row) : -1;
    const span = lane?.spans.findLast((each) => each.row === row && each.start - slack <= time && time <= each.start + each.length + slack);
    tip.textContent = span ? `${lane.name}: ${span.name}, ${seconds(span.length)} from ${seconds(span.start)}${span.step === null ? "" : `, step ${span.step}`}` : "Wheel or + and − zoom, a drag or arrows move, 0 shows all.";
  });
  canvas.addEventListener("keydown", (event) => {
    const act = { "+": () => zoom(1 / 1.5, width / 2), "=": () => zoom(1 / 1.5, width / 2), "-": () => zoom(1.5, width / 2), ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), 0: () => { from = 0; length = told.seconds || 1; show(); } }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  new ResizeObserver(() => canvas.parentElement.clientWidth !== width && show()).observe(canvas.parentElement);
  show();
}

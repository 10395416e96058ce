// Samples: prompts and answers as text, found by step, reward and words; one of them whole, with its prompt group beside it.

import { bytes, card, clock, el, empty, field, number, of, percent, printable, select } from "./dom.js";

const text = (value) => (typeof value === "string" ? value : value === null || value === undefined ? "" : JSON.stringify(value, null, 2));
// A turn's words; of one in parts those of each, and of media their kind.
const said = (content) => (Array.isArray(content) && content.every((part) => part?.type) ? content.map((part) => (part.type === "text" ? text(part.text) : `[${text(part.type)}]`)).join("\n") : text(content));
const turns = (prompt) => Array.isArray(prompt) && prompt.length > 0 && prompt.every((turn) => turn && typeof turn === "object" && "role" in turn);
const OWN = new Set(["prompt", "response", "label", "reward", "time", "group", "number", "sample", "set", "finish_reason", "num_tokens", "versions", "error"]);

export async function samples(place, state) {
  const run = state.one, query = Object.fromEntries(["kind", "first", "last", "least", "most", "search"].map((name) => [name, state.get(name)]));
  query.failed = state.get("failed") === "1" ? "true" : null;
  const list = el("div", { class: "list" }), count = el("p", { class: "quiet" }), more = el("button", { type: "button", class: "more", hidden: true }, "Show more");
  const found = await of(run.id, "/samples", { ...query, limit: 20 });
  const typed = (name, label, attributes) => field(label, el("input", { value: state.get(name) ?? "", onchange: (event) => state.set({ [name]: event.target.value, row: null }), ...attributes }));
  place.append(el("div", { class: "tools" },
    state.shown.length > 1 ? field("Run", select(state.shown.map((each) => [each.id, each.id]), run.id, (value) => state.set({ run: value, row: null }))) : null,
    typed("search", "Words", { type: "search", placeholder: "in prompt or answer  ( / )" }),
    field("Made for", select([["", "everything"], ...found.kinds.map((kind) => [kind, kind === "trained" ? "training" : `evaluation ${kind}`])], query.kind ?? "", (value) => state.set({ kind: value, row: null }))),
    typed("first", "From step", { type: "number", min: 0, class: "short" }), typed("last", "to", { type: "number", min: 0, class: "short" }),
    typed("least", "Reward from", { type: "number", step: "any", class: "short" }), typed("most", "to", { type: "number", step: "any", class: "short" }),
    field("Failed only", el("input", { type: "checkbox", checked: query.failed === "true", onchange: (event) => state.set({ failed: event.target.checked ? "1" : null, row: null }) }))));
  const whole = el("aside", { class: "whole", "aria-label": "The chosen sample" });
  place.append(count, el("div", { class: "pair" }, el("div", {}, list, more), whole));

  let next = null;
  const add = (told) => {
    list.append(...told.rows.map((row) => entry(row, () => open(row.row))));
    next = told.next;
    more.hidden = next === null;
    more.textContent = told.rows.length ? "Show more" : `Look further back: ${number(next)} are left`;
    const share = told.share < 1 ? `, ${percent(told.share)} of the files are read so far` : "";
    count.textContent = `${number(told.matching)} of ${number(told.total)} kept samples${query.search ? " are looked through, newest first" : ", newest first"}${share}.`;
    if (!list.childElementCount) list.append(empty(told.total ? (next === null ? "No sample is like that." : "None among the newest ones.") : "No samples are kept yet."));
  };
  more.addEventListener("click", async () => {
    const before = list.querySelectorAll(".entry").length;
    do {
      list.querySelector(":scope > .empty")?.remove();
      add(await of(run.id, "/samples", { ...query, before: next, limit: 20 }));
    } while (list.isConnected && next !== null && list.querySelectorAll(".entry").length === before);
  });
  add(found);

  async function open(row) {
    state.set({ row }, false, "samples");
    for (const each of list.children) each.setAttribute("aria-current", String(Number(each.dataset.row) === row));
    const told = await of(run.id, "/group", { row });
    const made = detail(told, open);
    whole.replaceChildren(made);
    const { step, line } = told.sample;
    if (step === null || line.group === undefined) return;
    const kept = await of(run.id, "/tokens", { step, group: line.group });
    if (made.parentNode !== whole) return;
    if (kept.media.length) made.append(media(run, kept));
    if (kept.rows.length || kept.why) made.append(tokens(kept, line.sample ?? 0, state));
  }
  const chosen = state.get("row") ?? found.rows[0]?.row;
  if (chosen !== undefined && chosen !== null) await open(Number(chosen));
  // What is read is not taken away: new samples come when the newest is still at the top of a list that was not opened further.
  return async () => {
    if (list.scrollTop || scrollY || list.childElementCount > 20 || state.get("row") !== String(found.rows[0]?.row ?? "")) return;
    const told = await of(run.id, "/samples", { ...query, limit: 20 });
    if (told.rows[0]?.row !== found.rows[0]?.row) { found.rows = told.rows; list.replaceChildren(); add(told); await open(told.rows[0].row); }
  };
}

function reward(value) {
  const known = typeof value === "number";
  return el("span", { class: `reward ${known ? (value > 0 ? "good" : value < 0 ? "bad" : "none") : "failed"}` }, known ? number(value, 3) : "no reward");
}

const where = (row) => (row.step === null ? `evaluation ${row.kind}${row.line.set ? `, ${row.line.set}` : ""}` : `step ${row.step}`);

function entry(row, open) {
  return el("button", { type: "button", class: "entry", "data-row": row.row, onclick: open },
    el("span", { class: "head" }, reward(row.line.reward), el("span", {}, where(row)), row.line.error ? el("span", { class: "badge bad" }, "failed") : null, row.line.finish_reason === "length" ? el("span", { class: "badge" }, "cut off") : null),
    el("span", { class: "line" }, (turns(row.line.prompt) ? row.line.prompt.map((turn) => said(turn.content)).join(" ") : text(row.line.prompt)).slice(0, 300)),
    el("span", { class: "line answer" }, text(row.line.response).slice(0, 300)));
}

function detail({ sample, group, elsewhere }, open) {
  const line = sample.line, others = Object.entries(line).filter(([name]) => !OWN.has(name) && !(name === "details" && !Object.keys(line.details ?? {}).length));
  const block = (title, value, kind = "") => (text(value) === "" ? null : el("section", {}, el("h3", {}, title), el("pre", { class: kind, tabindex: 0 }, text(value))));
  return card(null,
    el("p", { class: "head" }, reward(line.reward), el("strong", {}, where(sample)), el("span", { class: "quiet" },
      [line.group !== undefined ? `group ${line.group}` : line.number !== undefined ? `prompt ${line.number}` : null, `sample ${line.sample ?? 0}`,
        line.num_tokens !== undefined ? `${number(line.num_tokens)} tokens` : null, line.finish_reason ? `ended by ${line.finish_reason}` : null,
        line.versions?.length ? `policy version ${line.versions.join(", ")}` : null, clock(line.time)].filter(Boolean).join(" · "))),
    line.error ? block("Failed", line.error, "bad") : null,
    dialogue(line.prompt) ?? block("Prompt", line.prompt), block("Answer", line.response, "answer"), block("Label", line.label),
    others.map(([name, value]) => block(name, value)),
    group.length > 1 ? beside("Its prompt group, as far as it is kept", group, sample, open) : null,
    elsewhere.length ? beside("The same prompt in other evaluations", elsewhere, sample, open) : null);
}

// The trained samples of a prompt group: one of them token by token, in the colours that were chosen.
const COLOURS = [["log_probs", "log-prob"], ["advantages", "advantage"], ["versions", "policy version"], ["", "nothing"]];

function tokens({ rows, why }, sample, state) {
  if (!rows.length) return el("section", {}, el("h3", {}, "Tokens"), empty(why));
  let row = rows.find((each) => each.sample === sample) ?? rows[0], by = state.get("colour") ?? "log_probs";
  const text = el("pre", { class: "tokens", tabindex: 0 }), about = el("p", { class: "quiet" }), buttons = el("div", { class: "group" });
  const most = rows.flatMap((each) => each.advantages).reduce((least, value) => Math.max(least, Math.abs(value)), 1e-9);
  const newest = rows.flatMap((each) => each.versions).reduce((one, other) => Math.max(one, other), -1);
  const show = () => {
    text.replaceChildren(...row.texts.map((piece, at) => token(row, piece, at - row.num_prompt, by, most)));
    const parts = Object.entries(row.details ?? {}).map(([name, value]) => `${name} ${typeof value === "number" ? number(value, 3) : JSON.stringify(value)}`);
    about.textContent = printable([`ended by ${row.finish}`, `newest version ${newest}`, row.num_left_out ? `${number(row.num_left_out)} more tokens are not shown` : null, ...parts].filter(Boolean).join(" · "));
    buttons.replaceChildren(...rows.map((each) => el("button", { type: "button", class: "entry", "aria-current": String(each === row), onclick: () => { row = each; show(); } },
      el("span", { class: "head" }, reward(each.reward), el("span", {}, `sample ${each.sample}${each.part ? `, row ${each.part + 1}` : ""}`), el("span", { class: "quiet" }, `${number(each.mask.length)} tokens`)))));
  };
  show();
  return el("section", { class: "kept" }, el("h3", {}, "Tokens, as they were trained"),
    field("Coloured by", select(COLOURS, by, (value) => { by = value; state.set({ colour: value }, false, "samples"); show(); })), buttons, about, text,
    el("p", { class: "quiet" }, "Grey: not trained (the prompt, and what an environment said). Log-prob: red is unlikely, at -5 or less full. Advantage: green above zero, red below, against the largest of the group."));
}

// What a policy saw and heard: small pictures at once, the rest when it is asked for. Addresses of those shown before are given up.
let given = [];
function media(run, { media, num_media }) {
  given.splice(0).forEach((url) => URL.revokeObjectURL(url));
  const show = async ({ kind, name }, place) => {
    try {
      const found = await of(run.id, "/media", { name }, undefined, true), form = found.type.split("/")[0], src = URL.createObjectURL(found);
      given.push(src);
      const words = `${kind}, ${bytes(found.size)}`, shown = form === "image" ? el("img", { src, alt: words, title: words }) : el(form === "audio" ? "audio" : "video", { src, controls: true, title: words });
      shown.addEventListener("error", () => place.replaceChildren(empty(`${words}, which this browser cannot show.`)));
      place.replaceChildren(shown);
    } catch (error) { place.replaceChildren(empty(error.message)); }
  };
  const places = media.map((each, at) => {
    const place = el("div", { class: "medium" });
    if (each.why) place.append(empty(`${each.kind}: ${each.why}`));
    else if (each.kind === "image" && at < 8 && each.bytes < 4 << 20) show(each, place);
    else place.append(el("button", { type: "button", onclick: () => show(each, place) }, `${each.kind === "image" ? "Show" : "Play"} ${each.kind}, ${bytes(each.bytes)}`));
    return place;
  });
  const more = num_media > media.length ? el("p", { class: "quiet" }, `${number(num_media - media.length)} more are not shown.`) : null;
  return el("section", {}, el("h3", {}, "Media of the prompt"), el("div", { class: "media" }, places), more);
}

function token(row, piece, at, by, most) {
  if (at < 0) return el("span", { class: "dim" }, piece);
  const made = el("span", { class: row.mask[at] ? `by-${by || "nothing"}` : "dim", title: `log-prob ${number(row.log_probs[at])}, advantage ${number(row.advantages[at])}, ${row.versions[at] < 0 ? "not sampled" : `version ${row.versions[at]}`}` }, piece);
  if (!row.mask[at]) return made;
  if (by === "versions") made.classList.add(`p${row.versions[at] % 8}`);
  if (by === "advantages") made.classList.add(row.advantages[at] < 0 ? "below" : "above");
  const heat = by === "versions" ? 0.35 : by === "advantages" ? Math.abs(row.advantages[at]) / most * 0.6 : by === "log_probs" ? Math.min(1, -row.log_probs[at] / 5) * 0.75 : 0;
  made.style.setProperty("--heat", `${Math.round(heat * 100)}%`);
  return made;
}

function dialogue(prompt) {
  if (!turns(prompt)) return null;
  return el("section", {}, el("h3", {}, "Prompt"), prompt.map((turn) => el("div", { class: "turn" }, el("b", {}, text(turn.role)), el("pre", { tabindex: 0 }, said(turn.content)))));
}

const beside = (title, rows, chosen, open) => el("section", {}, el("h3", {}, title), el("div", { class: "group" }, rows.map((row) =>
  el("button", { type: "button", class: "entry", "aria-current": String(row.row === chosen.row), onclick: () => open(row.row) },
    el("span", { class: "head" }, reward(row.line.reward), el("span", {}, `sample ${row.line.sample ?? 0}`), row.step === null ? el("span", { class: "quiet" }, where(row)) : null),
    el("span", { class: "line answer" }, text(row.line.response).slice(0, 200))))));

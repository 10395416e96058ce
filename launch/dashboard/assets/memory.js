// Memory and devices: what each process holds now, or held at most, over the steps, and devices with who uses them.

import { chart, paint } from "./chart.js";
import { bytes, card, el, empty, number, of, percent, table } from "./dom.js";

const PREFIX = "supervisor/memory_bytes/";

export async function memory(place, state) {
  async function refresh() {
    const found = await Promise.all(state.shown.map(async (run) => {
      const [told, { names }] = await Promise.all([of(run.id, "/memory"), of(run.id, "/names")]);
      const held = names.filter((name) => name.startsWith(PREFIX)).slice(0, 24), device = names.filter((name) => name.startsWith("device_"));
      const asked = [...held, ...device], { series } = asked.length ? await of(run.id, "/series", { names: asked.join(","), points: 300 }) : { series: {} };
      return { told, held, device, series };
    }));
    place.replaceChildren(...state.shown.map((run, at) => about(run, found[at])));
    requestAnimationFrame(() => state.shown.forEach((_, at) => {
      const { held, device, series } = found[at], boxes = place.children[at]?.querySelectorAll(".chart") ?? [];
      const gib = (name, number, label) => ({ ...series[name], mean: series[name].mean.map((value) => value / 2 ** 30), min: undefined, max: undefined, label, colour: paint(number), dash: number >= 8 });
      const drawn = [held.filter((name) => series[name]?.num).map((name, number) => gib(name, number, name.slice(PREFIX.length))), device.map((name, number) => gib(name, number, name))].filter((lines) => lines.length);
      boxes.forEach((box, number) => chart(box, drawn[number], { sync: "memory", height: 220 }));
    }));
  }
  await refresh();
  return refresh;
}

function about(run, { told, held, device, series }) {
  const peaks = Object.entries(told.peak_bytes), kinds = ["rss_bytes", "own_bytes", "shared_bytes", "peak_bytes"];
  const last = held.filter((name) => series[name]?.num).map((name) => [name.slice(PREFIX.length), series[name].mean.at(-1), Math.max(...(series[name].max ?? series[name].mean))]);
  return el("div", { class: "flow" },
    el("h2", { class: `c${run.colour}` }, el("i", { class: `state ${run.state}` }), run.id),
    told.unanswered ? empty(told.unanswered) : null,
    el("div", { class: "cards" },
      told.processes.length ? card("Processes now", table(["process", "pid", "resident", "its own", "shared", "most"], told.processes.map((each) => [each.name, String(each.pid), ...kinds.map((kind) => bytes(each[kind]))]))) : null,
      last.length ? card("Role groups and segments, as recorded", table(["name", "last", "most"], last.map(([name, value, most]) => [name, bytes(value), bytes(most)]))) : null,
      peaks.length ? card("At most, over the whole run", table(["name", "resident"], peaks.map(([name, value]) => [name, bytes(value)]))) : null,
      told.devices.length ? card("Devices now", table(["device", "name", "used", "of", "busy", "by process"], told.devices.map((each) => [each.index, each.name, bytes(each.used_bytes), bytes(each.bytes), each.busy === null ? "–" : percent(each.busy / 100),
        Object.entries(each.by_pid).map(([pid, value]) => `${told.processes.find((one) => String(one.pid) === pid)?.name ?? `pid ${pid}`} ${bytes(value)}`).join(", ") || "nobody"]))) : card("Devices now", empty(run.alive ? "No device's driver answers on this machine." : "The run is over."))),
    card("GiB of main memory over the steps", held.length ? el("div", { class: "chart" }) : empty("Nothing of it is recorded.")),
    device.length ? card(`GiB of devices over the steps (${number(device.length)} curves)`, el("div", { class: "chart" })) : null);
}

// Charts: uPlot with the page's colours; of each run a line, and behind it how far the values of a bucket reach.

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const paint = (at) => css(`--c${at % 8}`), colour = (run) => paint(run.colour);

// Exponential smoothing, weighted so that the first values are not held back; `amount` 0 to 1.
export function smooth(values, amount) {
  if (!amount) return values;
  let sum = 0, weight = 0;
  return values.map((value) => {
    sum = sum * amount + value * (1 - amount);
    weight = weight * amount + (1 - amount);
    return sum / weight;
  });
}

// Several curves over one axis: {x: [...], lines: [[...], ...]}, null where a curve has no value.
function joined(curves) {
  const x = [...new Set(curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
  const place = new Map(x.map((value, index) => [value, index]));
  return { x, on: (curve, values) => { const found = Array(x.length).fill(null); curve.x.forEach((value, index) => { found[place.get(value)] = values[index]; }); return found; } };
}

const short = (value, digits = 3) => {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(digits))}M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(digits))}k`;
  return size !== 0 && size < 1e-3 ? value.toExponential(Math.max(1, digits - 3)) : String(Number(value.toPrecision(digits + 1)));
};

// As few digits as tell the marks of an axis apart.
const marks = (values) => {
  for (let digits = 3; digits < 8; digits++) {
    const found = values.map((value) => (value === null ? "" : short(value, digits))), shown = found.filter(Boolean);
    if (new Set(shown).size === shown.length || digits === 7) return found;
  }
};
const WHOLE = [1, 2, 5].flatMap((each) => Array.from({ length: 12 }, (_, power) => each * 10 ** power)).sort((a, b) => a - b);

// A little more than the values take; of one value alone, half of it and as much again.
const around = (_, low, high) => (low === null ? [0, 1] : low === high ? [low - (Math.abs(low) || 2) / 2, high + (Math.abs(low) || 2) / 2] : uPlot.rangeNum(low, high, 0.1, true));

// curves: [{label, colour, x, mean, min?, max?, points?}]. Returns the chart, which `resize` fits to its place.
export function chart(place, curves, { smoothing = 0, log = false, height = 180, xlabel = "step", zoom = null, sync = "curves" } = {}) {
  const { x, on: onto } = joined(curves);
  const on = (curve, values) => onto(curve, log ? values.map((value) => (value > 0 ? value : null)) : values);
  const data = [x], series = [{ label: xlabel, value: (_, value) => short(value) }], bands = [];
  for (const curve of curves) {
    const line = { label: curve.label, stroke: curve.colour, width: 1.6, spanGaps: true, value: (_, value) => short(value), points: { show: curve.points || curve.x.length < 3, size: 6, fill: curve.colour } };
    if (curve.dash) line.dash = [5, 4];
    if (curve.min) {
      const faint = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true, class: "hidden", label: "" };
      data.push(on(curve, curve.max), on(curve, curve.min));
      series.push({ ...faint }, { ...faint });
      bands.push({ series: [series.length - 2, series.length - 1], fill: `color-mix(in srgb, ${curve.colour} 16%, transparent)` });
    } else if (smoothing) {
      data.push(on(curve, curve.mean));
      series.push({ stroke: `color-mix(in srgb, ${curve.colour} 30%, transparent)`, width: 1, points: { show: false }, spanGaps: true, class: "hidden", label: "" });
    }
    data.push(on(curve, smooth(curve.mean, smoothing)));
    series.push(line);
  }
  const axis = { stroke: css("--faint"), grid: { stroke: css("--grid"), width: 1 }, ticks: { stroke: css("--grid"), width: 1 }, font: "11px system-ui, sans-serif" };
  const numbers = (_, values) => marks(values), room = (_, values) => 18 + 6.5 * Math.max(4, ...(values ?? []).map((value) => value.length));
  const options = {
    width: Math.max(place.clientWidth, 120), height, padding: [10, 12, 0, 0],
    scales: { x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) }, y: log ? { distr: 3 } : { range: around } },
    axes: [{ ...axis, values: numbers, incrs: WHOLE, space: 60, size: 30 }, { ...axis, values: numbers, size: room }],
    cursor: { sync: { key: sync }, drag: { x: true, y: false, setScale: !zoom }, points: { size: 7 } },
    legend: { live: true }, series, bands,
    hooks: zoom ? { setSelect: [(made) => { if (made.select.width > 4) zoom(made.posToVal(made.select.left, "x"), made.posToVal(made.select.left + made.select.width, "x")); }] } : {},
  };
  const made = new uPlot(options, data, place);
  const watch = new ResizeObserver(() => { const width = place.clientWidth; if (width && width !== made.width) made.setSize({ width, height }); if (!place.isConnected) watch.disconnect(); });
  watch.observe(place);
  return made;
}

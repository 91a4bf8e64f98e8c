"use strict";
// Traces and layout of each panel from the data of runs and the filters. This file does not modify the page.

// Idle, mean load, busiest: the middle colour is always at the mean.
const LOAD_COLORS = { light: ["#0b3c7d", "#f3f1ea", "#b5470c", "#5c1200"], dark: ["#6fb1ff", "#222a33", "#ff8c2e", "#fff0c8"] };
function loadScale(theme, top) {
  const [idle, even, busy, worst] = LOAD_COLORS[theme], mean = 1 / top;
  return [[0, idle], [mean, even], [mean + (1 - mean) * 0.5, busy], [1, worst]];
}
const SLOW_SCALE = { light: [[0, "#d9e4ee"], [0.35, "#fdd49e"], [0.7, "#e6550d"], [1, "#7f0000"]],
                     dark: [[0, "#2c3b4a"], [0.35, "#7a4a12"], [0.7, "#ff8c2e"], [1, "#fff3c4"]] };
const FLOW_SCALE = { light: [[0, "#eef3fb"], [0.5, "#5b9bd5"], [1, "#08306b"]],
                     dark: [[0, "#1c2633"], [0.5, "#3f7fbf"], [1, "#d7ecff"]] };
const FEW = 8;

const mean = (values) => { const known = finite(values); return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null; };
function quantile(values, share) {
  const sorted = finite(values).sort((a, b) => a - b);
  if (!sorted.length) return null;
  const at = share * (sorted.length - 1), low = Math.floor(at);
  return sorted[low] + (at - low) * (sorted[Math.min(low + 1, sorted.length - 1)] - sorted[low]);
}
const within = (state) => (step) => step >= state.from && step <= state.to;
const pick = (values, keep) => values.filter((_, i) => keep[i]);
const spread = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)).join(",");

// Lines over steps of each run, with a band from minimum to maximum where a point represents many steps.
function overlay(runs, state, name, options = {}) {
  const traces = [], scale = options.scale || 1;
  runs.forEach((run, number) => {
    const curves = run.curves;
    if (!curves.values[name] || !finite(curves.values[name]).length) return;
    const keep = curves.step.map(within(state)), x = pick(curves.step, keep);
    const values = (of) => pick(of, keep).map((one) => (one === null ? null : one * scale));
    const color = state.colors[number % state.colors.length];
    if (curves.low[name] && options.band !== false) {
      const band = { x, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false, legendgroup: number };
      traces.push({ ...band, y: values(curves.low[name]) },
                  { ...band, y: values(curves.high[name]), fill: "tonexty", fillcolor: `rgba(${spread(color)},0.2)` });
    }
    traces.push({ x, y: values(curves.values[name]), mode: x.length > 1 ? "lines" : "markers", name: plain(run.name), legendgroup: number,
                  line: { color, width: 1.6, dash: number ? "dash" : "solid" }, marker: { color },
                  showlegend: runs.length > 1, hovertemplate: "step %{x}: %{y:.5g}<extra></extra>", ...options.trace });
  });
  return traces;
}
const bar = (title) => ({ title: { text: title, side: "right" }, thickness: 12, outlinewidth: 0 });
const steps = { title: { text: "step" } };

function loss({ runs, state }) {
  const traces = overlay(runs, state, "loss");
  const bad = state.run.curves.skipped.filter(([step]) => within(state)(step));
  if (traces.length && bad.length) {
    const bottom = least(traces.flatMap((one) => finite(one.y)));
    traces.push({ x: bad.map(([step]) => step), y: bad.map(() => bottom), text: bad.map(([, why]) => plain(why)), mode: "markers",
                  name: "skipped steps", marker: { symbol: "x", size: 9, color: state.colors[1] }, hovertemplate: "step %{x}: %{text}<extra></extra>" });
  }
  let validated = 0;
  runs.forEach((run, number) => {
    const points = run.curves.validation.filter(([step]) => within(state)(step));
    if (!points.length) return;
    validated += points.length;
    const color = state.colors[(number + 2) % state.colors.length];
    traces.push({ x: points.map(([step]) => step), y: points.map(([, value]) => value), mode: "lines+markers", name: (runs.length > 1 ? `${plain(run.name)}: ` : "") + "validation loss",
                  line: { color, width: 1.2, dash: "dot" }, marker: { color, size: 7, symbol: "diamond" }, hovertemplate: "validation after step %{x}: %{y:.5g}<extra></extra>" });
  });
  if (runs.length === 1 && validated) traces.filter((one) => one.showlegend === false && one.name === plain(runs[0].name)).forEach((one) => { one.name = "training loss"; one.showlegend = true; });
  return { traces, layout: { xaxis: steps, showlegend: runs.length > 1 || bad.length > 0 || validated > 0,
    yaxis: { title: { text: "nats per token" }, type: state.view.loss === "log" ? "log" : "linear" } } };
}
const gradient = ({ runs, state }) => ({ traces: overlay(runs, state, "grad_norm"),
  layout: { xaxis: steps, showlegend: runs.length > 1, yaxis: { title: { text: "norm before clipping" }, type: state.view.gradient === "log" ? "log" : "linear" } } });
const throughput = ({ runs, state }) => ({ traces: overlay(runs, state, "tokens_per_s"),
  layout: { xaxis: steps, showlegend: runs.length > 1, yaxis: { title: { text: "tokens/s" }, rangemode: "tozero" } } });
const mfu = ({ runs, state }) => ({ traces: overlay(runs, state, "mfu", { scale: 100 }),
  layout: { xaxis: steps, showlegend: runs.length > 1, yaxis: { title: { text: "MFU, %" }, rangemode: "tozero" } } });

function split({ runs, state }) {
  const names = { compute: "compute", communication: "exposed communication", data: "data", checkpoint: "checkpoint", loop: "loop" };
  const colors = Object.keys(names).map((_, i) => state.colors[i]);
  if (runs.length > 1 && state.view.split !== "time") {
    const has = runs.filter((run) => run.curves.values.compute && finite(run.curves.values.compute).length);
    return { traces: has.length ? Object.entries(names).map(([key, label], i) => ({ type: "bar", orientation: "h", name: label,
      y: has.map((run) => plain(run.name)), marker: { color: colors[i] }, hovertemplate: `${label}: %{x:.4g} s<extra></extra>`,
      x: has.map((run) => mean(pick(run.curves.values[key], run.curves.step.map(within(state))))) })) : [],
      layout: { barmode: "stack", xaxis: { title: { text: "seconds a step, mean" } }, yaxis: { automargin: true }, showlegend: true } };
  }
  const curves = state.run.curves;
  if (!curves.values.compute || !finite(curves.values.compute).length) return { traces: [] };
  const keep = curves.step.map(within(state)), x = pick(curves.step, keep);
  return { traces: Object.entries(names).map(([key, label], i) => ({ x, y: pick(curves.values[key], keep).map((one) => Math.max(one || 0, 0)),
    stackgroup: "one", mode: "lines", line: { width: 0.5, color: colors[i] }, name: label, hovertemplate: "%{y:.4g} s<extra>" + label + "</extra>" })),
    layout: { xaxis: steps, yaxis: { title: { text: "seconds a step, rank 0" }, rangemode: "tozero" }, showlegend: true, hovermode: "x unified" } };
}

// Expert load: layers x experts at a step, or steps x experts of one layer.
function shownLoads(state) {
  const { loads } = state.run;
  const inside = loads.step.map((step, i) => [step, i]).filter(([step]) => within(state)(step));
  return inside.length ? inside : [];
}
function experts({ state }) {
  const { loads } = state.run, shown = shownLoads(state);
  if (!shown.length) return { traces: [] };
  const x = loads.ratio[0][0].map((_, i) => i * loads.per);
  let rows, y, title;
  if (state.layer === "all") {
    const [step, at] = shown[Math.min(state.slide, shown.length - 1)];
    rows = loads.ratio[at]; y = loads.layers.map((_, i) => i); title = "MoE layer";
    state.slideText = `step ${step}`;
  } else {
    rows = shown.map(([, at]) => loads.ratio[at][state.layer] || []); y = shown.map(([step]) => step); title = "step";
    state.slideText = "all steps";
  }
  const z = rows.map((row) => row.map((one) => (one < 0 ? null : one / 100)));
  const top = Math.max(2, most(finite(loads.ratio.flat(2)).map((one) => one / 100)));
  const named = state.layer === "all" ? loads.layers.map(plain) : y.map(() => plain(loads.layers[state.layer] || ""));
  return { traces: [{ type: "heatmap", x, y, z, zmin: 0, zmax: Math.min(top, 4), colorscale: loadScale(state.theme, Math.min(top, 4)),
    text: z.map((row, i) => row.map(() => named[i])), colorbar: bar("× mean"), hoverongaps: false,
    hovertemplate: `%{text}<br>${title} %{y}, expert %{x}: %{z:.2f} × mean<extra></extra>` }],
    layout: { xaxis: { title: { text: loads.per > 1 ? `expert (means of ${loads.per})` : "expert" }, dtick: Math.max(1, Math.ceil(x.length / 16)) * loads.per },
              yaxis: { title: { text: title }, autorange: state.layer === "all" ? "reversed" : true, tickformat: "d", ...(state.layer === "all" ? { dtick: Math.max(1, Math.ceil(rows.length / 16)) } : {}) }, tall: rows.length } };
}

// Home of each expert: layers x experts after the last visible switch, or switches x experts of one layer.
function owners({ state }) {
  const { placements } = state.run;
  const chosen = state.layer === "all" ? placements.layers.map((_, i) => i) : [placements.layers.indexOf((state.run.health.layers.length ? state.run.health : state.run.loads).layers[state.layer])];
  const rows = chosen.flatMap((layer) => {
    const visible = (placements.step[layer] || []).map((step, i) => ({ layer, step, i })).filter(({ step }) => step <= state.to);
    return state.layer === "all" ? visible.slice(-1) : visible;
  });
  if (!rows.length) return { traces: [] };
  const cells = rows.map(({ layer, i }) => placements.owners[layer][i].map((one) => [one].flat()));
  const text = cells.map((row, at) => row.map(([home, ...copies]) => {
    const { layer, step, i } = rows[at], [before, after] = placements.ratio[layer][i];
    return `${plain(placements.layers[layer])}, after step ${step}<br>rank ${home}${copies.length ? `, copies on ${copies.join(", ")}` : ""}` +
      (before === null || after === null ? "" : `<br>busiest rank ${before.toFixed(2)} → ${after.toFixed(2)} × mean`);
  }));
  const y = rows.map(({ layer, step }) => (state.layer === "all" ? plain(placements.layers[layer]) : `step ${step}`));
  return { traces: [{ type: "heatmap", x: [...Array(most(cells.map((row) => row.length))).keys()], y, z: cells.map((row) => row.map(([home]) => home)), text,
    zmin: 0, zmax: Math.max(placements.ranks - 1, 1), colorscale: FLOW_SCALE[state.theme], colorbar: bar("rank"), hoverongaps: false, hovertemplate: "expert %{x}<br>%{text}<extra></extra>" }],
    layout: { xaxis: { title: { text: "expert" }, tickformat: "d" }, yaxis: { type: "category", automargin: true, autorange: "reversed" }, tall: rows.length } };
}

const HEALTH = { imbalance: ["busiest expert's load", "× mean"], least: ["idlest expert's load", "× mean"], mean: ["average load", "slots an expert"],
  dead_share: ["dead experts", "%"], diversity: ["routing entropy, exp(H)/E", ""], dropped: ["dropped slots", "%"], balance: ["balance loss", ""],
  rows_fixed: ["rows of the busiest rank, experts at home", "× mean"], rows_lent: ["rows of the busiest rank, as computed", "× mean"],
  lent_experts: ["lent experts", "a call"], resident_share: ["lent experts with resident copies", "%"], copied_bytes: ["sent for copies", "bytes a step"] };
function health({ runs, state }) {
  const metric = HEALTH[state.view.health] ? state.view.health : "imbalance", unit = HEALTH[metric][1], scale = unit === "%" ? 100 : 1;
  const traces = [];
  runs.forEach((run, number) => {
    const series = run.health;
    if (!series.step.length) return;
    const keep = series.step.map(within(state)), x = pick(series.step, keep), own = runs.length > 1 ? `${plain(run.name)}: ` : "";
    const line = (values, name, color, dash) => {
      const y = pick(values, keep).map((one) => (one === null ? null : one * scale));
      if (finite(y).length) traces.push({ x, y, name: own + name, mode: x.length > 1 ? "lines" : "markers", line: { color, dash, width: 1.6 },
        marker: { color }, hovertemplate: "step %{x}: %{y:.4g}<extra>" + own + name + "</extra>" });
    };
    const color = (i) => state.colors[(2 * number + i) % state.colors.length];
    if (state.layer === "all") {
      if (!series.across[metric]) return;
      line(series.across[metric][0], "median layer (p50)", color(0), number ? "dash" : "solid");
      line(series.across[metric][1], "95% of layers no worse (p95)", color(1), number ? "dash" : "solid");
    } else if (series.values[metric] && series.values[metric][state.layer]) {
      line(series.values[metric][state.layer], plain(series.layers[state.layer]), color(0), number ? "dash" : "solid");
    }
  });
  return { traces, layout: { xaxis: steps, yaxis: { title: { text: HEALTH[metric].filter(Boolean).join(", ") }, rangemode: "tozero" }, showlegend: true } };
}

// The visible ranks, and their means over the visible steps.
function shownBins(state) {
  const { bins, width } = state.run.ranks;
  return bins.map((begin) => begin + width > state.from && begin <= state.to);
}
function slowdowns(state) {
  const { ranks } = state.run, keep = shownBins(state);
  const own = ranks.values.compute.map((row) => mean(pick(row, keep)));
  const typical = {};
  new Set(ranks.pp).forEach((stage) => { typical[stage] = quantile(own.filter((_, i) => ranks.pp[i] === stage), 0.5); });
  return own.map((one, i) => (one === null || !typical[ranks.pp[i]] ? null : one / typical[ranks.pp[i]]));
}
function stragglers({ state }) {
  const { ranks } = state.run;
  if (!ranks.rank.length) return { traces: [] };
  const slow = slowdowns(state), folded = state.view.stragglers !== "host";
  const cells = new Map(), seen = {};
  ranks.rank.forEach((rank, i) => {
    if (!state.shown(rank, ranks.host[i])) return;
    const row = folded ? ranks.pp[i] : ranks.host[i];
    const column = folded ? ranks.dp[i] : (seen[row] = (seen[row] === undefined ? -1 : seen[row]) + 1);
    const key = `${row} ${column}`, before = cells.get(key);
    // A cell shows the slowest of its ranks (tensor and context parallel).
    if (!before || (slow[i] || 0) > (before.z || 0)) cells.set(key, { row, column, z: slow[i], text: `rank ${rank}, ${plain(ranks.hosts[ranks.host[i]])}` });
  });
  if (!cells.size) return { traces: [] };
  const all = [...cells.values()], rows = [...new Set(all.map((one) => one.row))].sort((a, b) => a - b);
  const columns = most(all.map((one) => one.column)) + 1;
  const z = rows.map(() => Array(columns).fill(null)), text = rows.map(() => Array(columns).fill(""));
  all.forEach((one) => { const at = rows.indexOf(one.row); z[at][one.column] = one.z; text[at][one.column] = one.text; });
  const y = rows.map((row) => (folded ? `PP ${row}` : plain(ranks.hosts[row])));
  return { traces: [{ type: "heatmap", x: [...Array(columns).keys()], y, z, text, zmin: 1, zmax: 1.5, colorscale: SLOW_SCALE[state.theme], xgap: columns < 60 ? 1 : 0,
    ygap: rows.length < 60 ? 1 : 0, hoverongaps: false, texttemplate: all.length <= 32 ? "%{z:.2f}" : "", colorbar: bar("× median"),
    hovertemplate: "%{text}<br>%{z:.3f} × its stage's median compute<extra></extra>" }],
    layout: { xaxis: { title: { text: folded ? "data-parallel rank" : "rank of the host" }, tickformat: "d", range: [-0.5, columns - 0.5], nticks: Math.min(columns + 1, 12) }, yaxis: { automargin: true, autorange: "reversed", type: "category" }, tall: rows.length } };
}
function slowest(state) {
  const { ranks } = state.run;
  const slow = slowdowns(state).map((one, i) => ({ one, i })).filter(({ one, i }) => one !== null && state.shown(ranks.rank[i], ranks.host[i]));
  return slow.sort((a, b) => b.one - a.one).slice(0, 5).map(({ one, i }) => `rank ${ranks.rank[i]} (${ranks.hosts[ranks.host[i]]}) ${one.toFixed(2)}×`).join(", ");
}

function links({ state }) {
  const { ranks, links: matrices } = state.run, view = state.view.links;
  if (["rank", "host", "probe"].includes(view) && matrices[view] && matrices[view].labels.length) {
    const { labels, values } = matrices[view], scale = view === "probe" ? 1000 : 1 / 2 ** 20, named = labels.map(plain);
    return { traces: [{ type: "heatmap", x: named, y: named, z: values.map((row) => row.map((one) => (one === null ? null : one * scale))), colorscale: FLOW_SCALE[state.theme],
      hoverongaps: false, colorbar: bar(view === "probe" ? "ms" : "MiB/step"),
      hovertemplate: view === "probe" ? "%{y} → %{x}: %{z:.3g} ms<extra></extra>" : "%{y} → %{x}: %{z:.4g} MiB/step<extra></extra>" }],
      layout: { xaxis: { title: { text: "to" }, type: "category", automargin: true }, yaxis: { title: { text: "from" }, type: "category", autorange: "reversed", automargin: true }, tall: labels.length } };
  }
  const kinds = Object.keys(ranks.sent || {}), from = view === "waits" ? ranks.waits : ranks.sent;
  if (!kinds.length || !ranks.rank.length) return { traces: [] };
  const keep = ranks.rank.map((rank, i) => state.shown(rank, ranks.host[i]));
  const x = pick(ranks.rank, keep), scale = view === "waits" ? 1 : 1 / 2 ** 20;
  return { traces: Object.entries(from).map(([kind, values], i) => ({ x, y: pick(values, keep).map((one) => (one === null ? null : one * scale)), name: plain(kind),
    ...(x.length <= 64 ? { type: "bar", marker: { color: state.colors[i % 8] } } : { mode: "lines", stackgroup: "one", line: { width: 0.3, color: state.colors[i % 8], shape: "hvh" } }),
    hovertemplate: `rank %{x}: %{y:.4g}<extra>${plain(kind)}</extra>` })),
    layout: { barmode: "stack", xaxis: { title: { text: "rank" }, tickformat: "d" }, yaxis: { title: { text: view === "waits" ? "seconds per step" : "MiB per step" } }, showlegend: true } };
}

// One line per rank; for many ranks minimum, median and maximum.
function ofRanks(state, name, scale) {
  const { ranks } = state.run, keep = shownBins(state), x = pick(ranks.bins, keep);
  const chosen = ranks.rank.map((rank, i) => i).filter((i) => state.shown(ranks.rank[i], ranks.host[i]));
  const rows = chosen.map((i) => pick(ranks.values[name][i], keep).map((one) => (one === null ? null : one * scale)));
  if (!rows.length || !x.length) return [];
  const line = (y, label, i, width = 1.6) => ({ x, y, name: label, mode: x.length > 1 ? "lines" : "markers", line: { color: state.colors[i % 8], width }, marker: { color: state.colors[i % 8] },
    hovertemplate: "step %{x}: %{y:.4g}<extra>" + label + "</extra>" });
  if (rows.length <= FEW) return rows.map((row, at) => line(row, `rank ${ranks.rank[chosen[at]]}`, at));
  const column = (at) => rows.map((row) => row[at]);
  return [["most of a rank", 1, 1], ["median rank", 0.5, 0], ["least of a rank", 0, 2]].map(([label, share, color]) => line(x.map((_, at) => quantile(column(at), share)), label, color));
}
function memory({ runs, state }) {
  if (runs.length > 1) return { traces: overlay(runs, state, "memory_bytes", { scale: 1 / 2 ** 30 }), layout: { xaxis: steps, showlegend: true, yaxis: { title: { text: "GiB, rank 0" }, rangemode: "tozero" } } };
  let traces = state.run.ranks.rank.length ? ofRanks(state, "memory_bytes", 1 / 2 ** 30) : [];
  const single = !state.run.ranks.rank.length;
  if (single) traces = overlay(runs, state, "memory_bytes", { scale: 1 / 2 ** 30 });
  return { traces, layout: { xaxis: steps, yaxis: { title: { text: single ? "GiB, rank 0" : "GiB" }, rangemode: "tozero" }, showlegend: traces.length > 1 } };
}
function tiers({ runs, state }) {
  const view = state.view.tiers || "time";
  const tier = (prefix, name, of) => ({ time: [["update_s", name], ["waited_s", `waits in the ${name}`], ["busy_s", `transfers of ${of}`]],
    moved: [["read", `${of} read`], ["written", `${of} written`]], stored: [["stored", `${of} stored`], ["peak", `most ${of} in memory`]] }[view]).map(([key, label]) => [`${prefix}_${key}`, label]);
  const weights = { time: [], moved: [["weights_read", "weights copied to the GPU"], ["weights_written", "gradients copied to the host"]], stored: [["weights_stored", "weights on the host"]] }[view];
  const lines = [...tier("offload", "update", "state"), ...tier("activations", "passes", "activations"), ...weights];
  const scale = view === "time" ? 1 : 1 / 2 ** 20, traces = [];
  lines.forEach(([key, label], number) => overlay(runs, state, key, { scale, band: false }).forEach((one) =>
    traces.push({ ...one, name: runs.length > 1 ? `${one.name}: ${label}` : label, legendgroup: undefined, line: { ...one.line, color: state.colors[number] }, marker: { color: state.colors[number] }, showlegend: true })));
  return { traces, layout: { xaxis: steps, yaxis: { title: { text: view === "time" ? "seconds" : "MiB" }, rangemode: "tozero" }, showlegend: true } };
}
function lengths({ runs, state }) {
  const traces = [];
  [["balanced_most", "slowest rank"], ["balanced_least", "idlest rank"], ["static_most", "slowest rank, static"], ["static_least", "idlest rank, static"]].forEach(([key, label], number) =>
    overlay(runs, state, `lengths_${key}`, { band: false }).forEach((one) =>
      traces.push({ ...one, name: runs.length > 1 ? `${one.name}: ${label}` : label, legendgroup: undefined, line: { ...one.line, color: state.colors[number] }, marker: { color: state.colors[number] }, showlegend: true })));
  return { traces, layout: { xaxis: steps, yaxis: { title: { text: "work / mean" }, rangemode: "tozero" }, showlegend: true } };
}
function stalls({ runs, state }) {
  if (runs.length === 1 && state.run.ranks.rank.length) {
    const traces = ofRanks(state, "checkpoint", 1);
    // Sampled rank lines may not include any save.
    if (traces.some((one) => one.y.some((value) => value > 0))) {
      return { traces, layout: { xaxis: steps, yaxis: { title: { text: "seconds, longest" }, rangemode: "tozero" }, showlegend: true } };
    }
  }
  const traces = [];
  runs.forEach((run, number) => {
    const curves = run.curves, values = curves.high.checkpoint || curves.values.checkpoint;
    if (!values || !finite(values).length) return;
    const keep = curves.step.map(within(state));
    traces.push({ type: "bar", x: pick(curves.step, keep), y: pick(values, keep), name: plain(run.name), marker: { color: state.colors[number], line: { width: 1, color: state.colors[number] } }, hovertemplate: "step %{x}: %{y:.4g} s<extra></extra>" });
  });
  return { traces, layout: { xaxis: steps, yaxis: { title: { text: "seconds, longest, rank 0" }, rangemode: "tozero" }, showlegend: runs.length > 1 } };
}

function timeline({ runs, state }) {
  const traces = [], scale = most(runs.map((run) => run.timeline.wall_s)) > 7200 ? 3600 : most(runs.map((run) => run.timeline.wall_s)) > 180 ? 60 : 1;
  const unit = { 1: "seconds", 60: "minutes", 3600: "hours" }[scale];
  const bars = { starting: [state.colors[1], []], running: [state.colors[0], []] };
  runs.forEach((run) => run.timeline.attempts.forEach((one) => {
    const row = `${runs.length > 1 ? plain(run.name) + ": " : ""}start ${one.number}`, origin = `from ${plain(one.source)}, ${plain(one.mapping)}, step ${one.first_step}`;
    if (one.begin !== null && one.ready !== null) bars.starting[1].push([row, one.begin, one.ready, `getting ready ${origin}`]);
    if (one.ready !== null && one.end !== null) bars.running[1].push([row, one.ready, one.end, origin]);
  }));
  Object.entries(bars).forEach(([name, [color, rows]]) => rows.length && traces.push({ type: "bar", orientation: "h", name, y: rows.map((row) => row[0]), base: rows.map((row) => row[1] / scale),
    x: rows.map((row) => (row[2] - row[1]) / scale), text: rows.map((row) => row[3]), textposition: "none", marker: { color }, hovertemplate: `%{y}, ${name}: %{text}<extra></extra>` }));
  const events = runs.flatMap((run) => [["faults", run.timeline.faults], ["on purpose", run.timeline.injected]].flatMap(([row, list]) =>
    list.map((one) => ({ ...one, row: (runs.length > 1 ? `${plain(run.name)}: ` : "") + row, made: row !== "faults" }))))
    .filter((one) => one.at !== null && (one.ranks.length === 0 || one.ranks.some((rank) => state.inRankFilter(rank))) && within(state)(one.step));
  const shapes = ["x", "diamond", "triangle-up", "star", "square", "cross", "triangle-down", "circle"];
  [...new Set(events.map((one) => one.kind))].forEach((kind, i) => [false, true].forEach((made) => {
    const rows = events.filter((one) => one.kind === kind && one.made === made);
    if (rows.length) traces.push({ type: "scatter", mode: "markers", name: plain(kind) + (made ? " (on purpose)" : ""), y: rows.map((one) => one.row), x: rows.map((one) => one.at / scale),
      marker: { symbol: shapes[i % 8] + (made ? "-open" : ""), size: 12, color: state.colors[(i + 2) % 8], line: { width: 1.5, color: made ? state.colors[(i + 2) % 8] : state.ink } },
      text: rows.map((one) => `step ${one.step}, rank ${one.ranks.join(", ")}: ${plain(one.kind)}${one.action ? ", " + plain(one.action) : ""}${Number.isFinite(one.noticed_s) ? `, noticed after ${one.noticed_s.toFixed(2)} s` : ""}<br>${plain(one.what)}`),
      hovertemplate: "%{text}<extra></extra>" });
  }));
  return { traces, layout: { barmode: "overlay", xaxis: { title: { text: `${unit} since the start` }, rangemode: "tozero" }, yaxis: { type: "category", automargin: true, autorange: "reversed" }, showlegend: true, tall: 4 + most(runs.map((run) => run.timeline.attempts.length)) } };
}

// Mark the starts of the shown run after the first in a chart over steps, with the mapping where it changed.
const LABELS = 12;
const marked = (chart) => (input) => {
  const { traces, layout = {} } = chart(input), { state } = input;
  if (!traces.length || layout.xaxis !== steps) return { traces, layout };
  const begun = state.run.timeline.attempts.filter((one) => one.number > 0 && within(state)(one.first_step));
  const labelled = begun.filter((one) => one.remapped || begun.length <= LABELS);
  const shapes = begun.map(({ first_step: step, remapped }) => ({ type: "line", x0: step - 0.5, x1: step - 0.5, yref: "paper", y0: 0, y1: 1, line: { color: state.colors[6], width: remapped ? 2 : 1, dash: remapped ? "dash" : "dot" } }));
  const annotations = labelled.map((one) => ({ x: one.first_step - 0.5, yref: "paper", y: 1, xanchor: "left", yanchor: "top", textangle: 90, showarrow: false, font: { size: 10 },
    text: plain(`start ${one.number}${one.remapped ? `: ${one.mapping}` : ""}`) }));
  return { traces, layout: { ...layout, shapes, annotations } };
};

const CHARTS = { loss, gradient, throughput, mfu, split, experts, owners, health, stragglers, links, memory, tiers, lengths, stalls, timeline };
for (const name of Object.keys(CHARTS)) CHARTS[name] = marked(CHARTS[name]);

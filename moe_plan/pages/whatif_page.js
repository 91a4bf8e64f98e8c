"use strict";
// Draw the panels of the what-if page.

const SLOW_SCALE = { light: [[0, "#d9e4ee"], [0.35, "#fdd49e"], [0.7, "#e6550d"], [1, "#7f0000"]],
                     dark: [[0, "#2c3b4a"], [0.35, "#7a4a12"], [0.7, "#ff8c2e"], [1, "#fff3c4"]] };
const FEW = { rows: 16, columns: 12 };
const rows = (names) => ({ type: "category", categoryorder: "array", categoryarray: names, autorange: "reversed", automargin: true, dtick: Math.ceil(names.length / 32), fixedrange: names.length < 3 });

function workers({ data }) {
  const map = data.heats[Number(state.view.workers) || 0], few = map.rows.length <= FEW.rows && map.columns.length <= FEW.columns;
  const shown = few ? { text: map.z.map((row) => row.map((one) => (one === null ? "" : one.toFixed(3)))), texttemplate: "%{text}" } : {};
  return { traces: [{ type: "heatmap", x: map.columns, y: map.rows, z: map.z, zmin: 1, zmax: Math.max(1.5, most(finite(map.z.flat()))), colorscale: SLOW_SCALE[state.theme],
    colorbar: { title: { text: "S", side: "right" }, thickness: 12, outlinewidth: 0 }, xgap: 1, ygap: 1, hoverongaps: false, hovertemplate: "%{y}, %{x}: %{z:.3f}<extra></extra>", ...shown }],
    layout: { tall: 6 * map.rows.length, xaxis: { type: "category", dtick: Math.ceil(map.columns.length / 32) }, yaxis: rows(map.rows) } };
}

// S is 1 without stragglers: bars begin there.
function lost(names, values, number) {
  const labels = names.map(plain), color = state.colors[number];
  return { traces: values.length ? [{ type: "bar", orientation: "h", y: labels, x: values, marker: { color }, hovertemplate: "%{y}: %{x:.3f}<extra></extra>" }] : [],
    layout: { tall: 4 * labels.length, xaxis: { title: { text: "S" }, range: [1, Math.max(1.05, 1 + 1.05 * (most(values) - 1))] }, yaxis: rows(labels) } };
}
const operations = ({ data }) => lost(data.operations.map((one) => one[0]), data.operations.map((one) => one[1]), 0);
function places({ data }) {
  const chosen = data.places[Number(state.view.places) || 0];
  return lost(chosen.labels, chosen.values, 1);
}

function curves(steps, lines, title) {
  const mode = steps.length > 1 ? "lines" : "markers";
  const traces = lines.filter(([, y]) => finite(y).length).map(([name, y, number]) => ({ x: steps, y, name, mode, line: { color: state.colors[number], width: 1.6 },
    marker: { color: state.colors[number] }, hovertemplate: `${name}, step %{x}: %{y:.4g}<extra></extra>` }));
  return { traces, layout: { showlegend: true, xaxis: { title: { text: "step" } }, yaxis: { title: { text: title } } } };
}
const slowdown = ({ data }) => curves(data.steps, [["S", data.slowdown, 1], ["uneven routing alone", data.routing, 2]], "S");
const seconds = ({ data }) => curves(data.steps, [["measured", data.measured_ms, 0], ["replayed", data.replayed_ms, 1], ["with even routing", data.even_ms, 2], ["ideal", data.ideal_ms, 3]], "milliseconds");

const CHARTS = { workers, operations, places, slowdown, seconds };

openPage(CHARTS);

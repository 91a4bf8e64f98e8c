"use strict";
// Draw the panels of the plan page.

const KINDS = { forward: 0, backward: 1, input: 1, weight: 3, "forward and backward": 6, "gradients and weights": 2, optimizer: 4 };
const SCALE = { light: [[0, "#eef3fb"], [0.5, "#5b9bd5"], [1, "#08306b"]], dark: [[0, "#1c2633"], [0.5, "#3f7fbf"], [1, "#d7ecff"]] };
const legend = { orientation: "h", y: 1.01, yanchor: "bottom", x: 0, traceorder: "normal" };
const color = (number) => state.colors[number % state.colors.length];
const labels = (count) => Array.from({ length: count }, (_, i) => `position ${i}`);

// Rows from top to bottom, with labels if there is room.
function rows(names) {
  return { type: "category", categoryorder: "array", categoryarray: names, autorange: "reversed", automargin: true, dtick: Math.ceil(names.length / 32), fixedrange: names.length < 3 };
}

function step({ data }) {
  const { positions, bars } = data.step, names = labels(positions);
  const traces = Object.entries(bars).map(([name, [rank, begin, seconds, micro, stage, passes]]) => ({
    // Gradient sums can overlap with passes, so they are drawn on the lower half.
    type: "bar", orientation: "h", name, y: rank.map((one) => names[one]), base: begin, x: seconds,
    width: name === "gradients and weights" ? 0.4 : 0.92, offset: name === "gradients and weights" ? 0.06 : -0.46,
    marker: { color: color(KINDS[name]), line: { width: 0 } },
    customdata: rank.map((_, i) => [micro[i] >= 0 ? `micro-batch ${micro[i]}, stage ${stage[i]}` : passes[i] ? `${passes[i]} passes, alternating` : "", begin[i]]),
    hovertemplate: `%{y}: ${name} %{customdata[0]}<br>%{x:.4g} s from %{customdata[1]:.4g} s<extra></extra>` }));
  return { traces, layout: { tall: 2 * positions + 20, barmode: "overlay", showlegend: true, legend, xaxis: { title: { text: "seconds" } }, yaxis: rows(names) } };
}

function operators({ data }) {
  const one = data.operators[Number(state.view.operators) || 0];
  if (!one || !one.rows.length) return { traces: [] };
  const [stream, name, begin, ms, back] = one.rows;
  const traces = ["forward", "backward"].map((direction, number) => {
    const indices = stream.map((_, i) => i).filter((i) => back[i] === number);
    return { type: "bar", orientation: "h", name: direction, y: indices.map((i) => one.streams[stream[i]]), base: indices.map((i) => begin[i]), x: indices.map((i) => ms[i]),
      customdata: indices.map((i) => [plain(one.names[name[i]]), begin[i]]), marker: { color: color(number), line: { width: 0.5, color: state.theme === "dark" ? "#171c23" : "#f7f8fa" } }, width: 0.8, offset: -0.4,
      hovertemplate: `%{customdata[0]}, ${direction}: %{x:.4g} ms from %{customdata[1]:.4g}<extra></extra>` };
  }).filter((trace) => trace.x.length);
  return { traces, layout: { tall: 6 * one.streams.length, barmode: "overlay", showlegend: true, legend, xaxis: { title: { text: "milliseconds; the backward pass is drawn directly after the forward pass" } }, yaxis: rows(one.streams) } };
}

function memory({ data }) {
  const { terms, available } = data.memory, count = Object.values(terms)[0].length, x = Array.from({ length: count }, (_, i) => i);
  const traces = Object.entries(terms).filter(([, y]) => most(y) > 0).map(([name, y], i) => ({ type: "bar", name, x, y, marker: { color: color(i) },
    hovertemplate: `position %{x}: ${name} %{y:.4g} GiB<extra></extra>` }));
  traces.push({ type: "scatter", mode: "lines", name: "available", x: [-0.5, count - 0.5], y: [available, available], line: { color: state.ink, dash: "dash", width: 1.5 },
    hovertemplate: "available %{y:.4g} GiB<extra></extra>" });
  return { traces, layout: { barmode: "stack", bargap: 0.15, showlegend: true, legend, xaxis: { title: { text: "pipeline position" }, dtick: Math.ceil(count / 16) }, yaxis: { title: { text: "GiB" }, rangemode: "tozero" } } };
}

function time({ data }) {
  const { labels: mappings, causes } = data.time, names = mappings.map((_, i) => `${i + 1}`);
  const traces = Object.entries(causes).map(([name, x], i) => ({ type: "bar", orientation: "h", name, y: names, x, marker: { color: color(i) },
    customdata: mappings.map(plain), hovertemplate: `%{customdata}<br>${plain(name)}: %{x:.4g} s<extra></extra>` }));
  return { traces, layout: { tall: 5 * names.length + 10, barmode: "stack", bargap: 0.3, showlegend: true, legend, xaxis: { title: { text: "seconds" } }, yaxis: rows(names) } };
}

function links({ data }) {
  const { names, links: sent } = data.links, linkNames = { inside: "inside the host", between: "between hosts", across: "between pods" };
  const traces = Object.entries(sent).filter(([, x]) => most(x) > 0).map(([link, x]) => ({ type: "bar", orientation: "h", name: linkNames[link], y: names.map(plain), x, marker: { color: color(Object.keys(linkNames).indexOf(link)) },
    hovertemplate: `%{y}, ${linkNames[link]}: %{x:.4g} GB<extra></extra>` }));
  return { traces, layout: { tall: 4 * names.length + 10, barmode: "stack", showlegend: true, legend, xaxis: { title: { text: "GB that a rank sends in a step" } }, yaxis: { automargin: true } } };
}

function ranks({ data }) {
  const shares = data.ranks, view = state.view.ranks;
  if (!shares) return { traces: [] };
  const z = shares[view].map((row) => row.map((share) => 100 * share)), names = labels(z.length);
  const x = z[0].map((_, i) => i * shares.joined);
  return { traces: [{ type: "heatmap", x, y: names, z, colorscale: SCALE[state.theme], colorbar: { title: { text: "%", side: "right" }, thickness: 12, outlinewidth: 0 },
    hovertemplate: `%{y}, its rank %{x}${shares.joined > 1 ? " and those next to it" : ""}: %{z:.4g}% of the step<extra></extra>` }],
    layout: { tall: 2 * names.length, xaxis: { title: { text: shares.joined > 1 ? `ranks of a position, ${shares.joined} together` : "ranks of a position" } }, yaxis: rows(names) } };
}

const CHARTS = { step, operators, memory, time, links, ranks };

openPage(CHARTS);

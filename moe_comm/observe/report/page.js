"use strict";
// Filters, colours, tables: what the reader can do. Charts are drawn again when any of it changes.

const DATA = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const CONFIG = { responsive: true, displayModeBar: false };
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const state = { view: {}, slide: 0, slideText: "" };

function option(select, value, label) {
  const one = document.createElement("option");
  one.value = value;
  one.textContent = label;
  select.append(one);
}

// "0-7, 12" as a test of ranks; null where it makes no sense.
function ranksOf(text) {
  const parts = text.split(/[\s,]+/).filter(Boolean).map((part) => part.match(/^(\d{1,9})(?:-(\d{1,9}))?$/));
  if (parts.some((part) => !part)) return null;
  const ranges = parts.map((part) => [Number(part[1]), Number(part[2] || part[1])]);
  return ranges.length ? (rank) => ranges.some(([first, last]) => rank >= first && rank <= last) : () => true;
}

function readFilters() {
  const run = DATA.runs[Number(at("run").value) || 0], asked = ranksOf(at("ranks").value), host = at("host").value;
  at("ranks").setAttribute("aria-invalid", String(asked === null));
  const bound = (id, otherwise) => (at(id).value === "" || !Number.isFinite(at(id).valueAsNumber) ? otherwise : at(id).valueAsNumber);
  state.run = run;
  state.from = bound("from", -Infinity);
  state.to = bound("to", Infinity);
  state.asked = asked || (() => true);
  state.shown = (rank, of) => state.asked(rank) && (host === "all" || Number(host) === of);
  state.layer = at("layer").value === "all" ? "all" : Number(at("layer").value);
  const chosen = at("theme").value;
  state.theme = chosen === "system" ? (dark.matches ? "dark" : "light") : chosen;
  state.colors = PALETTE[state.theme];
  state.ink = state.theme === "dark" ? "#e6e9ee" : "#1b1f24";
  document.documentElement.dataset.theme = state.theme;
  document.querySelectorAll("[data-view]").forEach((select) => { state.view[select.dataset.view] = select.value; });
  if (asked === null) return "ranks: write numbers and ranges, such as 0-7, 12";
  if (state.from > state.to) return "no steps: the first is after the last";
  const count = run.ranks.rank.filter((rank, i) => state.shown(rank, run.ranks.host[i])).length;
  return run.ranks.rank.length ? `${count} of ${run.ranks.rank.length} rank(s) shown` : "";
}

function fillForRun() {
  const run = DATA.runs[Number(at("run").value) || 0];
  for (const [id, names] of [["host", run.ranks.hosts || []], ["layer", run.health.layers.length ? run.health.layers : run.loads.layers]]) {
    at(id).replaceChildren();
    option(at(id), "all", "all");
    names.forEach((name, i) => option(at(id), String(i), name));
  }
  const views = at("view-links");
  [...views.options].forEach((one) => { one.disabled = ["rank", "host", "probe"].includes(one.value) && !run.links[one.value].labels.length; });
  if (views.selectedOptions[0].disabled) views.value = "kind";
  const limit = Math.max(shown(run) - 1, 0);
  at("slide").max = String(limit);
  at("slide").value = String(limit);
}
const shown = (run) => run.loads.step.length;

function draw(only) {
  at("said").textContent = readFilters();
  const inside = shownLoads(state);
  at("slide").max = String(Math.max(inside.length - 1, 0));
  at("slide").disabled = state.layer !== "all" || inside.length < 2;
  state.slide = Number(at("slide").value);
  for (const [name, chart] of Object.entries(CHARTS)) if (!only || only === name) drawOne(name, chart);
  at("slide-step").textContent = state.slideText;
  at("slide").setAttribute("aria-valuetext", state.slideText);
  at("slowest").textContent = state.run.ranks.rank.length > 1 ? `Slowest: ${slowest(state)}` : "";
}

function drawOne(name, chart) {
  const place = at(`chart-${name}`), empty = at(`empty-${name}`);
  const { traces, layout = {} } = chart({ runs: DATA.runs, state });
  empty.hidden = traces.length > 0;
  place.hidden = !traces.length;
  if (!traces.length) { Plotly.purge(place); place.traces = []; describe(name); return; }
  const { tall = 0, ...own } = layout, grid = state.theme === "dark" ? "#38414c" : "#dfe3e8";
  const axis = { gridcolor: grid, zerolinecolor: grid, linecolor: grid };
  place.traces = traces;
  Plotly.react(place, traces, { height: Math.min(Math.max(300, 120 + 5 * tall), 640), margin: { l: 62, r: 14, t: 12, b: 46 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: state.ink, size: 12 }, colorway: state.colors, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, hoverlabel: { align: "left" }, showlegend: false,
    ...own, xaxis: { ...axis, ...own.xaxis }, yaxis: { ...axis, ...own.yaxis } }, CONFIG);
  describe(name);
}

// For those who do not see the chart: what it has, in its label and as a table.
function describe(name) {
  const place = at(`chart-${name}`), traces = place.traces, title = at(`title-${name}`).textContent;
  const numbers = traces.flatMap((one) => finite((one.z ? one.z.flat() : one.type === "bar" && one.orientation === "h" ? one.x : one.y) || [])).filter(Number.isFinite);
  const range = numbers.length ? `, from ${least(numbers).toPrecision(4)} to ${most(numbers).toPrecision(4)}` : "";
  place.setAttribute("aria-label", `${title}: ${traces.filter((one) => one.name !== undefined || one.z).length} series${range}`);
  const details = at(`table-${name}`);
  if (details.open) fillTable(details, traces);
}

function fillTable(details, traces) {
  const rows = [];
  const MOST = 200;
  for (const one of traces) {
    if (one.hoverinfo === "skip" || rows.length >= MOST) continue;
    if (one.z) one.z.forEach((row, i) => rows.length < MOST && rows.push([String(one.y[i]), row.map((cell) => (cell === null ? "" : cell.toPrecision(3))).slice(0, 64).join(" ")]));
    else (one.x || []).forEach((x, i) => rows.length < MOST && rows.push([`${one.name || ""} ${one.orientation === "h" ? one.y[i] : typeof x === "number" ? Number(x.toPrecision(6)) : x}`, String(one.orientation === "h" ? x : one.y[i])]));
  }
  const table = document.createElement("table");
  for (const cells of rows) {
    const row = table.insertRow();
    cells.forEach((cell) => { row.insertCell().textContent = new DOMParser().parseFromString(cell, "text/html").documentElement.textContent; });
  }
  details.querySelector(".scroll").replaceChildren(table);
}

function shownNumber(value, unit) {
  if (value === null || value === undefined) return "–";
  const scaled = unit === "%" ? value * 100 : value;
  const said = Number.isInteger(scaled) ? scaled.toLocaleString("en") : Number(scaled.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 6 });
  return `${said}${unit === "%" ? "%" : unit ? " " + unit : ""}`;
}

function tiles() {
  const list = at("tiles");
  for (const one of DATA.runs[0].summary) {
    const tile = document.createElement("div"), name = document.createElement("dt"), value = document.createElement("dd");
    name.textContent = one.name;
    value.textContent = shownNumber(one.value, one.unit);
    tile.append(name, value);
    list.append(tile);
  }
}

function differences() {
  const table = at("differences"), [first, second] = DATA.runs;
  const head = table.createTHead().insertRow();
  for (const name of ["", first.name, second.name, "difference"]) {
    const cell = document.createElement("th");
    cell.scope = "col";
    cell.textContent = name;
    head.append(cell);
  }
  const body = table.createTBody();
  first.summary.forEach((one, i) => {
    const other = second.summary[i], row = body.insertRow();
    const values = [one.name, shownNumber(one.value, one.unit), shownNumber(other.value, other.unit)];
    values.forEach((value) => { row.insertCell().textContent = value; });
    const cell = row.insertCell(), change = one.value === null || other.value === null ? null : other.value - one.value;
    if (change === null) { cell.textContent = "–"; return; }
    const share = one.value ? 100 * change / Math.abs(one.value) : NaN, sign = change < 0 ? "−" : "+";
    const relative = Math.abs(share) < 1000 ? ` (${sign}${Math.abs(share).toFixed(1)}%)` : "";
    // Less than a percent is noise in most of these.
    const better = Math.abs(share) < 1 ? 0 : Math.sign(change) * one.better;
    const word = better > 0 ? ", better" : better < 0 ? ", worse" : "";
    cell.textContent = change === 0 ? "same" : `${sign}${shownNumber(Math.abs(change), one.unit).replace("%", " points")}${relative}${word}`;
    cell.className = better > 0 ? "better" : better < 0 ? "worse" : "";
  });
}

function start() {
  DATA.runs.forEach((run, i) => option(at("run"), String(i), run.name));
  at("run-label").hidden = DATA.runs.length < 2;
  at("ranks").closest("form").addEventListener("submit", (event) => event.preventDefault());
  try { at("theme").value = localStorage.getItem("moe-comm theme") || "system"; } catch { /* a page without storage */ }
  if (!at("theme").value) at("theme").value = "system";
  fillForRun();
  if (DATA.runs.length > 1) differences(); else tiles();
  document.querySelectorAll("[data-view]").forEach((select) => select.addEventListener("change", () => draw(select.dataset.view)));
  at("run").addEventListener("change", () => { fillForRun(); draw(); });
  for (const id of ["from", "to", "host", "ranks", "layer"]) at(id).addEventListener("change", () => draw());
  at("slide").addEventListener("input", () => draw("experts"));
  at("theme").addEventListener("change", () => {
    try { localStorage.setItem("moe-comm theme", at("theme").value); } catch { /* as above */ }
    draw();
  });
  dark.addEventListener("change", () => draw());
  at("filters").addEventListener("reset", () => setTimeout(() => { at("run").value = "0"; fillForRun(); draw(); }));
  document.querySelectorAll("details[id^=table-]").forEach((details) => details.addEventListener("toggle", () => {
    if (details.open) fillTable(details, at(details.id.replace("table", "chart")).traces || []);
  }));
  draw();
  document.documentElement.dataset.ready = "yes";
}
start();

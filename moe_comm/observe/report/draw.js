"use strict";
// Shared code of chart pages: data, colours, charts, labels and tables.

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

const PALETTE = { light: ["#0072b2", "#d55e00", "#009e73", "#a6559b", "#9a7400", "#3a86b8", "#555555", "#c2410c"],
                  dark: ["#56b4e9", "#ff9e4a", "#3ecf9e", "#e39ad0", "#f0e442", "#9ad1f5", "#bbbbbb", "#ff7b6b"] };
// Plotly interprets some HTML in texts; escape text from files.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const finite = (values) => values.filter((one) => one !== null && one !== undefined);
const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);

// The selected colours and views.
function readLooks() {
  const chosen = at("theme").value;
  state.theme = chosen === "system" ? (dark.matches ? "dark" : "light") : chosen;
  state.colors = PALETTE[state.theme];
  state.ink = state.theme === "dark" ? "#e6e9ee" : "#1b1f24";
  document.documentElement.dataset.theme = state.theme;
  document.querySelectorAll("[data-view]").forEach((select) => { state.view[select.dataset.view] = select.value; });
}

function recallTheme() {
  try { at("theme").value = localStorage.getItem("moe-comm theme") || "system"; } catch { /* a page without storage */ }
  if (!at("theme").value) at("theme").value = "system";
}

function onTheme(redraw) {
  at("theme").addEventListener("change", () => {
    try { localStorage.setItem("moe-comm theme", at("theme").value); } catch { /* as above */ }
    redraw();
  });
  dark.addEventListener("change", redraw);
}

function drawOne(name, chart) {
  const place = at(`chart-${name}`), empty = at(`empty-${name}`);
  const { traces, layout = {} } = chart({ runs: DATA.runs, data: DATA, state });
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

// The content of a chart as a label and a table, for accessibility.
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

function fillOpened() {
  document.querySelectorAll("details[id^=table-]").forEach((details) => details.addEventListener("toggle", () => {
    if (details.open) fillTable(details, at(details.id.replace("table", "chart")).traces || []);
  }));
}

function shownNumber(value, unit) {
  if (value === null || value === undefined) return "–";
  const scaled = unit === "%" ? value * 100 : value;
  const digits = Number.isInteger(scaled) ? scaled.toLocaleString("en") : Number(scaled.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 6 });
  return `${digits}${unit === "%" ? "%" : unit ? " " + unit : ""}`;
}

function tiles(summary) {
  const list = at("tiles");
  for (const one of summary) {
    const tile = document.createElement("div"), name = document.createElement("dt"), value = document.createElement("dd");
    name.textContent = one.name;
    value.textContent = shownNumber(one.value, one.unit);
    tile.append(name, value);
    list.append(tile);
  }
}

/* Start a page without filters: fill its tiles, and draw those of ``charts`` that it has panels for. */
function openPage(charts) {
  const draw = (only) => {
    readLooks();
    for (const [name, chart] of Object.entries(charts)) if (at(`chart-${name}`) && (!only || only === name)) drawOne(name, chart);
  };
  at("looks").addEventListener("submit", (event) => event.preventDefault());
  recallTheme();
  tiles(DATA.summary);
  document.querySelectorAll("[data-view]").forEach((select) => select.addEventListener("change", () => draw(select.dataset.view)));
  onTheme(() => draw());
  fillOpened();
  draw();
  document.documentElement.dataset.ready = "yes";
}

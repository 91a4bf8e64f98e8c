"use strict";
// Filters, colours and tables. Charts are redrawn after each change.

// Parse "0-7, 12" to a predicate on ranks; null if invalid.
function ranksOf(text) {
  const parts = text.split(/[\s,]+/).filter(Boolean).map((part) => part.match(/^(\d{1,9})(?:-(\d{1,9}))?$/));
  if (parts.some((part) => !part)) return null;
  const ranges = parts.map((part) => [Number(part[1]), Number(part[2] || part[1])]);
  return ranges.length ? (rank) => ranges.some(([first, last]) => rank >= first && rank <= last) : () => true;
}

function readFilters() {
  const run = DATA.runs[Number(at("run").value) || 0], inRanks = ranksOf(at("ranks").value), host = at("host").value;
  at("ranks").setAttribute("aria-invalid", String(inRanks === null));
  const bound = (id, otherwise) => (at(id).value === "" || !Number.isFinite(at(id).valueAsNumber) ? otherwise : at(id).valueAsNumber);
  state.run = run;
  state.from = bound("from", -Infinity);
  state.to = bound("to", Infinity);
  state.inRankFilter = inRanks || (() => true);
  state.shown = (rank, of) => state.inRankFilter(rank) && (host === "all" || Number(host) === of);
  state.layer = at("layer").value === "all" ? "all" : Number(at("layer").value);
  readLooks();
  if (inRanks === null) return "ranks: write numbers and ranges, such as 0-7, 12";
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
  at("filter-status").textContent = readFilters();
  const inside = shownLoads(state);
  at("slide").max = String(Math.max(inside.length - 1, 0));
  at("slide").disabled = state.layer !== "all" || inside.length < 2;
  state.slide = Number(at("slide").value);
  for (const [name, chart] of Object.entries(CHARTS)) if (!only || only === name) drawOne(name, chart);
  at("slide-step").textContent = state.slideText;
  at("slide").setAttribute("aria-valuetext", state.slideText);
  at("slowest").textContent = state.run.ranks.rank.length > 1 ? `Slowest: ${slowest(state)}` : "";
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
    // Differences below one percent are noise for most values.
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
  recallTheme();
  fillForRun();
  if (DATA.runs.length > 1) differences(); else tiles(DATA.runs[0].summary);
  document.querySelectorAll("[data-view]").forEach((select) => select.addEventListener("change", () => draw(select.dataset.view)));
  at("run").addEventListener("change", () => { fillForRun(); draw(); });
  for (const id of ["from", "to", "host", "ranks", "layer"]) at(id).addEventListener("change", () => draw());
  at("slide").addEventListener("input", () => draw("experts"));
  onTheme(() => draw());
  at("filters").addEventListener("reset", () => setTimeout(() => { at("run").value = "0"; fillForRun(); draw(); }));
  fillOpened();
  draw();
  document.documentElement.dataset.ready = "yes";
}
start();

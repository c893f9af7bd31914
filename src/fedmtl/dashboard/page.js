// The page: which view the address names, the colours, the line to the server, and the list of all runs.

import { el, number, sparkline } from "./charts.js";
import { Table } from "./tables.js";
import { openRun } from "./run.js";
import { openCompare, openStudy } from "./compare.js";

const main = document.getElementById("main");
const line = document.getElementById("line");
const THEMES = [["", "as the system"], ["dark", "dark"], ["light", "light"]];
export const MOST_COMPARED = 8;

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (value < 1000) return `${value < 10 && unit !== "B" ? value.toFixed(1) : Math.round(value)} ${unit}`;
    value /= 1000;
  }
  return `${value.toFixed(1)} TB`;
}

export function seconds(value) {
  if (!value) return "–";
  if (value < 60) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}

const STATES = { waiting: "waiting for sites", killed: "killed", empty: "not begun" };
const SHOWN = new Set(["running", "training", "here", "done", "finished", "failed", "refused", "killed", "gone", "waiting", "interrupted", "late", "awaited"]);
// Only a known word becomes a class: a state may be anything that a file says.
export function badge(status) { return el("span", { class: `badge ${SHOWN.has(status) ? status : ""}` }, STATES[status] ?? status); }

export function link(view, ids, words) {
  const query = new URLSearchParams();
  for (const id of ids) query.append("id", id);
  return el("a", { href: `#/${view}?${query}` }, words);
}

function say(words, isLost = false) {
  if (line.textContent !== words) line.textContent = words;
  line.classList.toggle("lost", isLost);
}

/** Follow server-sent events until `close`; when the line breaks the browser tries again by itself. */
export function follow(address, name, take) {
  const source = new EventSource(address);
  let isOpen = false;
  source.addEventListener("open", () => { isOpen = true; say("live"); });
  source.addEventListener("error", () => {
    if (source.readyState === EventSource.CLOSED && !isOpen) say("this run is not there, or too many pages are open", true);
    else say("the dashboard does not answer; this is the last it sent", true);
    if (source.readyState === EventSource.CLOSED && isOpen) retry = setTimeout(again, 2000);
  });
  let retry = null, next = null;
  const again = () => { next = follow(address, name, take); };
  source.addEventListener(name, (event) => take(JSON.parse(event.data)));
  return () => { clearTimeout(retry); source.close(); next?.(); };
}

export async function read(address) {
  const answer = await fetch(address);
  const value = await answer.json();
  if (!answer.ok) throw new Error(value.error ?? "could not be read");
  return value;
}

function openHome() {
  document.title = "fedmtl: runs";
  const rows = new Map(), chosen = new Set();
  const compare = el("button", { type: "button", disabled: true, onclick: () => {
    const query = new URLSearchParams([...chosen].map((id) => ["id", id]));
    location.hash = `#/compare?${query}`;
  } }, "Compare");
  const choose = (row, box) => {
    if (box.checked) chosen.add(row.id); else chosen.delete(row.id);
    compare.disabled = chosen.size < 2 || chosen.size > MOST_COMPARED;
    compare.textContent = chosen.size ? `Compare ${chosen.size} of at most ${MOST_COMPARED}` : "Compare";
  };
  const columns = [
    { title: "", cell: (row) => {
      const box = el("input", { type: "checkbox", "aria-label": `choose ${row.name} to compare`, onchange: () => choose(row, box) });
      box.checked = chosen.has(row.id);
      return box;
    } },
    { title: "Run", isName: true, cut: true, by: (row) => row.name.toLowerCase(), cell: (row) => link("run", [row.id], row.name) },
    { title: "State", by: (row) => row.status, cell: (row) => badge(row.status) },
    { title: "Round", number: true, by: (row) => row.rounds, cell: (row) => `${row.rounds} of ${row.num_rounds}` },
    { title: "Overall", cell: (row) => sparkline(row.x, row.y, `overall score by round, now ${number(row.overall)}`) },
    { title: "Now", number: true, by: (row) => row.overall, cell: (row) => number(row.overall) },
    { title: "Best", number: true, by: (row) => row.best, cell: (row) => number(row.best) },
    { title: "Tasks", cut: true, by: (row) => row.tasks.length, cell: (row) => {
      const words = row.tasks.map((task) => `${task.task} ${number(task.score)}`).join(", ");
      return el("span", { title: words }, words);
    } },
    { title: "Traffic", number: true, by: (row) => row.bytes, cell: (row) => bytes(row.bytes) },
    { title: "ε spent", number: true, by: (row) => row.epsilon, cell: (row) => (row.epsilon === null ? "–" : number(row.epsilon)) },
    { title: "Failures", number: true, by: (row) => row.failures, cell: (row) => String(row.failures) },
    { title: "Time", number: true, by: (row) => row.seconds, cell: (row) => seconds(row.seconds) },
    { title: "Encoder", cut: true, by: (row) => row.encoder, cell: (row) => row.encoder },
  ];
  const table = new Table("Runs", columns, (row) => row.id, { index: 1, down: false });
  const words = el("input", { id: "filter", type: "search", autocomplete: "off", placeholder: "name, task or encoder" });
  const state = el("select", { id: "state" }, ["all", "running", "waiting", "done", "failed", "interrupted", "killed"].map((one) => el("option", { value: one }, one)));
  const count = el("span", { class: "quiet", role: "status" });
  const studies = el("p", { class: "bar" });
  const filter = () => {
    const wanted = words.value.trim().toLowerCase();
    table.filter((row) => (state.value === "all" || row.status === state.value)
      && (!wanted || `${row.name} ${row.encoder} ${row.mode} ${row.tasks.map((task) => task.task).join(" ")}`.toLowerCase().includes(wanted)));
    count.textContent = `${table.shown.length} of ${rows.size} runs`;
  };
  words.addEventListener("input", filter);
  state.addEventListener("change", filter);
  main.replaceChildren(el("h1", {}, "Runs"), studies,
    el("div", { class: "bar" }, el("label", {}, "Filter ", words), el("label", {}, "State ", state), compare, count), table.element);
  const close = follow("/api/stream", "list", (change) => {
    for (const row of change.runs) rows.set(row.id, row);
    for (const id of change.gone) { rows.delete(id); chosen.delete(id); }
    studies.replaceChildren(...(change.studies.length ? ["Studies: ", ...change.studies.map((one) => link("study", [one.id], one.name))] : []));
    table.rows = [...rows.values()];
    filter();
  });
  return () => { close(); table.close(); };
}

let close = () => {};
function route() {
  close();
  const [view, query] = location.hash.replace(/^#\/?/, "").split("?");
  const ids = new URLSearchParams(query ?? "").getAll("id");
  scrollTo(0, 0);
  if (view === "run" && ids.length) close = openRun(main, ids[0]);
  else if (view === "compare" && ids.length) close = openCompare(main, ids.slice(0, MOST_COMPARED), say);
  else if (view === "study" && ids.length) close = openStudy(main, ids[0], say);
  else close = openHome();
}

function dress(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  document.getElementById("theme").textContent = `Colours: ${THEMES.find(([name]) => name === theme)?.[1] ?? "as the system"}`;
}

function saved() { try { return localStorage.getItem("theme") ?? ""; } catch { return ""; } }
let theme = saved();
document.getElementById("theme").addEventListener("click", () => {
  const at = THEMES.findIndex(([name]) => name === theme);
  theme = THEMES[(at + 1) % THEMES.length][0];
  try { localStorage.setItem("theme", theme); } catch { /* without storage it lasts as long as the page */ }
  dress(theme);
});
dress(theme);
addEventListener("hashchange", (event) => {
  if (location.hash === "#main") { history.replaceState(null, "", event.oldURL); main.focus(); return; }
  route();
  main.focus({ preventScroll: true });
});
route();

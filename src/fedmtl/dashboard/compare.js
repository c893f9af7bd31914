// Runs over each other, and a study's grid as it fills.

import { el, number, LineChart, COLOURS } from "./charts.js";
import { plainTable } from "./tables.js";
import { badge, bytes, link, read, seconds } from "./page.js";
import { look } from "./run.js";

const SECONDS = 3;

/** Read an address now and every few seconds, until the returned function is called. */
function poll(address, say, take) {
  let timer = null, isOver = false, before = "";
  const once = async () => {
    try {
      const value = await read(address);
      if (isOver) return;
      const now = JSON.stringify(value);
      if (now !== before) take(value);
      before = now;
      say("live");
    } catch (error) {
      if (!isOver) say(error.message === "Failed to fetch" ? "the dashboard does not answer; this is the last it sent" : error.message, true);
    }
    if (!isOver) timer = setTimeout(once, SECONDS * 1000);
  };
  once();
  return () => { isOver = true; clearTimeout(timer); };
}

export function openCompare(main, ids, say) {
  document.title = "fedmtl: compare";
  const query = new URLSearchParams(ids.map((id) => ["id", id]));
  const panels = el("div", { class: "panels" }), tables = el("div"), charts = new Map();
  main.replaceChildren(el("h1", {}, `Compare ${ids.length} runs`), panels, tables);
  const chart = (name, isWide) => {
    if (!charts.has(name)) {
      charts.set(name, new LineChart(`${name} by round`));
      panels.append(el("figure", { class: isWide ? "panel wide" : "panel" }, el("h3", {}, name), charts.get(name).element));
    }
    return charts.get(name);
  };
  return poll(`/api/compare?${query}`, say, ({ runs, differences }) => {
    const longest = Math.max(...runs.map((run) => run.curves.num_rounds));
    const style = (index) => ({ look: look(index), dashed: index >= COLOURS });
    chart("overall", true).set(runs.map((run, index) => ({ name: run.head.name, ...run.curves.overall, ...style(index) })), longest);
    const tasks = [...new Set(runs.flatMap((run) => run.curves.tasks.map((task) => task.name)))].slice(0, 40);
    const of = (run, name) => run.curves.tasks.find((task) => task.name === name);
    for (const name of tasks) {
      const lines = runs.map((run, index) => {
        const task = of(run, name), series = task?.series[task.metric];
        return series ? { name: `${run.head.name} ${task.metric}`, ...series, ...style(index) } : null;
      });
      chart(name, false).set(lines.filter(Boolean), longest);
    }
    const rows = [
      ["state", ...runs.map((run) => badge(run.head.status))],
      ["round", ...runs.map((run) => `${run.head.round} of ${run.head.num_rounds}`)],
      ["overall", ...runs.map((run) => number(run.head.overall))],
      ["best overall", ...runs.map((run) => (run.head.best ? `${number(run.head.best.value)} (round ${run.head.best.round})` : "–"))],
      ...tasks.map((name) => [name, ...runs.map((run) => { const task = of(run, name); return task ? `${task.metric} ${number(task.final[task.metric])}` : "–"; })]),
      ["traffic", ...runs.map((run) => bytes(run.head.bytes_up + run.head.bytes_down))],
      ["time of rounds", ...runs.map((run) => seconds(run.head.seconds))],
      ["failures", ...runs.map((run) => String(run.head.failures))],
      ["privacy spent", ...runs.map((run) => run.head.privacy.join("; ") || "–")],
    ];
    const titles = ["", ...runs.map((run) => link("run", [run.head.id], run.head.name))];
    const names = ["Setting", ...runs.map((run) => run.head.name)];
    tables.replaceChildren(
      el("section", {}, el("h2", {}, "What they came to"), plainTable("What the runs came to", titles, rows)),
      el("section", {}, el("h2", {}, "Settings that differ"), differences.length
        ? plainTable("Settings that differ", names, differences.map((row) => [row.key, ...row.values]))
        : el("p", { class: "quiet" }, "Their settings are the same.")));
  });
}

export function openStudy(main, id, say) {
  document.title = "fedmtl: study";
  const body = el("div");
  main.replaceChildren(body);
  return poll(`/api/study?${new URLSearchParams({ id })}`, say, (study) => {
    const cells = study.setups.flatMap((setup) => Object.values(setup.cells));
    const done = cells.filter((cell) => cell.status === "done").length;
    const shown = (cell) => {
      if (!cell) return el("span", { class: "quiet" }, "not begun");
      const at = cell.status === "done" ? "" : ` ${cell.rounds}/${cell.num_rounds}`;
      return el("span", { class: "cell" }, link("run", [cell.id], number(cell.overall)), badge(cell.status), at);
    };
    const rows = study.setups.map((setup) => {
      const known = Object.values(setup.cells).filter((cell) => cell.status === "done" && cell.overall !== null).map((cell) => cell.overall);
      const mean = known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
      return [setup.name, ...study.seeds.map((seed) => shown(setup.cells[seed])), known.length ? `${number(mean)} (${known.length})` : "–"];
    });
    const titles = ["Setup", ...study.seeds.map((seed) => (seed === "" ? "run" : `seed ${seed}`)), "Mean of the done"];
    body.replaceChildren(el("h1", {}, study.name),
      el("p", {}, `${done} of ${cells.length} cells that were begun are done. Each shows the overall score of its last round.`),
      el("progress", { max: Math.max(1, cells.length), value: done, "aria-label": `${done} of ${cells.length} cells done` }),
      el("section", {}, el("h2", {}, "Cells"), plainTable("Cells", titles, rows)),
      el("section", {}, el("h2", {}, "What the study is to do"), plainTable("Options of the study", ["Option", "Value"], study.options)));
  });
}

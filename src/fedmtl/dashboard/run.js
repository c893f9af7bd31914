// One run, as it goes on: curves, tasks, sites, plan, phases, failures, config.

import { el, marks, number, LineChart, StackChart, COLOURS } from "./charts.js";
import { Table, plainTable } from "./tables.js";
import { badge, bytes, follow, link, seconds } from "./page.js";

export const look = (index) => `c${index % COLOURS}`;

function section(title, ...children) {
  const id = `part-${title.toLowerCase().replace(/[^a-z]+/g, "-")}`;
  return el("section", { "aria-labelledby": id }, el("h2", { id }, title), ...children);
}

function facts(pairs) {
  return el("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== "").map(([name, value]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function parameters(count) {
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) if (count >= size) return `${(count / size).toFixed(1)} ${unit}`;
  return String(count);
}

/** Name, state, numbers, and what has to be said before everything else. */
function head(now) {
  const notices = [];
  if (now.too_large) notices.push(["bad", "events.jsonl is larger than any run writes; it is not read"]);
  if (now.read < 1 && !now.too_large) notices.push(["", `reading events.jsonl: ${Math.floor(100 * now.read)} %`]);
  if (now.status === "gone") notices.push(["bad", "the run's folder is gone; this is what was read before"]);
  if (now.reason) notices.push([now.status === "failed" ? "bad" : "", now.reason]);
  if (now.missing.length) notices.push(["", `waits for ${now.missing.join(", ")}`]);
  if (now.broken) notices.push(["bad", `${now.broken} lines of events.jsonl cannot be read: ${now.broken_lines.join("; ")}`]);
  if (now.synthetic) notices.push(["", "its examples are made up: the scores say nothing of real texts"]);
  const best = now.best ? `${number(now.best.value)} (round ${now.best.round})` : "–";
  return [
    el("h1", {}, now.name, " ", badge(now.status)),
    now.study ? el("p", {}, "a cell of ", link("study", [now.study], "its study")) : null,
    el("progress", { max: Math.max(1, now.num_rounds), value: now.round, "aria-label": `round ${now.round} of ${now.num_rounds}` }),
    notices.length ? el("ul", { class: "notices" }, notices.map(([kind, words]) => el("li", { class: kind }, words))) : null,
    facts([
      ["round", `${now.round} of ${now.num_rounds}`], ["overall", number(now.overall)], ["best", best],
      ["traffic up", bytes(now.bytes_up)], ["traffic down", bytes(now.bytes_down)], ["time of rounds", seconds(now.seconds)],
      ["failures", String(now.failures)], ["energy", now.joules ? `${(now.joules / 1000).toFixed(2)} kJ` : ""],
      ["privacy spent", now.privacy.length ? now.privacy.join("; ") : "no noise and no masks"],
      ...Object.entries(now.facts).map(([name, value]) => [name, name === "weights" ? el("code", { title: value }, `${value.slice(0, 12)}…`) : value]),
    ]),
  ];
}

/** A chart for each task, which stays when its numbers change. */
class Panels {
  constructor() {
    this.element = el("div", { class: "panels" });
    this.overall = new LineChart("Overall score by round");
    this.element.append(el("figure", { class: "panel wide" }, el("h3", {}, "Overall"), this.overall.element));
    this.tasks = new Map();
  }

  set(curves) {
    const mains = curves.tasks.filter((task) => !task.name.includes(":")).slice(0, COLOURS);
    this.overall.set([{ name: "overall", ...curves.overall, look: "c0" },
      ...mains.filter((task) => task.series[task.metric]).map((task, index) => ({ name: `${task.name} ${task.metric}`, ...task.series[task.metric], look: look(index + 1), dashed: true }))],
    curves.num_rounds);
    for (const task of curves.tasks) {
      if (!this.tasks.has(task.name)) this.tasks.set(task.name, this.panel(task));
      this.tasks.get(task.name)(task, curves.num_rounds);
    }
  }

  panel(task) {
    const chart = new LineChart(`${task.name} by round`);
    const about = el("p", { class: "quiet" }), scores = el("p");
    const choice = el("select", { "aria-label": `what is shown of ${task.name}` });
    let last = task, rounds = 0;
    const draw = () => {
      const isLoss = choice.value === "losses";
      const names = isLoss ? ["training loss", "validation loss"] : [choice.value];
      const lines = names.filter((name) => last.series[name]).map((name, index) => ({ name, ...last.series[name], look: look(index) }));
      const across = choice.value === last.metric ? Object.entries(last.baselines).map(([name, value]) => ({ name, value })) : [];
      chart.set(lines, rounds, across);
    };
    choice.addEventListener("change", draw);
    this.element.append(el("figure", { class: "panel" }, el("h3", {}, task.name), about, scores, choice, chart.element));
    return (now, numRounds) => {
      last = now;
      rounds = numRounds;
      const known = [...Object.keys(now.series).filter((name) => !name.endsWith(" loss")), "losses"];
      if (known.join() !== [...choice.options].map((one) => one.value).join()) {
        const before = choice.value || now.metric;
        choice.replaceChildren(...known.map((name) => el("option", { value: name }, name)));
        choice.value = known.includes(before) ? before : known[0];
      }
      about.textContent = [now.kind, now.auxiliary ? "auxiliary" : "", now.train === null ? "" : `${now.train} training and ${now.validation ?? 0} validation examples`,
        now.stopped === null ? "" : `stopped early in round ${now.stopped}`].filter(Boolean).join(" · ");
      scores.textContent = [Object.entries(now.final).map(([name, value]) => `${name} ${number(value)}`).join(", "),
        now.best ? `best ${now.metric} ${number(now.best.value)} in round ${now.best.round}` : "", now.marked].filter(Boolean).join(" · ");
      draw();
    };
  }
}

function shares(row) { return Object.entries(row.shares).map(([scope, share]) => `${scope} ${share === null ? "–" : `${Math.round(100 * share)} %`}`).join(", "); }

function seen(row) {
  if (row.seen === null) return "–";
  const ago = row.seen_at === null ? "" : `, ${seconds(Math.max(0.1, Date.now() / 1000 - row.seen_at))} ago`;
  return `round ${row.seen}${ago}`;
}

const STRIP = { u: "an update", l: "late", r: "refused" };
function strip(row) {
  const counts = Object.entries(STRIP).map(([letter, words]) => [row.strip.split(letter).length - 1, words]).filter(([count]) => count);
  return marks(row.strip, `last rounds: ${counts.map(([count, words]) => `${count} ${words}`).join(", ") || "none"}`);
}

const SITE_COLUMNS = [
  { title: "Site", isName: true, cut: true, by: (row) => row.name.toLowerCase(), cell: (row) => row.name },
  { title: "State", by: (row) => row.state, cell: (row) => badge(row.state) },
  { title: "Tasks", cut: true, cell: (row) => { const words = Object.entries(row.tasks).map(([task, count]) => (count === null ? task : `${task} ${count}`)).join(", "); return el("span", { title: words }, words); } },
  { title: "Last seen", by: (row) => row.seen, cell: seen },
  { title: "Rounds", cell: strip },
  { title: "Updates", number: true, by: (row) => row.updates, cell: (row) => String(row.updates) },
  { title: "Failures", number: true, by: (row) => row.failures, cell: (row) => String(row.failures) },
  { title: "Why", cut: true, by: (row) => row.reason, cell: (row) => { const words = row.reason ? `round ${row.failed}: ${row.reason}` : ""; return el("span", { title: words }, words); } },
  { title: "Up", number: true, by: (row) => row.up, cell: (row) => bytes(row.up) },
  { title: "Down", number: true, by: (row) => row.down, cell: (row) => bytes(row.down) },
  { title: "Time a round", number: true, by: (row) => (row.updates ? row.seconds / row.updates : null), cell: (row) => (row.updates ? seconds(row.seconds / row.updates) : "–") },
  { title: "Share of each scope", cut: true, cell: (row) => el("span", { title: shares(row) }, shares(row)) },
];

const LEVELS = { all: "one value for every client", group: "one for each group of tasks", task: "one for each task", client: "stays at its client", fixed: "never moves" };

/** Layers from the top to the bottom, each cut into the parts that have one value each. */
function plan(now) {
  if (!now) return [el("p", { class: "quiet" }, "No plan has been written yet.")];
  const heads = now.layers.filter((one) => one.layer.startsWith("heads."));
  const body = now.layers.filter((one) => !one.layer.startsWith("heads.")).reverse();
  const part = (level, words) => {
    const known = Object.hasOwn(LEVELS, level.split(/[ .]/)[0]) ? level.split(/[ .]/)[0] : "fixed";
    return el("span", { class: `part level-${known}`, title: `${words}: ${LEVELS[known]}` }, words);
  };
  const cut = (layer) => {
    const level = layer.level.split(/[ .]/)[0], each = parameters(layer.parameters);
    const groups = now.groups.map((one) => one.name);
    const names = level === "group" ? groups : level === "task" || level === "client" ? now.tasks : [];
    if (!names.length || names.length > 12) return [part(layer.level, `${layer.level}${names.length ? `, ${names.length} times` : ""} · ${each}`)];
    return names.map((name) => part(layer.level, `${name} · ${each}`));
  };
  const rows = body.map((layer) => el("li", {}, el("span", {}, layer.layer), el("span", { class: "parts" }, cut(layer))));
  if (heads.length) {
    const shown = heads.length > 12 ? [part(heads[0].level, `${heads.length} heads`)] : heads.map((one) => part(one.level, `${one.layer.slice(6)} · ${parameters(one.parameters)}`));
    rows.unshift(el("li", {}, el("span", {}, "heads"), el("span", { class: "parts" }, shown)));
  }
  const used = [...new Set(now.layers.map((one) => one.level.split(/[ .]/)[0]))].filter((level) => LEVELS[level]);
  const total = now.total === null ? "" : `${parameters(now.total)} parameters at the server${now.at_clients ? `, ${parameters(now.at_clients)} at clients` : ""}.`;
  return [
    el("ul", { class: "legend" }, used.map((level) => el("li", { class: `level-${level}` }, `${level}: ${LEVELS[level]}`))),
    el("ol", { class: "plan", "aria-label": "layers, from the heads to the input" }, rows),
    el("p", { class: "quiet" }, total, now.round === null ? "" : ` As changed in round ${now.round}.`),
    now.moves.length ? el("ul", {}, now.moves.map((move) => el("li", {}, `round ${move.round}: ${move.layer} ${move.before} → ${move.after}, ${move.reason}`))) : null,
  ];
}

const PHASES = [{ name: "longest client", look: "c0" }, { name: "other clients, sending, averaging", look: "c2" }, { name: "scoring", look: "c1" }, { name: "writing", look: "c4" }];

function settings(rows) {
  const box = el("div");
  const only = el("input", { type: "checkbox" });
  const draw = () => {
    const shown = rows.filter((row) => !only.checked || !row.is_default);
    box.replaceChildren(plainTable("Config", ["Key", "Value", "Default"], shown.map((row) => [row.key, row.value, row.default]), (at) => !shown[at].is_default));
  };
  only.checked = true;
  only.addEventListener("change", draw);
  draw();
  const number = rows.filter((row) => !row.is_default).length;
  return [el("div", { class: "bar" }, el("label", {}, only, `only the ${number} of ${rows.length} that differ from the default (●)`)), box];
}

export function openRun(main, id) {
  document.title = "fedmtl: run";
  const top = el("div"), panels = new Panels(), picture = el("div"), log = el("div"), config = el("div");
  const sites = new Table("Sites", SITE_COLUMNS, (row) => row.name, { index: 0, down: false });
  const phases = new StackChart("Seconds of each round by phase");
  const count = el("p", { class: "quiet" });
  main.replaceChildren(top, section("Curves", panels.element), section("Sites", count, sites.element), section("Phases of the rounds", phases.element),
    section("Failures and remarks", log), section("Sharing plan", picture), section("Config", config));
  let rows = new Map();
  const stop = follow(`/api/stream?${new URLSearchParams({ id })}`, "run", (now) => {
    if (now.head) { top.replaceChildren(...head(now.head).filter(Boolean)); document.title = `${now.head.name}: round ${now.head.round}`; }
    if (now.curves) panels.set(now.curves);
    if (now.sites) {
      // A row that says the same stays the same object, and is not drawn again.
      const next = new Map();
      for (const row of now.sites) {
        const key = JSON.stringify(row), before = rows.get(row.name);
        next.set(row.name, before && before.key === key ? before : { key, row });
      }
      rows = next;
      sites.set([...rows.values()].map((one) => one.row));
      const states = {};
      for (const row of now.sites) states[row.state] = (states[row.state] ?? 0) + 1;
      count.textContent = `${now.sites.length} sites: ${Object.entries(states).sort().map(([state, number]) => `${number} ${state}`).join(", ") || "none yet"}`;
    }
    if (now.timeline) {
      phases.set(now.timeline.map((row) => ({ name: `round ${row.round}`, values: [row.clients, row.server, row.evaluate, row.rest],
        more: `; ${row.accepted} updates, ${row.failed} failures` })), PHASES, "s");
    }
    if (now.failures) {
      log.replaceChildren(now.failures.last.length ? el("ul", { class: "log" }, now.failures.last.map((one) => el("li", {}, badge(one.kind), ` round ${one.round} · ${one.client || "server"}: ${one.reason}`)))
        : el("p", { class: "quiet" }, "None so far."));
    }
    if ("plan" in now) picture.replaceChildren(...plan(now.plan).filter(Boolean));
    if (now.config) config.replaceChildren(...settings(now.config));
  });
  // "12 s ago" grows by itself.
  const clock = setInterval(() => { sites.made.clear(); sites.soon(); }, 5000);
  return () => { clearInterval(clock); stop(); sites.close(); };
}

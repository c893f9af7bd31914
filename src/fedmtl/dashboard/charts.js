// Curves and bars as SVG. Values show under the pointer, and by the arrow keys when a chart has the focus.

const NS = "http://www.w3.org/2000/svg";
export const COLOURS = 7;

/** An element with attributes and children; text only ever goes in as text. */
export function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, String(value));
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

function svg(name, attributes, ...children) {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  made.append(...children);
  return made;
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  return size !== 0 && (size < 0.001 || size >= 10000) ? value.toExponential(2) : value.toFixed(size < 10 ? 3 : 1);
}

/** Points of a curve as a path; an undefined value leaves a gap. */
function path(xs, ys, toX, toY) {
  const parts = [];
  let isDown = false;
  for (let at = 0; at < xs.length; at++) {
    if (ys[at] === null) { isDown = false; continue; }
    parts.push(isDown ? "L" : "M", toX(xs[at]).toFixed(1), " ", toY(ys[at]).toFixed(1));
    isDown = true;
  }
  return parts.join("");
}

function extent(lists) {
  let low = Infinity, high = -Infinity;
  for (const list of lists) for (const value of list) {
    if (value === null || value === undefined) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low === Infinity) return [0, 1];
  const margin = Math.max((high - low) * 0.06, 1e-6 + Math.abs(high) * 0.005);
  return [low - margin, high + margin];
}

export function sparkline(x, y, label) {
  const [low, high] = extent([y]);
  const last = Math.max(1, x.length ? x[x.length - 1] : 1);
  const line = path(x, y, (at) => 2 + (at / last) * 106, (value) => 24 - ((value - low) / (high - low)) * 22);
  return svg("svg", { class: "spark c0", viewBox: "0 0 110 26", role: "img", "aria-label": label },
    svg("path", { class: "line", d: line }));
}

/** A bar for each letter, in the colour and height of the letter: one path a letter, however many there are. */
export function marks(letters, label) {
  const heights = { u: 14, l: 9, r: 14 };
  const paths = Object.keys(heights).map((letter) => {
    const parts = [];
    for (let at = 0; at < letters.length; at++) if (letters[at] === letter) parts.push(`M${at * 5} 15v-${heights[letter]}h4v${heights[letter]}z`);
    return parts.length ? svg("path", { class: letter, d: parts.join("") }) : null;
  });
  return svg("svg", { class: "strip", viewBox: "0 0 150 16", role: "img", "aria-label": label }, ...paths.filter(Boolean));
}

const waiting = new Set();
/** Draw at the next frame, once however often it is called before. */
function soon(chart) {
  if (!waiting.size) requestAnimationFrame(() => {
    const all = [...waiting];
    waiting.clear();
    for (const one of all) one.draw();
  });
  waiting.add(chart);
}

const sizes = new ResizeObserver((entries) => { for (const entry of entries) entry.target.chart?.update(); });

/** What charts share: a picture that can be focused, a readout, a legend. A subclass has `draw`, `count` and `words`. */
class Chart {
  constructor(title) {
    this.title = title;
    this.at = null;
    this.picture = svg("svg", { "aria-hidden": "true" });
    this.readout = el("output", { class: "readout", "aria-live": "polite" });
    this.box = el("div", { class: "chart", tabindex: 0, role: "group", "aria-label": `${title}; arrow keys show values` }, this.picture);
    this.box.chart = this;
    this.legend = el("ul", { class: "legend" });
    this.element = el("div", {}, this.box, this.legend, this.readout);
    this.box.addEventListener("pointermove", (event) => this.point(event));
    this.box.addEventListener("pointerleave", () => this.show(null));
    this.box.addEventListener("blur", () => this.show(null));
    this.box.addEventListener("keydown", (event) => this.key(event));
    sizes.observe(this.box);
  }

  update() { soon(this); }

  size() {
    const width = Math.max(200, this.box.clientWidth), height = this.picture.clientHeight || 180;
    this.picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    return { left: 46, right: width - 8, top: 8, bottom: height - 22, width };
  }

  point(event) {
    const box = this.picture.getBoundingClientRect();
    this.show(this.nearest(((event.clientX - box.left) / box.width) * (this.frame?.width ?? 1)));
  }

  key(event) {
    const last = this.count() - 1;
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    let at = this.at;
    if (step !== undefined) at = at === null ? (step > 0 ? 0 : last) : at + step;
    else if (event.key === "Home") at = 0;
    else if (event.key === "End") at = last;
    else if (event.key === "Escape") at = null;
    else return;
    event.preventDefault();
    this.show(at === null ? null : Math.max(0, Math.min(last, at)));
  }

  show(at) {
    if (at === this.at || this.count() === 0) return;
    this.at = at;
    this.readout.textContent = at === null ? "" : this.words(at);
    this.update();
  }

  axis(frame, low, high, toY) {
    const parts = [];
    const rough = (high - low) / 4, size = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((one) => one * size >= rough) * size;
    for (let tick = Math.ceil(low / step); tick * step <= high; tick++) {
      const value = tick * step, y = toY(value);
      parts.push(svg("line", { class: "grid", x1: frame.left, x2: frame.right, y1: y, y2: y }));
      const text = svg("text", { x: frame.left - 5, y: y + 4, "text-anchor": "end" });
      text.textContent = String(Number(value.toPrecision(6)));
      parts.push(text);
    }
    return parts;
  }

  names(lines) {
    const key = lines.map((line) => `${line.name}|${line.look}|${line.dashed}`).join("\n");
    if (key === this.named) return;
    this.named = key;
    this.legend.replaceChildren(...lines.map((line) => el("li", { class: `${line.look}${line.dashed ? " dashed" : ""}` }, line.name)));
  }
}

/** Curves over rounds: lines are {name, x, y, look, dashed}, and baselines {name, value} lie across. */
export class LineChart extends Chart {
  lines = [];
  baselines = [];
  last = 1;
  xs = [];

  set(lines, last = 0, baselines = []) {
    this.lines = lines;
    this.baselines = baselines.filter((one) => one.value !== null && one.value !== undefined);
    const all = new Set();
    for (const line of lines) for (const x of line.x) all.add(x);
    this.xs = [...all].sort((one, other) => one - other);
    this.last = Math.max(1, last, this.xs.length ? this.xs[this.xs.length - 1] : 1);
    this.names([...lines, ...this.baselines.map((one) => ({ name: `${one.name} ${number(one.value)}`, look: "c6", dashed: true }))]);
    this.update();
  }

  count() { return this.xs.length; }

  toX(at) { return this.frame.left + (at / this.last) * (this.frame.right - this.frame.left); }

  nearest(x) {
    if (!this.frame || !this.xs.length) return null;
    let best = 0;
    this.xs.forEach((at, index) => { if (Math.abs(this.toX(at) - x) < Math.abs(this.toX(this.xs[best]) - x)) best = index; });
    return best;
  }

  words(index) {
    const at = this.xs[index];
    const values = this.lines.map((line) => {
      const found = line.x.indexOf(at);
      return found < 0 ? null : `${line.name} ${number(line.y[found])}`;
    });
    return `round ${at}: ${values.filter(Boolean).join(", ")}`;
  }

  draw() {
    const frame = (this.frame = this.size());
    const [low, high] = extent([...this.lines.map((line) => line.y), this.baselines.map((one) => one.value)]);
    const toX = (at) => this.toX(at);
    const toY = (value) => frame.bottom - ((value - low) / (high - low)) * (frame.bottom - frame.top);
    const parts = this.axis(frame, low, high, toY);
    for (const at of [0, this.last]) {
      const text = svg("text", { x: toX(at), y: frame.bottom + 16, "text-anchor": at ? "end" : "start" });
      text.textContent = at ? `round ${at}` : "0";
      parts.push(text);
    }
    for (const one of this.baselines) {
      const y = toY(one.value);
      parts.push(svg("line", { class: "baseline", x1: frame.left, x2: frame.right, y1: y, y2: y }));
    }
    for (const line of this.lines) {
      parts.push(svg("path", { class: `line ${line.look}${line.dashed ? " dashed" : ""}`, d: path(line.x, line.y, toX, toY) }));
      const end = line.x.length - 1;
      if (end >= 0 && line.y[end] !== null) parts.push(svg("circle", { class: `dot ${line.look}`, r: 3, cx: toX(line.x[end]), cy: toY(line.y[end]) }));
    }
    if (this.at !== null && this.xs[this.at] !== undefined) {
      const x = toX(this.xs[this.at]);
      parts.push(svg("line", { class: "cross", x1: x, x2: x, y1: frame.top, y2: frame.bottom }));
      for (const line of this.lines) {
        const found = line.x.indexOf(this.xs[this.at]);
        if (found >= 0 && line.y[found] !== null) parts.push(svg("circle", { class: `dot ${line.look}`, r: 4, cx: x, cy: toY(line.y[found]) }));
      }
    }
    this.picture.replaceChildren(...parts);
  }
}

/** Bars of stacked parts: rows are {name, values}, and parts {name, look} name the values. */
export class StackChart extends Chart {
  rows = [];
  parts = [];

  set(rows, parts, unit) {
    this.rows = rows;
    this.parts = parts;
    this.unit = unit;
    this.names(parts);
    this.update();
  }

  count() { return this.rows.length; }

  nearest(x) {
    if (!this.frame || !this.rows.length) return null;
    const share = (x - this.frame.left) / (this.frame.right - this.frame.left);
    return Math.max(0, Math.min(this.rows.length - 1, Math.floor(share * this.rows.length)));
  }

  words(at) {
    const row = this.rows[at];
    const total = row.values.reduce((sum, value) => sum + value, 0);
    return `${row.name}: ${number(total)} ${this.unit} (${this.parts.map((part, index) => `${part.name} ${number(row.values[index])}`).join(", ")})${row.more}`;
  }

  draw() {
    const frame = (this.frame = this.size());
    const highest = Math.max(1e-6, ...this.rows.map((row) => row.values.reduce((sum, value) => sum + value, 0)));
    const toY = (value) => frame.bottom - (value / highest) * (frame.bottom - frame.top);
    const made = this.axis(frame, 0, highest, toY);
    const wide = (frame.right - frame.left) / Math.max(1, this.rows.length);
    this.rows.forEach((row, index) => {
      let below = 0;
      const x = frame.left + index * wide;
      row.values.forEach((value, part) => {
        if (value > 0) {
          made.push(svg("rect", { class: `block ${this.parts[part].look}`, x: x + Math.min(1, wide * 0.1), y: toY(below + value),
            width: Math.max(1, Math.min(48, wide * 0.85)), height: Math.max(0, toY(below) - toY(below + value)) }));
        }
        below += value;
      });
      if (index === this.at) made.push(svg("line", { class: "cross", x1: x + wide / 2, x2: x + wide / 2, y1: frame.top, y2: frame.bottom }));
    });
    const ends = this.rows.length > 1 ? [0, this.rows.length - 1] : this.rows.length ? [0] : [];
    for (const index of ends) {
      const text = svg("text", { x: index ? frame.right : frame.left, y: frame.bottom + 16, "text-anchor": index ? "end" : "start" });
      text.textContent = this.rows[index].name;
      made.push(text);
    }
    this.picture.replaceChildren(...made);
  }
}

// A table that sorts by any column and has only the rows in its document that can be seen.

import { el } from "./charts.js";

const ROW = 38; // pixels, as .row in page.css
const SPARE = 8;
export const MOST_PRINTED = 2000;
const tables = new Set();

addEventListener("beforeprint", () => { for (const table of tables) table.draw(true); });
addEventListener("afterprint", () => { for (const table of tables) table.draw(); });

/**
 * Columns are {title, cell(row), by(row), number, cut}; `cell` returns a node or text, `by` what is sorted by. A row is
 * made anew only when it is another object than before.
 */
export class Table {
  constructor(label, columns, key, sorted = null) {
    this.columns = columns;
    this.key = key;
    this.sorted = sorted;
    this.rows = [];
    this.shown = [];
    this.made = new Map();
    this.accepts = () => true;
    this.head = el("tr", {}, columns.map((column, index) => this.header(column, index)));
    this.body = el("tbody");
    this.table = el("table", { "aria-label": label }, el("thead", {}, this.head), this.body);
    this.element = el("div", { class: "scroll tall", tabindex: 0, role: "region", "aria-label": label }, this.table);
    this.element.addEventListener("scroll", () => this.soon(), { passive: true });
    tables.add(this);
  }

  header(column, index) {
    const attributes = { scope: "col", class: column.number ? "number" : "" };
    if (!column.by) return el("th", attributes, column.title);
    return el("th", attributes, el("button", { type: "button", onclick: () => this.sort(index) }, column.title));
  }

  sort(index) {
    const isSame = this.sorted && this.sorted.index === index;
    this.sorted = { index, down: isSame ? !this.sorted.down : Boolean(this.columns[index].number) };
    this.order();
  }

  set(rows) {
    this.rows = rows;
    this.order();
  }

  filter(accepts) {
    this.accepts = accepts;
    this.order();
  }

  order() {
    this.shown = this.rows.filter(this.accepts);
    if (this.sorted) {
      const { index, down } = this.sorted, by = this.columns[index].by;
      const keyed = this.shown.map((row, at) => [by(row), at, row]);
      keyed.sort(([one, first], [other, second]) => {
        // What has no value comes last either way.
        const order = one === null || other === null ? (one === null) - (other === null)
          : (one < other ? -1 : one > other ? 1 : 0) * (down ? -1 : 1);
        return order || first - second;
      });
      this.shown = keyed.map(([, , row]) => row);
    }
    [...this.head.children].forEach((cell, index) => {
      const order = this.sorted?.index === index ? (this.sorted.down ? "descending" : "ascending") : null;
      if (order) cell.setAttribute("aria-sort", order);
      else cell.removeAttribute("aria-sort");
    });
    this.soon();
  }

  soon() {
    if (this.isWaiting) return;
    this.isWaiting = true;
    requestAnimationFrame(() => { this.isWaiting = false; this.draw(); });
  }

  draw(all = false) {
    const height = this.element.clientHeight || 600;
    const first = all ? 0 : Math.max(0, Math.floor(this.element.scrollTop / ROW) - SPARE);
    const last = Math.min(this.shown.length, all ? MOST_PRINTED : first + Math.ceil(height / ROW) + 2 * SPARE);
    const made = new Map(), rows = [];
    for (let at = first; at < last; at++) {
      const row = this.shown[at], key = this.key(row), before = this.made.get(key);
      const line = before && before.row === row ? before.line : this.line(row);
      line.setAttribute("aria-rowindex", String(at + 2));
      made.set(key, { row, line });
      rows.push(line);
    }
    this.made = made;
    this.table.setAttribute("aria-rowcount", String(this.shown.length + 1));
    const focused = document.activeElement;
    const wanted = [this.space(first), ...rows, this.space(this.shown.length - last)];
    // Rows that stay are not touched, so that what has the focus keeps it.
    const now = [...this.body.children];
    if (wanted.length !== now.length || wanted.some((row, at) => row !== now[at])) this.body.replaceChildren(...wanted);
    if (focused && focused !== document.activeElement && this.body.contains(focused)) focused.focus({ preventScroll: true });
  }

  space(rows) {
    const cell = el("td", { colspan: this.columns.length });
    cell.style.height = `${rows * ROW}px`;
    return el("tr", { class: "space", "aria-hidden": "true" }, cell);
  }

  line(row) {
    return el("tr", { class: "row" }, this.columns.map((column) =>
      el(column.isName ? "th" : "td", { scope: column.isName ? "row" : null, class: `${column.number ? "number" : ""}${column.cut ? " cut" : ""}` }, column.cell(row))));
  }

  close() { tables.delete(this); }
}

/** A table of few rows, whole; rows are lists of cells, the first of which names the row. */
export function plainTable(label, titles, rows, marked = () => false) {
  const head = el("thead", {}, el("tr", {}, titles.map((title) => el("th", { scope: "col" }, title))));
  const body = el("tbody", {}, rows.map((cells, at) => el("tr", { class: marked(at) ? "is-other" : "" },
    cells.map((cell, index) => el(index ? "td" : "th", { scope: index ? null : "row" }, cell)))));
  return el("div", { class: "scroll tall", tabindex: 0, role: "region", "aria-label": label }, el("table", { "aria-label": label }, head, body));
}

"""A page opens offline: its style sheet, the page around whatever is shown, and pictures that stand alone."""

from __future__ import annotations

from pathlib import Path

from fedmtl.report.markup import Html, tag
from fedmtl.runs.folder import write_atomic

_COLOURS = """
:root {
  color-scheme: light dark;
  --paper: #fcfbf8; --ink: #22252a; --quiet: #666c75; --hair: #dedbd3; --wash: #f3f1ec;
  --accent: #2b5c94; --second: #c98a2b; --good: #2f7a55; --bad: #b03a3a; --warn: #8a5a00;
  --class0: #4a7fb5; --class1: #d79a3c; --class2: #58a186; --class3: #b9617a; --class4: #8577b8;
  --class5: #7d8f3f;
  --class6: #4fa3b0; --other: #aaa9a3;
  --all: #4a7fb5; --group: #4f9a7c; --task: #d08f2f; --client: #b9617a; --fixed: #8b8f94;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --paper: #15171a; --ink: #e4e2dd; --quiet: #9aa0a8; --hair: #33373d; --wash: #1e2125;
    --accent: #86b4e6; --second: #e0ac5a; --good: #7fc4a0; --bad: #ee8d86; --warn: #e2b765;
    --class0: #6a9fd4; --class1: #dca952; --class2: #6fb79b; --class3: #d07f96; --class4: #a297d6;
  --class5: #a0b25c;
    --class6: #6cbccb; --other: #74777c;
    --all: #6a9fd4; --group: #6fb79b; --task: #dca952; --client: #d07f96; --fixed: #868b91;
  }
}
.class0 { --c: var(--class0) } .class1 { --c: var(--class1) } .class2 { --c: var(--class2) }
.class3 { --c: var(--class3) } .class4 { --c: var(--class4) } .class5 { --c: var(--class5) }
.class6 { --c: var(--class6) } .other { --c: var(--other) }
.up, .right { --c: var(--class0) } .down { --c: var(--class1) } .wrong { --c: var(--bad) }
.shade0 { --c: color-mix(in oklab, var(--accent) 22%, var(--paper)) }
.shade1 { --c: color-mix(in oklab, var(--accent) 29%, var(--paper)) }
.shade2 { --c: color-mix(in oklab, var(--accent) 41%, var(--paper)) }
.shade3 { --c: color-mix(in oklab, var(--accent) 53%, var(--paper)) }
.shade4 { --c: color-mix(in oklab, var(--accent) 65%, var(--paper)) }
.shade5 { --c: color-mix(in oklab, var(--accent) 76%, var(--paper)) }
.shade6 { --c: color-mix(in oklab, var(--accent) 88%, var(--paper)) }
.shade7 { --c: var(--accent) }
.level-all { --c: var(--all) } .level-group { --c: var(--group) } .level-task { --c: var(--task) }
.level-client { --c: var(--client) } .level-fixed { --c: var(--fixed) }
"""

_TEXT = """
* { box-sizing: border-box }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth }
body { margin: 0; background: var(--paper); color: var(--ink); overflow-wrap: break-word;
  font: 17px/1.55 Charter, "Bitstream Charter", "Sitka Text", Cambria, Georgia, serif }
main { max-width: 66rem; margin: 0 auto; padding: 2.2rem 1.5rem 5rem }
h1 { font-size: 2.3rem; line-height: 1.15; font-weight: 600; margin: .1rem 0 .7rem; letter-spacing: -.01em;
  overflow-wrap: anywhere }
h2 { font-size: 1.35rem; font-weight: 600; margin: 0 0 .9rem }
section { margin-top: 2.4rem; padding-top: 1.3rem; border-top: 1px solid var(--hair);
  scroll-margin-top: .5rem }
p { margin: 0 0 1rem; max-width: 44rem }
small { font-size: .85em; color: var(--quiet); white-space: nowrap; margin-left: .2em }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: .86em }
.kicker, .facts, nav, .scroll, .guide, .notes, .legend, .badges, figcaption, svg text, .keys, summary {
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", Arial,
  sans-serif }
.kicker { margin: 0; color: var(--quiet); font-size: .85rem; letter-spacing: .02em }
.lede { font-size: 1.12rem }
.verdict { border-left: 4px solid; padding-left: .6rem; margin: .35rem 0 }
.verdict.bad { border-color: var(--bad) }
.verdict.good { border-color: var(--good) }
.guide, .notes { color: var(--quiet); font-size: .86rem; line-height: 1.5; max-width: 46rem }
.notes { margin: .6rem 0 1.6rem; padding: 0; list-style: none }
.notes li { margin-bottom: .3rem }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1.1rem; margin-top: 1.8rem; font-size: .88rem }
a { color: var(--accent); text-decoration: none } a:hover { text-decoration: underline }
.badges { display: flex; flex-wrap: wrap; align-items: center; gap: .5rem; max-width: none;
  font-size: .88rem }
.badge { border: 1px solid var(--c, var(--quiet)); color: var(--c, var(--quiet)); border-radius: 1em;
  padding: .08rem .7rem; font-weight: 600 }
.badge.done { --c: var(--good) } .badge.failed { --c: var(--bad) }
.badge.interrupted, .badge.open { --c: var(--warn) }
.badge.synthetic { background: var(--warn); border-color: var(--warn); color: var(--paper) }
.reason { color: var(--quiet); overflow-wrap: anywhere }
.notices { margin: 0 0 1.2rem; padding: 0; list-style: none; max-width: 50rem; font-size: .95rem }
.notices li { margin: 0 0 .4rem; padding: .35rem .8rem; border-left: 4px solid var(--warn); background: var(--wash);
  overflow-wrap: anywhere }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(11.5rem, 1fr)); gap: .9rem 1.6rem;
  margin: 1.6rem 0 0; font-size: .92rem; font-variant-numeric: tabular-nums }
.facts div { min-width: 0 }
dt { color: var(--quiet); font-size: .8rem } dd { margin: 0; overflow-wrap: anywhere }
.hash { display: block; max-width: 14ch; overflow: hidden; text-overflow: ellipsis; white-space: nowrap;
  user-select: all; cursor: copy }
.facts small { display: block; margin: 0; white-space: normal }
.hash:focus { max-width: none; overflow-wrap: anywhere; white-space: normal }
.legend { display: flex; flex-wrap: wrap; gap: .15rem .9rem; margin: .2rem 0 0; padding: 0; list-style: none;
  font-size: .82rem; color: var(--quiet) }
.legend li { overflow-wrap: anywhere }
.swatch { display: inline-block; width: .75em; height: .75em; margin-right: .4em; background: var(--c);
  border-radius: 2px }
.keys { display: grid; gap: .35rem; margin-bottom: 1rem; font-size: .86rem }
.key { display: flex; flex-wrap: wrap; gap: 0 .9rem; align-items: baseline } .key .legend { margin: 0 }
details { border: 1px solid var(--hair); border-radius: 4px; background: var(--wash) }
summary { padding: .5rem .9rem; cursor: pointer; font-size: .92rem }
pre { margin: 0; padding: .3rem .9rem 1rem; overflow-x: auto; font-size: .8rem; line-height: 1.5 }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px }
"""

_TABLES = """
.scroll { overflow-x: auto; margin-bottom: 1.4rem; -webkit-overflow-scrolling: touch; font-size: .9rem;
  line-height: 1.4 }
.tall { max-height: 26rem; overflow-y: auto; width: fit-content; max-width: 100%; padding: .5rem .9rem 0;
  border: 1px solid var(--hair); border-radius: 4px }
.tall thead th { position: sticky; top: -.5rem; background: var(--paper); box-shadow: inset 0 -1px var(--quiet) }
table { border-collapse: collapse; font-variant-numeric: tabular-nums lining-nums; min-width: 18rem }
caption { text-align: left; color: var(--quiet); font-size: .86rem; padding-bottom: .35rem }
th, td { padding: .38rem 1.1rem .38rem 0; text-align: left; vertical-align: baseline;
  border-bottom: 1px solid var(--hair) }
th { font-weight: 600 } th code { font-weight: 400 } tbody th { overflow-wrap: break-word; max-width: 16rem }
thead th { color: var(--quiet); font-weight: 500; font-size: .84rem; border-bottom-color: var(--quiet);
  vertical-align: bottom }
.number { text-align: right; white-space: nowrap }
td:last-child, thead th:last-child { padding-right: .2rem }
td small { white-space: normal }
em { font-style: italic; font-weight: 500 }
.results tbody tr:nth-last-child(3) > * { border-bottom-color: var(--quiet) }
.results small { display: block; margin: 0; font-weight: 400; white-space: normal; max-width: 11rem }
.results .number small { margin-left: auto }
.results small span, .portion, .results .number small.at { white-space: nowrap }
.results strong { font-weight: 650 }
sup { line-height: 0; color: var(--warn); font-weight: 600; margin-right: -.5em }
.aside { color: var(--quiet); font-weight: 400; font-size: .85em; border: 1px solid var(--hair);
  border-radius: 3px; padding: 0 .3em }
.rising { color: var(--good) } .falling { color: var(--bad) } .bad { color: var(--bad) }
.many { display: inline-block; min-width: 3.7em; text-align: right }
.map td { white-space: nowrap }
.map svg { width: 96px; height: 10px; vertical-align: -1px; margin-left: .2rem }
.map thead th:nth-child(n+3) { padding-left: .6em }
.none { display: inline-block; min-width: 3.7em; text-align: right; color: var(--quiet) }
.chip { display: inline-block; padding: 0 .55em; border-radius: 3px; font-size: .86em; color: var(--ink);
  background: color-mix(in srgb, var(--c) 26%, transparent) }
.levels { gap: .3rem 1.2rem; margin-bottom: 1.1rem }
.stack { border-spacing: 0 2px; border-collapse: separate }
.stack td, .stack tbody th { border: 0; padding-top: 1px; padding-bottom: 1px }
.stack tbody th { max-width: 26rem }
.slab { display: block; padding: .22rem .8rem; min-width: 10rem; border-left: 4px solid var(--c);
  font-weight: 500;
  background: color-mix(in srgb, var(--c) 18%, transparent) }
.track { display: inline-block; width: 7rem; height: .55rem; margin-left: .6rem; background: var(--wash);
  text-align: left }
.fill { display: block; height: 100%; min-width: 1px; background: var(--c) }
.matrix td { padding: 0; border: 1px solid var(--paper) } .matrix .number { text-align: center }
.matrix { min-width: 0 }
.matrix thead th { padding: .3rem .5rem; border: 0; max-width: 7rem; overflow-wrap: anywhere }
.matrix tbody th { border: 0; padding-right: .7rem; max-width: 8rem; font-weight: 500;
  vertical-align: middle }
.matrix td:last-child { color: var(--quiet); padding: 0 .5rem; vertical-align: middle }
.matrix thead th:first-child { padding-left: 0 }
.cell { min-width: 3.6rem; padding: .45rem .4rem; background: color-mix(in srgb, var(--c) var(--share),
  var(--wash)) }
.cell small { display: block; color: inherit; opacity: .75; margin: 0 }
"""

_FIGURES = """
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 19rem), 1fr));
  gap: 2rem 2.2rem;
  align-items: start }
figure { margin: 0; min-width: 0; max-width: 30rem }
.beside { display: flex; flex-wrap: wrap; gap: 1rem 3rem; align-items: start }
.beside .scroll { min-width: 0; max-width: 100% } .beside figure { flex: 1 1 20rem; max-width: 32rem }
.flow { display: flex; flex-wrap: wrap } .flow figure { flex: 1 1 18rem }
.flow figure.natural { flex: 0 1 auto; max-width: 100% }
@media (min-width: 48rem) { figure.wide { grid-column: span 2; max-width: none } }
figure .scroll { margin-bottom: 0 }
figure caption { position: absolute; clip-path: inset(50%); width: 1px; height: 1px; overflow: hidden }
figcaption { font-size: .9rem; margin-bottom: .3rem; color: var(--quiet) }
figcaption b { display: block; color: var(--ink); font-weight: 600 }
svg { display: block; width: 100%; height: auto; overflow: visible } .map svg { display: inline-block }
svg text { font-size: 11px; fill: var(--quiet); font-variant-numeric: tabular-nums }
text.y, text.end { text-anchor: end } text.x { text-anchor: middle } svg text.name { font-style: italic }
rect { fill: var(--c) } .box { fill: none; stroke: var(--hair) }
.grid { stroke: var(--hair); stroke-width: .7 } .axis { stroke: var(--quiet); stroke-width: .8 }
.line { fill: none; stroke: var(--accent); stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round }
.line.light { stroke: var(--quiet); stroke-width: 1; opacity: .6 }
.dot.line { fill: var(--accent); stroke: none } .dot.light { fill: var(--quiet) }
.ring { fill: none; stroke: var(--accent); stroke-width: 1.2 }
svg text.series { fill: var(--accent); font-weight: 600 }
svg text.series.light { fill: var(--quiet); font-weight: 400 }
line.mark { stroke: var(--second); stroke-width: 1; stroke-dasharray: 3 2.5 }
svg text.mark { fill: var(--warn); font-size: 10px }
.hover rect { fill: var(--ink); opacity: 0 } .hover rect:hover { opacity: .07 } .bar:hover { opacity: .75 }
.bar rect { shape-rendering: crispEdges }
.errors { grid-template-columns: repeat(4, auto); justify-content: start; margin-top: .8rem }
"""

_MEDIA = """
@media (max-width: 40rem) {
  body { font-size: 16px } main { padding: 1.6rem 1rem 3rem } h1 { font-size: 1.75rem }
  th, td { padding-right: .8rem }
  .scroll tbody th { position: sticky; left: 0; background: var(--paper); max-width: 9rem }
  .slab { min-width: 0; padding: .22rem .5rem } .scroll .stack tbody th { max-width: 11rem }
  .data td:last-child { min-width: 17rem }
  .compared td:nth-child(2) { min-width: 9rem } .data td:nth-child(6) { min-width: 7rem }
  .facts { grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr)); gap: .8rem 1.2rem }
  section { margin-top: 2rem }
}
@media screen { caption { max-width: calc(100vw - 2rem) } }
@media print {
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact }
  body { font-size: 10.5pt; background: none } main { max-width: none; padding: 0 } nav { display: none }
  .scroll, .tall { overflow: visible; max-height: none; border: 0; padding: 0 } .tall thead th { position: static }
  figure, tr, svg { break-inside: avoid } h2 { break-after: avoid } section { margin-top: 1.6rem }
  .hash { max-width: none; white-space: normal } pre { white-space: pre-wrap }
  .scroll { font-size: 8.5pt } .number, .map td, thead th { white-space: normal } th, td { padding-right: .6rem }
  .panels { grid-template-columns: repeat(auto-fill, minmax(16rem, 1fr)); gap: 1.2rem 2rem }
  details::details-content { content-visibility: visible; block-size: auto }
}
"""

STYLE = _COLOURS + _TEXT + _TABLES + _FIGURES + _MEDIA


# Wide tables: each row is one line, and the box scrolls where the window is narrow.
TABLE_STYLE = """
main.broad { max-width: 96rem }
.study th, .study td { white-space: nowrap; padding-right: .9rem } .study tbody th { max-width: none }
.inside { padding: .3rem .9rem .6rem } details { margin-bottom: .7rem } .lead { margin: 1.4rem 0 1rem }
.study { font-size: .84rem } .study td small { white-space: nowrap }
.study thead th { white-space: normal; max-width: 9rem }
@media (max-width: 40rem) {
  /* It stays while the rest scrolls, so it must leave space for the rest. */
  .study tbody th, .study td:nth-child(2) { white-space: normal; min-width: 6rem; max-width: 7rem }
}
@media print {
  @page { size: A4 landscape; margin: 11mm }
  .study { font-size: 7.5pt } .study th, .study td, .study td small { white-space: normal; padding-right: .4rem }
}
"""


def single_page(title: str, *content: object, style: str = "", class_: str | None = None) -> str:
    """The page of these parts; the same parts give the same text."""
    # The browser itself then refuses anything that is not in this file.
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("title", title),
        tag("style", Html(STYLE + style)),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', tag('main', *content, class_=class_)), lang='en')}\n"


def write_svg(path: Path, picture: Html, style: str = "") -> None:
    """A picture as a file that needs nothing else."""
    sheet = tag("style", Html(STYLE + style + "svg { background: var(--paper) }"))
    opened = picture.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    at = opened.index(">") + 1
    write_atomic(path, f"{opened[:at]}{sheet}{opened[at:]}\n".encode())

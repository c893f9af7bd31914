"""Draw what every tagging task of a run finds in a text, all in one pass of the encoder, as an SVG.

    python benchmarks/tagging_picture.py RUN [--text TEXT] [--out FILE.svg]

A bar under the letters is a span, and each task has bars of its own colour, so that spans may overlap.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from fedmtl.predict.run import load_run, predict_texts
from fedmtl.tasks.kinds.tagging import Entity, Tagged

TEXT = (
    "Cisplatin raised p53 protein levels and induced acute renal failure in two patients with ovarian carcinoma."
    " Treatment with tamoxifen lowered ESR1 expression in women with breast cancer, but caused nausea."
)
COLOURS = ("#2f6fb3", "#c46a1b", "#8a4fb0", "#3a8a4a", "#b3261e", "#5b6876")
LETTER, HEIGHT, BAR, GAP, MARGIN = 8.4, 20, 5, 3, 16
COLUMNS = 84


def found(run: str, text: str) -> dict[str, tuple[Entity, ...]]:
    loaded = load_run(run)
    (answers,) = predict_texts(loaded, [(text,)], loaded.tasks)
    return {answer.task: answer.answer.entities for answer in answers if isinstance(answer.answer, Tagged)}


def lines_of(text: str) -> list[tuple[int, str]]:
    """The text in lines, each with the position of its first letter."""
    lines, start = [], 0
    for line in textwrap.wrap(text, COLUMNS):
        start = text.index(line, start)
        lines.append((start, line))
        start += len(line)
    return lines


def picture(text: str, spans: Mapping[str, Sequence[Entity]]) -> str:
    lines = lines_of(text)
    step = HEIGHT + len(spans) * (BAR + GAP) + 14
    top = MARGIN + 26
    width, height = 2 * MARGIN + COLUMNS * LETTER, top + len(lines) * step + 4
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img"'
        ' font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14">',
        f"<title>{escape('What ' + ', '.join(spans) + ' find in a text')}</title>",
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
    ]
    at = float(MARGIN)
    for (task, entities), colour in zip(spans.items(), COLOURS, strict=False):
        kinds = ", ".join(dict.fromkeys(entity.label for entity in entities)) or "nothing"
        words = f"{task}: {kinds}"
        parts.append(f'<rect x="{at:.1f}" y="{MARGIN - 4}" width="14" height="{BAR + 3}" rx="2" fill="{colour}"/>')
        parts.append(f'<text x="{at + 19:.1f}" y="{MARGIN + 5}" font-size="12" fill="#1c2733">{escape(words)}</text>')
        at += 19 + 7.4 * len(words) + 18
    for row, (start, line) in enumerate(lines):
        y = top + row * step + 14
        parts.append(
            f'<text x="{MARGIN}" y="{y}" textLength="{len(line) * LETTER:.1f}" lengthAdjust="spacingAndGlyphs"'
            f' fill="#1c2733" xml:space="preserve">{escape(line)}</text>'
        )
        for number, ((task, entities), colour) in enumerate(zip(spans.items(), COLOURS, strict=False)):
            for entity in entities:
                first, last = max(entity.start, start) - start, min(entity.end, start + len(line)) - start
                if first < last:
                    words = f"{task}: {entity.label} {entity.probability:.2f}"
                    parts.append(
                        f'<rect x="{MARGIN + first * LETTER:.1f}" y="{y + 6 + number * (BAR + GAP)}" height="{BAR}"'
                        f' width="{(last - first) * LETTER:.1f}" rx="2" fill="{colour}">'
                        f"<title>{escape(words)}</title></rect>"
                    )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--out", type=Path, default=Path("tagging-example.svg"))
    given = parser.parse_args()
    spans = found(given.run, given.text)
    given.out.write_text(picture(given.text, spans), encoding="utf-8")
    for task, entities in spans.items():
        print(
            f"{task}: " + "; ".join(f"{e.label} {given.text[e.start : e.end]} ({e.probability:.2f})" for e in entities)
        )


if __name__ == "__main__":
    main()

"""Who holds what: examples per client and task, with their labels."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from .bar_chart import Bar, bar_chart, bar_range
from .contents import section
from .formats import MISSING, count, number, plural
from .labels import label_colours, label_legend, segments, spell
from .markup import Html, join, notes, table, tag
from .record import Event, Run
from .scales import Frame, svg

# Up to here a table shows every client; above it, one thin bar per client and task does.
MOST_ROWS = 24
# And above this many, evenly spaced ones of them: more bars than pixels show nothing.
MOST_BARS = 240
_FULL = Frame(x=(0, 1), y=(0, 1), width=96, height=10, left=0, right=0, top=0, bottom=0)


def partition(run: Run) -> Html:
    if not run.clients:
        return section("partition", tag("p", "The run recorded no clients."))
    shown = _map(run) if len(run.clients) <= MOST_ROWS else _strips(run)
    return section("partition", *shown)


def holdings(run: Run, task: str) -> dict[str, Event]:
    """What each client that has examples of a task holds of it."""
    shares = {client: info.get("tasks", {}).get(task) for client, info in run.clients.items()}
    return {client: share for client, share in shares.items() if share}


def takes_part(info: Event) -> str:
    """The rounds a client takes part in, in words."""
    first, last = info.get("from_round") or 1, info.get("until_round")
    if last is None:
        return "all" if first <= 1 else f"from {first}"
    return f"until {last}" if first <= 1 else f"{first}–{last}"


def _map(run: Run) -> list[Html]:
    tasks = [task for task in run.tasks if holdings(run, task)]
    colours = {task: label_colours(run, task) for task in tasks}
    largest = {task: max(_examples(share) for share in holdings(run, task).values()) for task in tasks}
    rows = [
        (
            client,
            takes_part(info),
            *(_cell(info.get("tasks", {}).get(task), colours[task], largest[task]) for task in tasks),
        )
        for client, info in run.clients.items()
    ]
    sums = (sum(_examples(share) for share in holdings(run, task).values()) for task in tasks)
    totals = (tag("span", count(total), class_="many") for total in sums)
    rows.append((tag("em", "all clients"), "", *totals))
    keys = [tag("div", tag("b", task), label_legend(colours[task]), class_="key") for task in tasks]
    guide = "Training examples. Bars: length relative to the task's largest client, colours are labels."
    box = table("Examples per client and task", ("Client", "Rounds", *tasks), rows, words=range(99), class_="map")
    return [tag("p", guide, class_="guide"), tag("div", *keys, class_="keys"), box]


def _cell(share: Event | None, colours: Mapping[str, str], largest: float) -> Html:
    if not share:
        return tag("span", "·", class_="none")
    examples = _examples(share)
    parts = segments(share.get("labels") or {}, colours) or ((examples, "other"),)
    total = sum(many for many, _ in parts)
    scale = _FULL.width * examples / largest / total if largest and total else 0.0
    rects, x = [], 0.0
    for many, colour in parts:
        rects.append(tag("rect", class_=colour, x=x, width=many * scale, y=0, height=_FULL.height))
        x += many * scale
    words = f"{count(examples)} examples: {spell(share.get('labels') or {})}"
    return join((tag("span", count(examples), class_="many"), svg(_FULL, words, words, *rects)), " ")


def _examples(share: Event) -> float:
    return number(share.get("examples")) or 0.0


def _strips(run: Run) -> list[Html]:
    tasks = [task for task in run.tasks if holdings(run, task)]
    guide = "Each bar is one client, the largest first; its height is the number of training examples."
    late: dict[str, list[str]] = {}
    for client, info in run.clients.items():
        if (words := takes_part(info)) != "all":
            late.setdefault(words, []).append(client)
    lines = (f"Rounds {words}: {_names(clients)}." for words, clients in late.items())
    panels = tag("div", *(_strip(run, task) for task in tasks), class_="panels")
    return [tag("p", guide, class_="guide"), panels, notes(lines)]


def _names(clients: list[str]) -> str:
    more = len(clients) - MOST_ROWS
    return ", ".join(clients[:MOST_ROWS]) + (f" and {count(more)} more" if more > 0 else "")


def _strip(run: Run, task: str) -> Html:
    colours = label_colours(run, task)
    held = sorted(holdings(run, task).items(), key=lambda item: (-_examples(item[1]), item[0]))
    step = -(-len(held) // MOST_BARS)
    bars = [_client_bar(i, client, share, colours) for i, (client, share) in enumerate(held[::step])]
    sizes = [_examples(share) for _, share in held]
    spread = f"{count(min(sizes))}–{count(max(sizes))} examples (median {count(median(sizes))})"
    frame = Frame(x=(0, len(bars)), y=bar_range(bars), height=130, bottom=8)
    chart = bar_chart(frame, bars, title=f"{task}: examples per client", description=spread, axis=Html())
    shown = f", one in {step} is drawn" if step > 1 else ""
    caption = tag("figcaption", tag("b", task), f"{plural(len(held), 'client')}, {spread}{shown}")
    return tag("figure", caption, chart, label_legend(colours))


def _client_bar(i: int, client: str, share: Event, colours: Mapping[str, str]) -> Bar:
    parts = segments(share.get("labels") or {}, colours) or ((_examples(share), "other"),)
    words = f"{client}: {count(share.get('examples', MISSING))} examples: {spell(share.get('labels') or {})}"
    return Bar(i + 0.06, i + 0.94, parts, words)

"""The data sections show where each task's examples come from and which client has how many of which label."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from fedmtl.report.charts import Bar, Frame, bar_chart, bar_range, svg
from fedmtl.report.formats import MISSING, count, known, percent, plural, tick
from fedmtl.report.markup import Html, join, legend, notes, table, tag
from fedmtl.report.outline import section
from fedmtl.report.record import Run
from fedmtl.report.results import task_name
from fedmtl.runs.events import ClientFacts, ClientShare, DataEvent, TaskFacts
from fedmtl.runs.summary import passes

MOST_COLOURS = 7
# Up to here a table shows every client; above it, one thin bar per client and task does.
MOST_ROWS = 24
# And above this many, evenly spaced ones of them: more bars than pixels show nothing.
MOST_BARS = 240
_FULL = Frame(x=(0, 1), y=(0, 1), width=96, height=10, left=0, right=0, top=0, bottom=0)


def label_colours(run: Run, task: str) -> dict[str, str]:
    """Label -> CSS class: a hue for a category, a shade for a range of scores, `other` for rare ones."""
    counts = _counts(run, task)
    if not run.task(task).labels:
        last = max(1, len(counts) - 1)
        return {label: f"shade{round(i * 7 / last)}" for i, label in enumerate(counts)}
    if len(counts) <= MOST_COLOURS:
        return {label: f"class{i}" for i, label in enumerate(counts)}
    frequent = sorted(counts, key=lambda label: -counts[label])[: MOST_COLOURS - 1]
    return {label: f"class{frequent.index(label)}" if label in frequent else "other" for label in counts}


def _counts(run: Run, task: str) -> dict[str, float]:
    """Examples per label over all clients, in the task's order of labels."""
    totals: dict[str, float] = dict.fromkeys(run.task(task).labels or (), 0.0)
    shares = [client.tasks[task] for client in run.clients.values() if task in client.tasks]
    for label, many in (pair for share in shares for pair in (share.labels or {}).items()):
        totals[label] = totals.get(label, 0.0) + many
    if not run.task(task).labels:
        return dict(sorted(totals.items(), key=lambda item: _lower_end(item[0])))
    return totals


def _lower_end(label: str) -> float:
    """Where a range such as "0.0-1.0" or "-1.0-0.0" begins; anything else comes first."""
    try:
        return float(label[0] + label[1:].split("-")[0])
    except (ValueError, IndexError):
        return float("-inf")


def segments(labels: Mapping[str, float], colours: Mapping[str, str]) -> tuple[tuple[float, str], ...]:
    """Stacked (count, CSS class) in the order of `colours`, with the labels of one class added up."""
    totals: dict[str, float] = {}
    for label, colour in colours.items():
        totals[colour] = totals.get(colour, 0.0) + labels.get(label, 0.0)
    return tuple((many, colour) for colour, many in totals.items() if many)


def label_legend(colours: Mapping[str, str]) -> Html:
    named = [(colour, label) for label, colour in colours.items() if colour != "other"]
    rest = list(colours.values()).count("other")
    return legend((*named, ("other", f"{rest} other labels")) if rest else named)


def spell(labels: Mapping[str, float]) -> str:
    """Label counts in words, the largest first where there are many."""
    pairs = list(labels.items())
    if len(pairs) > 12:
        pairs = sorted(pairs, key=lambda pair: -pair[1])[:12]
    words = ", ".join(f"{label} {count(many)}" for label, many in pairs)
    return words + ", …" if len(labels) > len(pairs) else words


def partition(run: Run) -> Html:
    if not run.clients:
        return section("partition", tag("p", "The run recorded no clients."))
    shown = _map(run) if len(run.clients) <= MOST_ROWS else _strips(run)
    return section("partition", *shown)


def holdings(run: Run, task: str) -> dict[str, ClientShare]:
    """What each client that has examples of a task has of it."""
    shares = {client: facts.tasks.get(task) for client, facts in run.clients.items()}
    return {client: share for client, share in shares.items() if share not in (None, ClientShare())}


def takes_part(facts: ClientFacts) -> str:
    """The rounds a client takes part in, in words."""
    first, last = facts.from_round or 1, facts.until_round
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
            takes_part(facts),
            *(_cell(facts.tasks.get(task), colours[task], largest[task]) for task in tasks),
        )
        for client, facts in run.clients.items()
    ]
    sums = (sum(_examples(share) for share in holdings(run, task).values()) for task in tasks)
    totals = (tag("span", count(total), class_="many") for total in sums)
    rows.append((tag("em", "all clients"), "", *totals))
    keys = [tag("div", tag("b", task), label_legend(colours[task]), class_="key") for task in tasks]
    guide = "Training examples. Bars: length relative to the task's largest client, colours are labels."
    box = table("Examples per client and task", ("Client", "Rounds", *tasks), rows, words=range(99), class_="map")
    return [tag("p", guide, class_="guide"), tag("div", *keys, class_="keys"), box]


def _cell(share: ClientShare | None, colours: Mapping[str, str], largest: float) -> Html:
    if share is None or share == ClientShare():
        return tag("span", "·", class_="none")
    examples = _examples(share)
    parts = segments(share.labels or {}, colours) or ((examples, "other"),)
    total = sum(many for many, _ in parts)
    scale = _FULL.width * examples / largest / total if largest and total else 0.0
    rects, x = [], 0.0
    for many, colour in parts:
        rects.append(tag("rect", class_=colour, x=x, width=many * scale, y=0, height=_FULL.height))
        x += many * scale
    words = f"{count(examples)} examples: {spell(share.labels or {})}"
    return join((tag("span", count(examples), class_="many"), svg(_FULL, words, words, *rects)), " ")


def _examples(share: ClientShare) -> float:
    return float(share.examples or 0)


def _strips(run: Run) -> list[Html]:
    tasks = [task for task in run.tasks if holdings(run, task)]
    guide = "Each bar is one client, the largest first; its height is the number of training examples."
    late: dict[str, list[str]] = {}
    for client, facts in run.clients.items():
        if (words := takes_part(facts)) != "all":
            late.setdefault(words, []).append(client)
    lines = (f"Rounds {words}: {_names(clients)}." for words, clients in late.items())
    panels = tag("div", *(_strip(run, task) for task in tasks), class_="panels")
    return [tag("p", guide, class_="guide"), panels, notes(lines)]


def _names(clients: list[str]) -> str:
    more = len(clients) - MOST_ROWS
    return ", ".join(clients[:MOST_ROWS]) + (f" and {count(more)} more" if more > 0 else "")


def _strip(run: Run, task: str) -> Html:
    colours = label_colours(run, task)
    shares = sorted(holdings(run, task).items(), key=lambda item: (-_examples(item[1]), item[0]))
    step = -(-len(shares) // MOST_BARS)
    bars = [_client_bar(i, client, share, colours) for i, (client, share) in enumerate(shares[::step])]
    sizes = [_examples(share) for _, share in shares]
    spread = f"{count(min(sizes))}–{count(max(sizes))} examples (median {count(median(sizes))})"
    frame = Frame(x=(0, len(bars)), y=bar_range(bars), height=130, bottom=8)
    chart = bar_chart(frame, bars, title=f"{task}: examples per client", description=spread, axis=Html())
    shown = f", one in {step} is drawn" if step > 1 else ""
    caption = tag("figcaption", tag("b", task), f"{plural(len(shares), 'client')}, {spread}{shown}")
    return tag("figure", caption, chart, label_legend(colours))


def _client_bar(i: int, client: str, share: ClientShare, colours: Mapping[str, str]) -> Bar:
    parts = segments(share.labels or {}, colours) or ((_examples(share), "other"),)
    words = f"{client}: {count(share.examples)} examples: {spell(share.labels or {})}"
    return Bar(i + 0.06, i + 0.94, parts, words)


def datasets(run: Run) -> Html:
    if not run.data:
        return section("data", tag("p", "The run recorded no data."))
    rows = [(task_name(run, task), *_row(run, task, event)) for task, event in run.data.items()]
    head = ("Task", "Kind", "Source", "Train", "Passes", "Cut short", "Validation", "Labels in train")
    guide = (
        "“Passes” is how often the training examples, those of all clients together, were trained on."
        " “Cut short” counts training texts longer than the encoder reads."
    )
    if any(event.windowed for event in run.data.values()):
        guide += " Texts in windows are read in several sequences, of which none is longer than that."
    return section(
        "data",
        table("Examples per task", head, rows, words={1, 2, 7}, class_="data"),
        tag("p", guide, class_="guide"),
    )


def _row(run: Run, task: str, event: DataEvent) -> list[object]:
    facts = run.task(task)
    validation: object = count(event.validation)
    if event.validation_cut:
        alike = f", {plural(event.repeated, 'repeated text')} on one side" if event.repeated else ""
        validation = join((validation, tag("small", f"cut from train{alike}")), " ")
    return [
        facts.kind or MISSING,
        known(event.source),
        count(event.train),
        _passes(run, task, event),
        _truncated(event),
        validation,
        _labels(facts, event),
    ]


def _passes(run: Run, task: str, event: DataEvent) -> str:
    found = passes(event.train, run.rounds.values(), task)
    return MISSING if found is None else f"{found:.2f}"


def _truncated(event: DataEvent) -> Html:
    share = percent(event.truncated / event.train) if event.truncated and event.train else ""
    parts = [count(event.truncated), tag("small", share)]
    if event.windowed:
        parts.append(tag("small", f"{event.windowed:,} in {event.windows or 0:,} windows"))
    return join(parts, " ")


def _labels(facts: TaskFacts, event: DataEvent) -> str:
    if event.labels:
        return spell(event.labels)
    found = event.quantiles or ()
    values = list(found.values() if isinstance(found, dict) else found)
    if not values:
        return MISSING
    span = facts.score_range
    within = f" on a scale of {span[0]:g} to {span[1]:g}" if span else ""
    words = ", ".join(MISSING if value is None else tick(value, 0.01) for value in values)
    return f"quantiles {words}{within}"

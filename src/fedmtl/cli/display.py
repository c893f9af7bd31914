"""What a person sees of a run: a live display in a terminal, plain lines elsewhere, its pace and the time left."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Sequence
from statistics import median

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from fedmtl.cli.progress import Detail
from fedmtl.cli.tables import (
    amount,
    duration,
    number,
    profile_table,
    result_notes,
    results_table,
    round_lines,
    summary_lines,
)
from fedmtl.cli.terminal import Terminal, stamped
from fedmtl.foreign import printable
from fedmtl.runs.event_lines import Event, LiveEvent, round_of
from fedmtl.runs.events import (
    AggregationEvent,
    AnswerEvent,
    ClientsEvent,
    DataEvent,
    EvaluationEvent,
    FailureEvent,
    PlanEvent,
    RemarkEvent,
    ResumedEvent,
    RoundEvent,
    SiteEvent,
    StartEvent,
    TeacherEvent,
    WaitingEvent,
    WarningEvent,
)
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events
from fedmtl.runs.privacy import privacy_lines
from fedmtl.runs.summary import summarize
from fedmtl.runs.verdicts import verdicts

# The last rounds tell most: early ones start workers, and clients may join.
RECENT = 5
# So many tasks have their score in a round's line.
MOST_TASKS = 6
# What `--quiet` lets through.
WARNINGS = (AggregationEvent, FailureEvent, RemarkEvent, ResumedEvent, WarningEvent)


class Pace:
    """Follows a run's events; `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_rounds = 0
        self._number = 0
        self._samples = 0
        self._opened = clock()
        self._seconds: list[float] = []
        self._rate: float | None = None

    def see(self, event: Event) -> None:
        """Take note of an event as it happens."""
        if isinstance(event, StartEvent):
            self._num_rounds = event.num_rounds or 0
        elif isinstance(event, AnswerEvent):
            self._samples += event.samples
            spent = self._clock() - self._opened
            # A few answers say little: until half a round has passed, the last round's rate stands.
            if self._samples and spent > (self._seconds[-1] / 2 if self._seconds else 0):
                self._rate = self._samples / spent
        elif isinstance(event, RoundEvent):
            self._number = event.round
            if event.samples:
                seconds = event.seconds or 0.0
                self._seconds = [*self._seconds, seconds][-RECENT:]
                self._rate = event.samples / seconds if seconds > 0 else self._rate
            self._opened, self._samples = self._clock(), 0

    @property
    def samples_per_second(self) -> float | None:
        """Samples trained per second of the round, with all that belongs to a round."""
        return self._rate

    @property
    def seconds_left(self) -> float | None:
        """None until a round of training has shown how long one takes."""
        if not self._seconds:
            return None
        one, left = median(self._seconds), self._num_rounds - self._number
        return max(0.0, one * left - min(one, self._clock() - self._opened))

    def words(self) -> str:
        """The rate and the time left in words, as far as they are known."""
        parts = [] if self._rate is None else [f"{self._rate:,.0f} samples/s"]
        left = self.seconds_left
        if left is not None and self._number < self._num_rounds:
            parts.append(f"{duration(left)} left")
        return ", ".join(parts)


class PlainDisplay:
    """One line a round, and one per thing that happened beside it; with `--verbose` also the guide's lines."""

    def __init__(self, terminal: Terminal, detail: Detail = Detail.short) -> None:
        self.terminal = terminal
        self.detail = detail
        # What capabilities say of a round that is not over: it comes below the round's first line.
        self.waiting_lines: list[str] = []
        self.start: StartEvent | None = None
        self.scores: dict[str, tuple[str, float | None]] = {}
        self.skipped = -1
        self.name = "the run"
        self.is_deployed = False
        self.has_times = False
        self.names_metrics = True
        self.shows_time_left = True
        self.pace = Pace()

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __call__(self, event: Event) -> None:
        self.pace.see(event)
        lines = self.lines(event)
        number = round_of(event)
        if self.detail is Detail.quiet and not isinstance(event, WARNINGS):
            return
        if isinstance(event, ResumedEvent) or number is None or number > self.skipped:
            for line in lines:
                self.say(stamped(line) if self.has_times else line)

    def say(self, line: str) -> None:
        self.terminal.print(line, markup=False)

    def lines(self, event: Event) -> Sequence[str]:
        """What is shown of an event: a kind that is not named here says it itself."""
        match event:
            case ResumedEvent():
                return self._resumed(event)
            case StartEvent():
                self.start = event
                version, mode, seed = (_known(value) for value in (event.version, event.mode, event.seed))
                return [f"fedmtl {version}, {mode}, {_where(event)}, seed {seed}"]
            case DataEvent():
                return [_data_line(event)]
            case ClientsEvent() if len(event.clients) == 1 and self.start and (self.start.workers or 0) > 1:
                return ["  one client: its steps follow one another on one core, and the other workers only score"]
            case TeacherEvent():
                return [f"  the teacher answers {event.examples:,} examples of {event.task}"]
            case PlanEvent(round=None):
                return summary_lines(self.start or StartEvent(), event)
            case WaitingEvent():
                self.is_deployed = True
                return [f"listening on {event.address}, waiting for {', '.join(event.clients) or 'enrolled sites'}"]
            case SiteEvent():
                return [f"  {event.client} is here with {', '.join(event.tasks)}"]
            case FailureEvent():
                return [f"  {event.client} failed in round {event.round}: {event.reason}"]
            case RemarkEvent():
                return [f"  note: {event.client}{' ' if event.client else ''}{event.reason}"]
            case AggregationEvent():
                return event.lines()
            case EvaluationEvent():
                metric = self._metric(event.task)
                self.scores[event.task] = (metric, event.metrics.get(metric))
                return []
            case RoundEvent():
                return self._round(event)
            case _ if isinstance(event, LiveEvent) or round_of(event) is None:
                return event.lines()
            case _:
                if (round_of(event) or 0) > self.skipped:
                    self.waiting_lines += event.lines()
                return []

    def _round(self, event: RoundEvent) -> list[str]:
        noted, self.waiting_lines = self.waiting_lines, []
        if self.detail is Detail.verbose:
            return [*round_lines(event, self.start or StartEvent()), *noted, self.round_line(event)]
        return [self.short_line(event), *noted]

    def short_line(self, event: RoundEvent) -> str:
        """The round, every task's main score, and the seconds; the metrics are named in the first line alone."""
        total = f"/{self.start.num_rounds}" if self.start and self.start.num_rounds else ""
        scores = {task: f"{metric if self.names_metrics else ''} {number(score)}".strip()
                  for task, (metric, score) in self.scores.items()}  # fmt: skip
        if scores and event.round > self.skipped:
            self.names_metrics = False
        words = ", ".join(f"{task} {score}" for task, score in list(scores.items())[:MOST_TASKS])
        if len(scores) > MOST_TASKS:
            words += f", {len(scores) - MOST_TASKS} more, mean {number(event.overall)}"
        spent = [f"{duration(event.seconds or 0.0)}{self._overhead(event)}"]
        left = self.pace.seconds_left
        if self.shows_time_left and left:
            spent.append(f"{duration(left)} left")
        self.scores = {}
        return f"round {event.round}{total}: {words or 'not evaluated'} ({', '.join(spent)})"

    def _resumed(self, event: ResumedEvent) -> list[str]:
        """Say what a resume goes on from; its earlier rounds come again as events, and are not printed again."""
        self.skipped = event.round
        return [
            *(f"  {problem}" for problem in event.broken),
            *([f"  the events of {event.missing} are lost; the weights are not"] if event.missing else []),
            f"{self.name} goes on after round {event.round}",
        ]

    def round_line(self, event: RoundEvent) -> str:
        scores = ", ".join(f"{task} {metric} {number(score)}" for task, (metric, score) in self.scores.items())
        up, down = amount(event.bytes_up or 0), amount(event.bytes_down or 0)
        wire = f"up {up}, down {down}, " if event.round else ""
        pace = self.pace.words()
        ends = f"{duration(event.seconds or 0.0)}{self._overhead(event)}{', ' if pace else ''}{pace}"
        self.scores = {}
        return f"  after round {event.round}: {scores or 'not evaluated'} ({wire}{ends})"

    def _overhead(self, event: RoundEvent) -> str:
        """The seconds of a deployment's round beyond its slowest site's training and the scoring."""
        if not self.is_deployed or not event.clients:
            return ""
        other = (event.train_seconds or 0.0) - (event.longest_client_seconds or 0.0)
        return f", {duration(other)} of it not training"

    def _metric(self, task: str) -> str:
        """The task's main metric, as the run's start named it."""
        facts = self.start.tasks.get(task.partition(":")[0]) if self.start else None
        return (facts and facts.metric) or ""

    def finish(self, run: RunFolder) -> None:
        """Print the closing table and where the report is, and where the seconds went if the run was profiled."""
        events = read_events(run)
        summary = summarize(events, run.name)
        self.terminal.print(results_table(summary), soft_wrap=False)
        for note in result_notes(summary, ends_with_best=_ends_with_best(run, events)):
            self.say(note)
        workers = self.start.workers if self.start else None
        spent = profile_table(events, 1 if workers is None else workers)
        if spent is not None:
            self.terminal.print(spent, soft_wrap=False)
        for verdict in verdicts(events, run.name):
            self.say(verdict.words)
        for line in privacy_lines(events):
            self.say(line)
        self.terminal.print(f"report: {run.report}", markup=False, soft_wrap=True)


def _ends_with_best(run: RunFolder, events: Sequence[Event]) -> bool:
    """Whether the run's model is that of its best round; a remark says where that could not be opened."""
    from fedmtl.config.file import load_config

    if load_config(run.config).training.keep != "best":
        return False
    remarks = (event.reason for event in events if isinstance(event, RemarkEvent))
    return not any((text or "").startswith("training.keep:") for text in remarks)


class LiveDisplay(PlainDisplay):
    """The same lines, with bars of rounds and clients and a table of scores that stay at the bottom."""

    def __init__(self, terminal: Terminal, detail: Detail = Detail.short) -> None:
        super().__init__(terminal, detail)
        # It stands below the bars.
        self.shows_time_left = False
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=terminal,
        )
        self.rounds: TaskID | None = None
        self.clients: TaskID | None = None
        self.history: dict[str, list[float | None]] = {}
        self.waiting = Spinner("line", "loading the data and the encoder")
        self.live = Live(self.waiting, console=terminal, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveDisplay:
        self.live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.live.__exit__(None, None, None)

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if isinstance(event, StartEvent):
            self.rounds = self.progress.add_task("rounds", total=event.num_rounds or 0)
        elif isinstance(event, ClientsEvent):
            self.clients = self.progress.add_task("clients", total=len(event.clients))
        elif isinstance(event, AnswerEvent) and self.clients is not None:
            self.progress.advance(self.clients)
        elif isinstance(event, EvaluationEvent):
            metric = self._metric(event.task)
            self.history.setdefault(event.task, []).append(event.metrics.get(metric))
        elif isinstance(event, RoundEvent):
            if self.rounds is not None:
                self.progress.update(self.rounds, completed=event.round)
            # Where clients are sampled, or join and leave, the last round's number is the best guess.
            sampled = (event.clients or 0) + (event.failures or 0)
            if self.clients is not None:
                self.progress.reset(self.clients, total=sampled or None)
        self.live.update(self._view())

    def say(self, line: str) -> None:
        """Print a line; a long one is wrapped between words and indented from its second line on."""
        line = printable(line)
        inner = len(line) - len(line.lstrip()) + 2
        for part in textwrap.wrap(
            line, self.terminal.width, subsequent_indent=" " * inner, break_on_hyphens=False, break_long_words=False
        ):
            super().say(part)

    def _view(self) -> RenderableType:
        if self.start is None:
            return self.waiting
        table = Table(box=None, pad_edge=False)
        for column in ("task", "metric", "start", "best", "now"):
            table.add_column(column, justify="left" if column in ("task", "metric") else "right")
        for task, scores in self.history.items():
            known = [score for score in scores if score is not None]
            best = max(known) if known else None
            table.add_row(task, self._metric(task), number(scores[0]), number(best), number(scores[-1]))
        parts: list[RenderableType] = [*([table] if self.history else []), self.progress]
        pace = self.pace.words()
        return Group(*parts, Text(pace)) if pace else Group(*parts)


def _known(value: object) -> str:
    return "–" if value is None else str(value)


def _where(event: StartEvent) -> str:
    device = _known(event.device)
    if event.stack:
        how = f"{event.stack} clients at once, {_known(event.precision)}"
    elif event.workers:
        how = f"{event.workers} worker {'process' if event.workers == 1 else 'processes'}"
    else:
        how = "in this process"
    return f"{device}, {how}, {event.kernels} kernels" if event.kernels else f"{device}, {how}"


def _data_line(event: DataEvent) -> str:
    cut = ", validation cut from train" if event.validation_cut else ""
    return (
        f"  {event.task}: {event.train or 0:,} train, {event.validation or 0:,} validation "
        f"({_known(event.source)}{cut}{_long_texts(event)})"
    )


def _long_texts(event: DataEvent) -> str:
    """How many texts are longer than a sequence, and what becomes of them."""
    parts = []
    if event.windowed:
        parts.append(f"{event.windowed:,} of more than {event.max_length} tokens in {event.windows or 0:,} windows")
    if event.truncated:
        sizes = (("windows", event.most_windows), ("tokens", event.max_length))
        at = next((f" at {size} {words}" for words, size in sizes if size), "")
        parts.append(f"{event.truncated:,} truncated{at}")
    return "".join(f", {part}" for part in parts)

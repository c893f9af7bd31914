"""Drives the server loop: every round becomes events, a row of results and a checkpoint."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedmtl.capabilities import trackers
from fedmtl.config import Config
from fedmtl.config.file import dump_config, load_config
from fedmtl.engines.processes import raised
from fedmtl.errors import FedmtlError
from fedmtl.experiment.baselines import compare, train_modes
from fedmtl.experiment.events import (
    changed_plan_event,
    evaluation_events,
    failure_event,
    opening_events,
    remark_event,
    round_event,
    trained_samples,
    update_event,
)
from fedmtl.experiment.prepare import Prepared, open_engine, prepare
from fedmtl.experiment.profile import profiling
from fedmtl.experiment.resume import config_event, opened_events, take_up
from fedmtl.export.encoder import write_run_encoders
from fedmtl.federation.checkpoint import save_checkpoint
from fedmtl.federation.client import drop_best, store_best
from fedmtl.federation.client_evaluation import client_evaluator
from fedmtl.federation.dispatch import ServerSettings
from fedmtl.federation.messages import (
    ClientId,
    ClientInfo,
    Engine,
    Evaluation,
    Failure,
    Job,
    Round,
    Scorer,
    State,
    Update,
)
from fedmtl.federation.server import RoundFailed, rounds
from fedmtl.model.multitask import BoundModel
from fedmtl.model.saved import save_model
from fedmtl.predict.rounds import best_model
from fedmtl.report.page import write_report
from fedmtl.runs.energy import Meter, total_energy
from fedmtl.runs.event_lines import Event, Observer, first_of, last_of
from fedmtl.runs.events import (
    AnswerEvent,
    ClientsEvent,
    DataEvent,
    DistillEvent,
    EndEvent,
    PlanEvent,
    RoundEvent,
    SharingEvent,
    WarningEvent,
)
from fedmtl.runs.folder import RunFolder, create_run, locked
from fedmtl.runs.log import Trackers, append_event, append_results, cut_back, read_events
from fedmtl.runs.summary import exposed
from fedmtl.sharing.plan import SharingPlan, Weights, weights_sha256
from fedmtl.tasks.batches import Shard
from fedmtl.tasks.check import one_label_warnings
from fedmtl.tasks.kinds.protocol import TaskKind
from fedmtl.tasks.load import TaskData
from fedmtl.tasks.metrics import averages, score, sum_predictions
from fedmtl.tasks.task import Task, owner_of_set
from fedmtl.timing import timed
from fedmtl.training.local import predict


def evaluate_at_server(state: State, server: ServerSettings, engine: Scorer, shards: dict[str, Shard]) -> Evaluation:
    """Score every task with one set of weights, spread over the engine's workers."""
    outputs = engine.predict(state, server.evaluation.batch_size)
    every = {
        name: sum_predictions(server.tasks[owner_of_set(name)], output, shards[name].labels, loss, True)
        for name, (output, loss) in outputs.items()
    }
    sums = {name: every[name] for name in server.tasks}
    scores = {name: score(server.tasks[name], total) for name, total in sums.items()}
    overall, classification = averages(list(server.tasks.values()), scores)
    further = {name: total for name, total in every.items() if name not in sums}
    return Evaluation(scores, sums, overall, classification, further=further)


OpenEngine = Callable[[Prepared, RunFolder], Engine]


class Interrupted(FedmtlError):
    """Ctrl-C or SIGTERM ended the run; its last whole round is saved, and it can be resumed."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class _Stop(BaseException):
    """A signal arrived; not an Exception, so that nothing on the way takes it for a failed client."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def start_run(
    config: Config,
    name: str,
    observe: Observer = lambda event: None,
    *,
    profile: bool = False,
    make_engine: OpenEngine = open_engine,
    compares: bool = True,
    data: Mapping[str, TaskData] | None = None,
) -> RunFolder:
    """Run a config from its start into a new folder; `profile` also tells where each round's seconds went.

    Unless it `compares`, the run is without the baselines that its config names. `data` are the config's examples
    where they are loaded already.
    """
    meter = Meter(config.energy.cpu_watts)
    prepared = replace(prepare(config, observe, data), profile=profile)
    run = create_run(Path(config.output), name, lambda run: {"config.yaml": dump_config(config).encode()})
    with locked(run.path):
        log = Log(run, observe, prepared.config, meter)
        for event in (*opening_events(prepared), config_event(prepared.config)):
            log(event)
            for words in _one_label_warnings(event, prepared) if isinstance(event, ClientsEvent) else ():
                observe(WarningEvent(words=words))
        return _compared(prepared, prepared.state, run, log, lambda: make_engine(prepared, run), compares)


def resume_run(
    run: RunFolder,
    observe: Observer = lambda event: None,
    *,
    profile: bool = False,
    make_engine: OpenEngine = open_engine,
    repair: bool = False,
    compares: bool = True,
) -> RunFolder:
    """Go on after the last whole round, with the weights the run would have had if it had never stopped.

    With `repair`, a run whose events have lost rounds goes on without them.
    """
    with locked(run.path):
        if first_of(read_events(run), DistillEvent):
            raise FedmtlError(
                f"{run.name}: was distilled, not federated; go on with `fedmtl distill --resume --name NAME`"
            )
        config = load_config(run.config)
        meter = Meter(config.energy.cpu_watts)
        prepared = replace(prepare(config, observe), profile=profile)
        state = take_up(run, prepared, observe, keeps_clients=True, repair=repair)
        for event in opened_events(run, prepared):
            observe(event)
        log = Log(run, observe, prepared.config, meter)
        return _compared(prepared, state, run, log, lambda: make_engine(prepared, run), compares)


def _one_label_warnings(event: ClientsEvent, prepared: Prepared) -> list[str]:
    labelled = [name for name, part in prepared.data.items() if part.task.kind_of.has_labels and not part.synthetic]
    counts = {
        client: {task: share.labels or {} for task, share in facts.tasks.items()}
        for client, facts in event.clients.items()
    }
    return one_label_warnings(counts, labelled)


def _compared(
    prepared: Prepared, state: State, run: RunFolder, log: Log, make_engine: Callable[[], Engine], compares: bool
) -> RunFolder:
    if not compares:
        return drive(replace(prepared, samples={}), state, run, log, make_engine)
    try:
        train_modes(prepared.config, run, log)
    except FedmtlError as error:
        log.close()
        if isinstance(error, Interrupted):
            # The run to go on with is this one, which goes on with its baseline first.
            error.args = (f"ended while a baseline was trained; go on with `fedmtl run --resume {_shown(run)}`",)
        raise
    return drive(prepared, state, run, log, make_engine)


class Log:
    """Events go to the run's file first, then to whoever watches, then to the trackers that the config names.

    `meter` counts what the session spends; without one it begins here.
    """

    def __init__(self, run: RunFolder, observe: Observer, config: Config, meter: Meter | None = None) -> None:
        self._run, self.observe = run, observe
        self.meter = meter or Meter(config.energy.cpu_watts)
        self._trackers = Trackers(trackers(config, run.path), self._remark)

    def __call__(self, event: Event) -> None:
        self._write(event)
        # A tracker may send events anywhere, and a fingerprint is for this folder alone.
        self._trackers.event(replace(event, fingerprint=None) if isinstance(event, DataEvent) else event)

    def close(self) -> None:
        self.meter.close()
        self._trackers.close()

    def _remark(self, reason: str) -> None:
        # Not to the trackers: a remark is about one of them, which would be called again.
        self._write(remark_event(0, "", reason))

    def _write(self, event: Event) -> None:
        append_event(self._run, event)
        self.observe(event)


class _Watched:
    """An engine whose updates and failures are observed as they come, after `check` has raised nothing."""

    def __init__(self, engine: Engine, observe: Observer, check: Callable[[], None]) -> None:
        self._engine, self._observe, self._check = engine, observe, check

    def clients(self) -> Mapping[ClientId, ClientInfo]:
        return self._engine.clients()

    def run(self, jobs: Iterable[Job], deadline: float) -> Iterator[Update | Failure]:
        kinds: dict[ClientId, str] = {}

        def noted() -> Iterator[Job]:
            for job in jobs:
                kinds[job.client] = job.kind
                yield job

        for result in self._engine.run(noted(), deadline):
            # A client whose code made an error of its own of a signal has not failed.
            self._check()
            if kinds.get(result.client) != "exchange":
                samples = trained_samples(result) if isinstance(result, Update) else 0
                self._observe(AnswerEvent(round=result.round, client=result.client, samples=samples))
            yield result

    def predict(self, state: State, batch_size: int) -> dict[str, tuple[np.ndarray, float]]:
        return self._engine.predict(state, batch_size)

    def close(self) -> None:
        self._engine.close()


def drive(
    prepared: Prepared,
    state: State,
    run: RunFolder,
    log: Log,
    make_engine: Callable[[], Engine],
    *,
    again: str = "fedmtl run --resume {}",
    farewell: Callable[[State], None] | None = None,
) -> RunFolder:
    """Run the rounds to the end, and leave a whole folder behind however they end.

    `again` is how a user goes on with the run {} after an interruption; `farewell` is called with the last state when
    all rounds are done and the folder is written, before the engine is closed. A signal that comes when the rounds are
    over waits until the folder is whole, and cuts the farewell short; a further one does what it did before.
    """
    try:
        with raised(_Stop) as late, late.postponed():
            _drive(prepared, state, run, log, make_engine, again, farewell)
    except _Stop as stop:
        # All rounds are done and written, or an earlier end was on its way.
        if stop.__cause__ is not None:
            raise stop.__cause__ from None
    return run


def _drive(
    prepared: Prepared,
    state: State,
    run: RunFolder,
    log: Log,
    make_engine: Callable[[], Engine],
    again: str,
    farewell: Callable[[State], None] | None,
) -> None:
    status, reason = "done", None
    error: Exception | None = None
    with ExitStack() as closing:
        closing.callback(shutil.rmtree, run.spool, ignore_errors=True)
        try:
            with raised(_Stop) as signals, profiling(run.spool) if prepared.profile else nullcontext() as spent:
                log.meter.watch(prepared.compute.device)
                engine = make_engine()
                closing.callback(engine.close)
                few = exposed(read_events(run)) if state.round == 0 and not state.progress else None
                if few is not None:
                    log.observe(WarningEvent(words=few))
                watched = _Watched(engine, log.observe, signals.check)
                last = time.perf_counter()
                evaluate = _evaluator(prepared, engine)
                for round_ in rounds(state, prepared.server, watched, evaluate):
                    signals.check()
                    now = time.perf_counter()
                    # Between its checkpoint and here, a signal would cut the events of a round back that is whole.
                    with signals.postponed():
                        _record(round_, now - last, run, log, prepared)
                        if spent is not None:
                            log(spent.take(round_.number))
                        if log.meter.is_due:
                            log(log.meter.take())
                        state, last = round_.state, now
        except RoundFailed as failed:
            status, reason, error = "failed", str(failed), failed
            for failure in failed.failures:
                log(failure_event(failure))
        except _Stop as stop:
            cut_back(run, state.round if state.progress else -1)
            reason = f"ended by {signal.Signals(stop.number).name} after round {state.round}"
            status = "interrupted"
            error = Interrupted(f"{reason}; go on with `{again.format(_shown(run))}`", stop.number)
        except Exception as unexpected:
            # Whoever watches the folder is to see that it is over.
            status, error = "failed", unexpected
            is_known = isinstance(unexpected, FedmtlError)
            reason = str(unexpected) if is_known else f"unexpected {type(unexpected).__name__}"
            with suppress(FedmtlError):
                cut_back(run, state.round if state.progress else -1)
        finally:
            log.meter.sample()
        if farewell is None or error is not None:
            closing.close()
        try:
            try:
                _finish(prepared, state, run, log, status, reason)
            finally:
                # The rounds are done, whatever becomes of the folder: nobody has to wait for more of them.
                if farewell is not None and error is None:
                    with suppress(_Stop), raised(_Stop):
                        farewell(state)
                    closing.close()
            log.close()
        except FedmtlError as later:
            # A full disk fails twice: what ended the run comes first.
            raise (error or later) from later
    if error is not None:
        raise error


def _shown(run: RunFolder) -> str:
    """What a user writes to name the run."""
    return run.name if run.path.parent == Path("runs") else str(run.path)


def _evaluator(prepared: Prepared, engine: Engine) -> Callable[[State], Evaluation]:
    if prepared.evaluates_at_clients:
        return client_evaluator(prepared.server, engine)
    shards = prepared.population.shared_validation
    return lambda state: evaluate_at_server(state, prepared.server, engine, shards)


@timed("writing", whole=True)
def _record(round_: Round, seconds: float, run: RunFolder, log: Log, prepared: Prepared) -> None:
    events: list[Event] = [
        *(update_event(update, round_.shares.get(update.client)) for update in round_.updates),
        *map(failure_event, round_.failures),
    ]
    if round_.evaluation is not None:
        events += map(failure_event, round_.evaluation.failures)
        events += evaluation_events(round_.number, round_.evaluation, prepared.server.tasks)
    events += round_.events
    if any(
        layer.before != layer.after for event in events if isinstance(event, SharingEvent) for layer in event.layers
    ):
        known = last_of(read_events(run), PlanEvent)
        assert known is not None, "a run's opening has a plan"
        events.append(changed_plan_event(prepared, round_.state, known))
    events.append(round_event(round_, seconds))
    for event in events:
        log(event)
    append_results(run, events)
    _save_state(round_.state, run, prepared)


def _save_state(state: State, run: RunFolder, prepared: Prepared) -> None:
    """Save the checkpoint; the best rounds' stay, and with them what clients of this run folder have of these rounds.

    A task that may stop early has a best round itself.
    """
    patient = [name for name, task in prepared.server.tasks.items() if task.patience is not None]
    best = {state.progress[name].best_round for name in patient if name in state.progress}
    best.add(state.best_overall[0] if state.best_overall else None)
    keep = {number for number in best if number is not None}
    if state.plan.has_personal and state.round in keep:
        for client, accepted in state.accepted.items():
            store_best(run.clients / client, accepted, state.round)
    save_checkpoint(run.checkpoints, state, keep_every=prepared.config.checkpoint.every, keep=keep)
    # Not before: a run that is killed here goes on from the checkpoint before, and its best round.
    for client in state.accepted if state.plan.has_personal else ():
        drop_best(run.clients / client, keep)


def _finish(prepared: Prepared, state: State, run: RunFolder, log: Log, status: str, reason: str | None) -> None:
    keep, (plan, weights) = _final_model(prepared, state, run, log)
    tasks = _fitted(prepared, plan, weights)
    save_model(run.model, prepared.encoder, tasks, plan, weights, prepared.config.model)
    if status == "done":
        _compare(prepared, run, log)
    log(log.meter.take())
    events = read_events(run)
    seconds = sum(event.seconds or 0.0 for event in events if isinstance(event, RoundEvent))
    log(
        EndEvent(
            status=status,
            reason=reason,
            rounds=state.round,
            seconds=seconds,
            weights_sha256=weights_sha256(weights),
            energy=total_energy(events, prepared.config.energy.grams_per_kwh),
            keep=keep,
        )
    )
    write_run_encoders(run, prepared.model, prepared.encoder, plan, weights, prepared.config)
    write_report(run.path)


def _fitted(prepared: Prepared, plan: SharingPlan, weights: Weights) -> dict[str, Task]:
    """The tasks with what their kinds fit on the server's validation examples once the weights are final."""
    tasks = dict(prepared.server.tasks)
    for name, task in tasks.items():
        shard = prepared.population.shared_validation.get(name)
        if type(task.kind_of).fitted is TaskKind.fitted or plan.has_personal or shard is None or not len(shard):
            continue
        device = torch.device(prepared.compute.device)
        prepared.model.to(device)
        bound = BoundModel(prepared.model, plan, [name], "", weights, device=device, read=True)
        outputs, _ = predict(bound, name, shard, prepared.config.evaluation.batch_size, device)
        tasks[name] = task.kind_of.fitted(task, outputs, shard.labels[shard.indices])
    return tasks


def _compare(prepared: Prepared, run: RunFolder, log: Log) -> None:
    """Write down what baselines score; where one cannot be computed, the run is as good as without, and says so."""
    rounds = read_events(run)
    try:
        for found in compare(prepared.config, prepared.samples, prepared.compute.device, rounds):
            log(found if isinstance(found, Event) else remark_event(0, "", found))
    except Exception as error:
        # The rounds are done, and no fault of a baseline may cost them.
        log(remark_event(0, "", f"not compared with all baselines: {type(error).__name__}"))


def _final_model(prepared: Prepared, state: State, run: RunFolder, log: Log) -> tuple[str, tuple[SharingPlan, Weights]]:
    """What the run ends with; where the best round cannot be opened, the last one, and the run says so."""
    try:
        kept = final_model(prepared, state, run)
    except FedmtlError as error:
        log(remark_event(state.round, "", f"training.keep: the model is that of the last round, as {error}"))
        return "last", (state.plan, state.weights)
    return "best" if prepared.config.training.keep == "best" and state.progress else "last", kept


def final_model(prepared: Prepared, state: State, run: RunFolder) -> tuple[SharingPlan, Weights]:
    """The plan and the values of the round that the config keeps; a FedmtlError where it cannot be opened."""
    if prepared.config.training.keep == "best" and state.progress:
        return best_model(run, prepared.server.tasks, prepared.server.names)
    return state.plan, state.weights

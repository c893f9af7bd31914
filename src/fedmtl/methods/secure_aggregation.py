"""Secure aggregation: the server can open sums of updates, and no single one.

Bonawitz et al. 2017, Practical Secure Aggregation for Privacy-Preserving Machine Learning. A round of training or of
scoring has four exchanges. Every client advertises two fresh public keys; shares its secrets among all clients, so that
a threshold of them can give one back; sends its update as whole numbers under masks; and those whose update came give
out what removes the masks of the sum. Masks between two clients cancel. Of a client that dropped out after it shared,
the others give out the key of its masks between two; of one whose update came, the seeds of the masks that it has for
itself; of no client both.

A client has one part in every *sum* that it belongs to: the scope of each value that it trains (`all`, `task:sst2`),
the counts and losses of each of its tasks (`counts:sst2`), or its scores (`scores:sst2`). A sum has its own masks and
seeds, so that sums of too few clients stay closed where others are opened.

Here is what becomes of the sums, and what the protection goes together with. The messages are in `secure_protocol.py`,
the client's half in `secure_client.py`, the server's exchanges in `secure_session.py`, and the arithmetic of masks and
shares in `masking.py`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from fedmtl.capabilities import Capability, find, is_known
from fedmtl.config import Config
from fedmtl.config.privacy import ClientPrivacyConfig
from fedmtl.errors import ConfigError, PolicyError
from fedmtl.federation.filters.protocol import UpdateFilter
from fedmtl.federation.messages import ClientId, Evaluation, Failure, State, Traffic, Update
from fedmtl.federation.server import RoundFailed
from fedmtl.federation.server_method import Collected, OpenRound, Scored, ServerMethod, ServerSetup, Step
from fedmtl.methods.masking import check_available, decode_numbers
from fedmtl.methods.secure_client import MaskedUpdate, answer_exchange
from fedmtl.methods.secure_protocol import (
    COUNTS,
    FEWEST,
    MOST_CLIENTS,
    NAME,
    NUM_COUNTS,
    NUMBERS,
    SCORES,
    SMALLEST_THRESHOLD,
    VALUES,
    Contribute,
    Options,
    Purpose,
    SharedNoise,
    read_request,
    sums_of,
)
from fedmtl.methods.secure_session import Session, TooFew
from fedmtl.runs.event_lines import Event
from fedmtl.runs.events import RemarkEvent, SecureAggregationEvent, WarningEvent
from fedmtl.sharing.plan import Extra, Key, SharingPlan
from fedmtl.tasks.kinds.protocol import TaskKind
from fedmtl.tasks.metrics import Sums
from fedmtl.tasks.task import Task


class SecureAggregation(ServerMethod):
    """Collects updates and scores as sums that are opened together."""

    name = NAME

    def __init__(self, options: Options, names: Sequence[str], tasks: Mapping[str, Task]) -> None:
        self._options, self._names, self._tasks = options, tuple(names), tasks
        self._said: list[Event] = []

    def collect(self, open_round: OpenRound) -> Collected:
        reason = self._too_small(open_round) if open_round.may_be_small else None
        if reason is not None:
            remark = RemarkEvent(round=open_round.number, client="", reason=reason)
            return Collected((), (), _combined(open_round.number, {}, {}), {}, (remark,), is_skipped=True)
        session = Session(self._options, open_round, "train", self._names)
        weights = open_round.state.weights
        sizes = {
            name: {VALUES: sum(weights[key].numel() for key in keys), NUMBERS: 1} if keys else {NUMBERS: NUM_COUNTS}
            for name, keys in session.keys.items()
        }
        began = time.perf_counter()
        try:
            session.run(sizes)
        except TooFew as error:
            raise RoundFailed(
                f"round {open_round.number}: {error}{_first_failure(session)}",
                open_round.number,
                _failures(session),
            ) from None
        delta: dict[Key, Tensor] = {}
        totals: dict[str, float] = {}
        error_bound = 0.0
        for name, clients in session.opened().items():
            if name.startswith(COUNTS):
                continue
            weight = float(decode_numbers(session.totals[name][NUMBERS])[0])
            if not 0 < weight <= len(clients):
                raise _no_sum(name, session)
            values = torch.from_numpy(session.numbers.decode(session.totals[name][VALUES], weight))
            error_bound = max(error_bound, session.numbers.error(len(clients), weight))
            keys = session.keys[name]
            for key, part in zip(keys, torch.split(values, [weights[key].numel() for key in keys]), strict=True):
                delta[key] = part.view(weights[key].shape).to(weights[key].dtype)
            totals[name] = weight * session.units[name]
        said = Extra({FEWEST: {name: session.fewest(name) for name in totals}})
        combined = replace(_combined(open_round.number, delta, _counts(session)), extra={NAME: said})
        opened = {name: set(clients) for name, clients in session.opened().items()}
        updates = tuple(_record(client, open_round, session, opened) for client in sorted(session.returned))
        event = self._event(session, open_round, "train", time.perf_counter() - began, error_bound)
        return Collected(updates, _failures(session), combined, totals, (*session.remarks, event))

    def _too_small(self, open_round: OpenRound) -> str | None:
        """Why no sum of a sample can be opened, which was drawn by chance and is sent nothing then."""
        plan, found = open_round.state.plan, Counter[str]()
        for tasks in open_round.clients.values():
            found.update(name for name, keys in sums_of("train", plan, self._names, tasks, "").items() if keys)
        most, needed = max(found.values(), default=0), max(self._options.min_clients, SMALLEST_THRESHOLD)
        if most >= needed:
            return None
        return (
            f"{len(open_round.clients)} clients were drawn, of whom {most} share a value, and a sum is of {needed} at"
            " least (privacy.min_clients): nobody was sent anything, and nothing moved"
        )

    def collect_scores(self, open_round: OpenRound) -> Scored:
        session = Session(self._options, open_round, "evaluate", self._names)
        tasks = {name: self._tasks[name.removeprefix(SCORES)] for name in session.keys}
        began = time.perf_counter()
        sums: dict[str, Sums] = {}
        try:
            session.run({name: {NUMBERS: num_scores(task)} for name, task in tasks.items()})
        except TooFew as error:
            words = f"nothing was scored: {error}{_first_failure(session)}"
            self._said.append(RemarkEvent(round=open_round.number, client="", reason=words))
        else:
            for name in session.opened():
                numbers = decode_numbers(session.totals[name][NUMBERS])
                sums[tasks[name].name] = tasks[name].kind_of.sums_from_numbers(tasks[name], numbers)
            event = self._event(session, open_round, "evaluate", time.perf_counter() - began)
            self._said += [*session.remarks, event]
        down = sum(one.bytes_down for one in session.traffic.values())
        up = sum(one.bytes_up for one in session.traffic.values())
        in_order = {task: sums[task] for task in self._tasks if task in sums}
        return Scored(in_order, tuple(sorted(session.returned)), _failures(session), Traffic(down, up))

    def after_evaluation(self, state: State, evaluation: Evaluation) -> Step:
        said, self._said = tuple(self._said), []
        return Step(state, said)

    def _event(
        self, session: Session, open_round: OpenRound, purpose: Purpose, seconds: float, error: float | None = None
    ) -> SecureAggregationEvent:
        longest = max((one.seconds for one in session.traffic.values()), default=0.0)
        return SecureAggregationEvent(
            round=open_round.number,
            purpose=purpose,
            clients=len(session.roster),
            returned=len(session.returned),
            threshold=session.threshold,
            min_clients=max(map(session.minimum, session.keys)),
            opened={name: len(clients) for name, clients in session.opened().items()},
            closed={name: len(clients) for name, clients in session.closed().items()},
            dropped=dict(session.dropped),
            step=session.numbers.step if purpose == "train" else None,
            error=error,
            seconds=max(0.0, seconds - longest),
            bytes_up=session.exchanged.bytes_up,
            bytes_down=session.exchanged.bytes_down,
        )


def _no_sum(name: str, session: Session) -> RoundFailed:
    """The end of a round in which a sum's weights cannot be those of its clients."""
    number = session.number
    return RoundFailed(
        f"round {number}: the masks of {name} do not cancel: a client sent something else than its update, or was told"
        f" something else than the others; it had {len(session.returned)} clients",
        number,
        _failures(session),
    )


def _first_failure(session: Session) -> str:
    failures = _failures(session)
    return f"; {len(failures)} failed, the first was {failures[0].client}: {failures[0].reason}" if failures else ""


def _failures(session: Session) -> tuple[Failure, ...]:
    return tuple(session.failures[client] for client in sorted(session.failures))


def _record(
    client: ClientId, open_round: OpenRound, session: Session, opened: Mapping[str, Collection[ClientId]]
) -> Update:
    """That a client returned an update, of which values; how many examples it has is not known."""
    empty = torch.empty(0, device="meta")
    delta = {key: empty for name, keys in session.keys.items() if client in opened.get(name, ()) for key in keys}
    tasks = open_round.clients[client]
    return Update(open_round.number, client, tasks, delta, None, {}, {}, traffic=session.traffic[client])


def _counts(session: Session) -> dict[str, np.ndarray]:
    """Of every task whose counts could be opened: examples, examples seen, losses times examples, examples of those."""
    opened = [name for name in session.opened() if name.startswith(COUNTS)]
    return {name.removeprefix(COUNTS): decode_numbers(session.totals[name][NUMBERS]) for name in opened}


def _combined(number: int, delta: Mapping[Key, Tensor], counts: Mapping[str, np.ndarray]) -> Update:
    return Update(
        number,
        "",
        tuple(counts),
        delta,
        None,
        {task: max(1, round(found[0])) for task, found in counts.items()},
        {task: float(found[2] / found[3]) for task, found in counts.items() if found[3] >= 1},
        seen={task: max(0, round(found[1])) for task, found in counts.items()},
    )


def num_scores(task: Task) -> int:
    """How many numbers a client's scores of a task are."""
    kind = task.kind_of
    nothing = kind.sum_outputs(
        task, np.zeros((0, kind.num_outputs(task))), kind.blank_labels(0), 0.0, keep_pairs=False, broken=0
    )
    numbers = kind.sums_to_numbers(task, nothing)
    assert numbers is not None, "other kinds are refused before the first round"
    return len(numbers)


KEYS_OF = {
    "scaffold": "methods.scaffold",
    "adaptive_sharing": "sharing.adaptive",
    "pcgrad": "training.gradients",
}


def conflict(config: Config) -> str | None:
    """Why a config cannot have its updates summed under masks: the key, what was found, and what to write."""
    federation, own = config.federation, "privacy.secure_aggregation"
    for key, rule in federation.aggregation.looks_at_updates().items():
        return f"{key}: found {rule} with {own}, which needs single updates; write mean"
    if federation.max_share is not None:
        return f"federation.max_share: found with {own}, under which no share is known; leave it out"
    if config.wire.up != "fp32":
        return f"wire.up: found {config.wire.up} with {own}, whose whole numbers cannot be shortened; write fp32"
    if federation.vocabulary_slices:
        return (
            f"federation.vocabulary_slices: found true with {own}, and the rows that a client is sent tell its words;"
            " write false"
        )
    if config.evaluation.share_pairs:
        return f"evaluation.share_pairs: found with {own}, under which single predictions do not leave; leave it out"
    if federation.clients_per_round is not None and federation.clients_per_round < config.privacy.min_clients:
        return (
            f"federation.clients_per_round: found {federation.clients_per_round}, and a sum has privacy.min_clients,"
            f" {config.privacy.min_clients}, at least; sample more"
        )
    if config.privacy.client is not None and config.privacy.client.noise_at == "server":
        return (
            f"privacy.client.noise_at: found server with {own}, under which the server cannot clip single updates;"
            " write clients"
        )
    return None


def _refuse_senders(config: Config, plan: SharingPlan, names: Sequence[str]) -> None:
    """Raise for a method that sends something of a single client, or changes a single update at the server."""
    from fedmtl.capabilities import switched_on

    for name in switched_on(config):
        if name == NAME or not is_known(name):
            continue
        capability = find(name)
        options = (
            config.methods.get(name)
            if capability.client_options is None
            else capability.client_options(config, plan, names)
        )
        if options is None:
            continue
        key = KEYS_OF.get(name, f"methods.{name}")
        if capability.sends and not capability.is_quiet_under_masks:
            raise ConfigError(
                f"{key}: found with privacy.secure_aggregation, and it needs more of single clients than sums; leave"
                " one of them out"
            )
        made = capability.update_filter
        if made is not None and getattr(made, "at_server", None) is not UpdateFilter.at_server:
            raise ConfigError(
                f"{key}: found with privacy.secure_aggregation, and it changes single updates at the server; leave one"
                " of them out"
            )


def _is_on(config: Config) -> bool:
    """Baselines sum nothing over clients but in single-task federations."""
    return config.privacy.secure_aggregation is not None and config.mode.startswith("federated")


def _client_options(config: Config, plan: SharingPlan, names: Sequence[str]) -> dict[str, Any] | None:
    given = config.privacy.secure_aggregation
    if given is None or not _is_on(config):
        return None
    check_available()
    reason = conflict(config)
    if reason is not None:
        raise ConfigError(reason)
    _refuse_senders(config, plan, names)
    return Options(
        bits=given.bits,
        max_value=given.max_value,
        threshold=given.threshold,
        min_clients=config.privacy.min_clients,
        average=config.federation.average,
        max_norm=config.federation.max_update_norm,
        noise=None if config.privacy.client is None else _shared_noise(config.privacy.client),
    ).model_dump(mode="json")


def _shared_noise(client: ClientPrivacyConfig) -> SharedNoise:
    return SharedNoise(
        max_norm=client.max_norm,
        bound=client.bound,
        delta=client.delta,
        epsilon=client.epsilon,
        noise_multiplier=client.noise_multiplier,
    )


def _open(setup: ServerSetup) -> SecureAggregation | None:
    if not _is_on(setup.config):
        return None
    names = list(setup.model.canonical())
    is_scored = setup.config.evaluation.where == "clients" or setup.plan.has_personal
    for name, task in setup.tasks.items() if is_scored else ():
        if type(task.kind_of).sums_from_numbers is TaskKind.sums_from_numbers:
            raise ConfigError(
                f"tasks.{name}.kind: found {task.kind_of.name}, whose scores cannot be added up under masks; write"
                " `evaluation.where: server`, or leave privacy.secure_aggregation out"
            )
    if setup.clients is not None:
        _check_companies(setup, names, is_scored)
    return SecureAggregation(Options.model_validate(setup.settings.methods[NAME]), names, setup.tasks)


def _check_companies(setup: ServerSetup, names: Sequence[str], is_scored: bool) -> None:
    """Raise for a scope that never has enough clients, and for more clients than there can be."""
    assert setup.clients is not None
    least = setup.config.privacy.min_clients
    scopes: dict[str, set[ClientId]] = {}
    for task, clients in setup.clients.items():
        for scope in sums_of("train", setup.plan, names, [task], ""):
            scopes.setdefault(scope, set()).update(clients)
    everybody = {client for clients in setup.clients.values() for client in clients}
    sampled = setup.config.federation.clients_per_round or len(everybody)
    if min(sampled, len(everybody)) > MOST_CLIENTS:
        raise ConfigError(
            f"federation.clients_per_round: {len(everybody)} clients take part in a round, and with"
            f" privacy.secure_aggregation at most {MOST_CLIENTS} can; sample fewer"
        )
    for scope, found in scopes.items():
        if len(found) < least and not scope.startswith(COUNTS):
            task = scope.removeprefix("task:")
            remedy = f'{{"heads.{task}.*": client}} before the other sharing.rules' if task in setup.tasks else "client"
            raise ConfigError(
                f"privacy.min_clients: found {least}, and {len(found)} clients have the values of scope {scope}, which"
                f" would never move; let more clients have it, keep it at the clients ({remedy}), or lower min_clients"
            )
    for task, clients in setup.clients.items():
        if is_scored and len(clients) < least:
            setup.observe(
                WarningEvent(
                    words=f"{task} has {len(clients)} clients and privacy.min_clients is {least}: its scores and losses"
                    " are not opened"
                )
            )


def _check_received(extra: Extra, tasks: Mapping[str, Task], options: Mapping[str, Any]) -> str | None:
    """Why it is neither an exchange nor what comes with a job."""
    try:
        if "step" in extra.values:
            read_request(extra)
        elif extra.tensors or Contribute.model_validate(dict(extra.values)) is None:
            return "the job brings tensors of secure aggregation, which has none"
    except (ValidationError, PolicyError):
        return "the job's part of secure aggregation cannot be read"
    return None


CAPABILITY = Capability(
    NAME,
    client_options=_client_options,
    server=_open,
    check_received=_check_received,
    update_filter=MaskedUpdate,
    exchange=answer_exchange,
)

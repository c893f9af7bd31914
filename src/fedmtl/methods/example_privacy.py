"""Example-level differential privacy: DP-SGD at the clients, with an account of what was released of each task.

The unit is one example of one task at one client; a text in two tasks, or at two clients, is two examples. Data sets
are neighbours if one has one example more. The statement is about updates; losses, numbers of examples and of labels
and validation scores leave a client as they are without noise.

What a client draws, counts and refuses is in `example_account.py`, how it clips and adds noise in
`example_gradients.py`. Here is the server's half: it has the clients' ledgers from their updates, counts jobs without
an accepted update as done, and says what all of it comes to. The checks are here too: what goes together with noise on
gradients, what clients send, and what a site's policy requires.

Under `privacy.secure_aggregation` no client's ledger leaves it: `masked_ledger.py` has what is stated then, and each
client checks that what it has spent is within it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from fedmtl.capabilities import BUILT_IN, Capability, find
from fedmtl.config import Config
from fedmtl.config.privacy import ExamplePrivacyConfig
from fedmtl.errors import ConfigError
from fedmtl.federation.messages import ClientId, ClientInfo, State, Update
from fedmtl.federation.policy import Policy
from fedmtl.federation.server_method import RoundSettings, ServerMethod, ServerSetup, Step
from fedmtl.methods.accounting import MOST_NOISE, Releases, is_reachable, most_spent, spent, together
from fedmtl.methods.example_account import RELEASED, SCOPES, SPENT, most_steps
from fedmtl.methods.example_gradients import PrivateGradients
from fedmtl.methods.masked_ledger import CLIENTS, JOBS, NAME, CheckCounts, MaskedExamplePrivacy
from fedmtl.methods.noise import KeyedNoise
from fedmtl.runs.event_lines import Event
from fedmtl.runs.events import ExamplePrivacyEvent, ExampleSpending, ReleaseFacts
from fedmtl.sharing.plan import NO_EXTRA, Extra, SharingPlan
from fedmtl.tasks.builtin import BUILTIN
from fedmtl.tasks.task import Task
from fedmtl.training.local_method import LocalSettings

UNCONFIRMED = "unconfirmed"
# Schedules under which it is known beforehand how many steps each task makes.
PLANNED = ("even", "joint", "round_robin")
# Kinds whose losses are of one text each.
KINDS = ("classification", "multilabel", "regression")
# Methods with a client's half that go together with noise: what they do follows from noisy gradients alone.
FITTING = ("pruning", "fedprox", "scaffold", "pcgrad", "adaptive_sharing", NAME)
# Beyond this many different ledgers of a task, the rest is bounded by Renyi orders.
MOST_LEDGERS = 16
# What a client may say that it released: with more, or stranger numbers, the accountant fails, or takes hours.
MOST_TIMES, LEAST_CHANCE, LEAST_NOISE = 10**7, 1e-9, 1e-100


def check_reach(example: ExamplePrivacyConfig, settings: LocalSettings, most_examples: Mapping[str, int]) -> None:
    """Raise where no noise reaches the epsilon at any client of a task, of which the largest has so many examples."""
    for task, number in most_examples.items():
        if example.epsilon is None or not number:
            continue
        chance = min(1.0, settings.batch_size_of(task, number) / number)
        steps = most_steps({task: number}, settings)[task]
        if not is_reachable(example.epsilon, example.delta, chance, steps):
            raise ConfigError(
                f"privacy.example.epsilon: found {example.epsilon:g}, which no noise reaches at delta {example.delta:g}"
                f" at any client of {task}: the largest has {number} examples, and makes {steps} steps; write a larger"
                " epsilon, or fewer rounds"
            )


def check_infos(
    example: ExamplePrivacyConfig,
    settings: LocalSettings,
    sampled: Mapping[ClientId, Sequence[str]],
    infos: Mapping[ClientId, ClientInfo],
) -> None:
    if example.epsilon is None:
        return
    largest: dict[str, int] = {}
    for client, tasks in sampled.items():
        counts = infos[client].num_examples
        for task in tasks:
            largest[task] = max(largest.get(task, 0), counts.get(task, 0))
    check_reach(example, settings, largest)


class ExamplePrivacy(ServerMethod):
    """Keeps the ledger of all clients, from their updates, and says what it comes to."""

    name = NAME

    def __init__(
        self, delta: float, max_grad_norm: float, num_rounds: int, check: CheckCounts = lambda sampled, infos: None
    ) -> None:
        self._delta, self._max_grad_norm, self._num_rounds = delta, max_grad_norm, num_rounds
        self._check = check
        self._sampled: Mapping[ClientId, Sequence[str]] = {}
        self._updates: dict[ClientId, Mapping[str, Any]] = {}
        self._released: dict[ClientId, Mapping[str, Any]] = {}

    def before_round(
        self, state: State, sampled: Mapping[ClientId, Sequence[str]], infos: Mapping[ClientId, ClientInfo]
    ) -> RoundSettings:
        if state.round == 0:
            self._check(sampled, infos)
        self._sampled, self._updates = dict(sampled), {}
        return RoundSettings()

    def add(self, update: Update) -> None:
        if NAME in update.extra:
            self._updates[update.client] = update.extra[NAME].values

    def after_aggregation(self, before: State, after: State) -> Step:
        clients = {client: dict(tasks) for client, tasks in _clients(before).items()}
        for client, tasks in self._sampled.items():
            sent = self._updates.get(client)
            known = clients.setdefault(client, {})
            for task in tasks:
                if sent is None:
                    old = known.get(task, {SPENT: [], RELEASED: None, SCOPES: [], UNCONFIRMED: 0})
                    known[task] = {**old, UNCONFIRMED: old[UNCONFIRMED] + 1}
                elif task in sent[SPENT]:
                    one = {SPENT: sent[SPENT][task], RELEASED: sent[RELEASED][task], SCOPES: sent[SCOPES][task]}
                    known[task] = {**one, UNCONFIRMED: 0}
        self._released = {client: sent[RELEASED] for client, sent in self._updates.items()}
        return Step(
            after.with_extra(NAME, Extra({CLIENTS: {client: tasks for client, tasks in clients.items() if tasks}}))
        )

    def report(self, state: State) -> tuple[Event, ...]:
        by_task: dict[str, dict[ClientId, Mapping[str, Any]]] = {}
        for client, tasks in _clients(state).items():
            for task, entry in tasks.items():
                by_task.setdefault(task, {})[client] = entry
        if not by_task:
            return ()
        is_last = state.round >= self._num_rounds or all(one.stopped_round for one in state.progress.values())
        released = {
            client: {task: ReleaseFacts(**one) for task, one in tasks.items()}
            for client, tasks in self._released.items()
        }
        self._released = {}
        return (
            ExamplePrivacyEvent(
                round=state.round,
                delta=self._delta,
                max_grad_norm=self._max_grad_norm,
                tasks={task: self._spending(entries, is_last=is_last) for task, entries in sorted(by_task.items())},
                released=released,
            ),
        )

    def check(self, extra: Extra) -> None:
        if extra.tensors or set(extra.values) - {CLIENTS}:
            raise ValueError("the ledger has clients alone")
        for tasks in extra.values.get(CLIENTS, {}).values():
            for entry in tasks.values():
                if entry[SPENT]:
                    _check_task(entry[SPENT], entry[RELEASED], entry[SCOPES])
                if type(entry[UNCONFIRMED]) is not int or entry[UNCONFIRMED] < 0:
                    raise ValueError("jobs are counted in whole numbers")

    def _spending(self, entries: Mapping[ClientId, Mapping[str, Any]], *, is_last: bool) -> ExampleSpending:
        """What a task's noise comes to at the client where it is most; jobs without an answer count as done."""
        ledgers = {client: done_of(entry) for client, entry in entries.items()}
        bounds = {releases: most_spent(releases, self._delta) for releases in set(ledgers.values())}
        order = sorted(ledgers, key=lambda client: (-bounds[ledgers[client]], client))
        client, epsilon, accountant = order[0], bounds[ledgers[order[0]]], "rdp"
        if is_last:
            exact: dict[tuple[Releases, ...], float] = {}
            for name in order:
                releases = ledgers[name]
                if exact and bounds[releases] <= max(exact.values()):
                    break
                if releases not in exact:
                    if len(exact) == MOST_LEDGERS:
                        break
                    exact[releases] = spent(releases, self._delta).epsilon
            else:
                name = ""
            most = max(exact.values())
            rest = bounds[ledgers[name]] if name else 0.0
            # Of those that were not looked at, a bound is known.
            epsilon, accountant = (most, "pld") if rest <= most else (rest, "rdp")
            client = next(one for one in order if exact.get(ledgers[one]) == most)
        return ExampleSpending(
            epsilon=epsilon,
            epsilon_rdp=bounds[ledgers[client]],
            accountant=accountant,
            client=client,
            releases=[ReleaseFacts(**one.to_dict()) for one in ledgers[client]],
            clients=len(entries),
            scopes=sorted({scope for entry in entries.values() for scope in entry[SCOPES]}),
            unconfirmed=sum(entry[UNCONFIRMED] for entry in entries.values()),
            unknown=sum(not entry[SPENT] for entry in entries.values()),
        )


def _clients(state: State) -> Mapping[ClientId, Mapping[str, Mapping[str, Any]]]:
    found: Mapping[ClientId, Mapping[str, Mapping[str, Any]]] = state.extra.get(NAME, NO_EXTRA).values.get(CLIENTS, {})
    return found


def done_of(entry: Mapping[str, Any]) -> tuple[Releases, ...]:
    """A client's releases of a task: those it has told of, and one round more for each job without an answer."""
    done = [Releases.from_dict(one) for one in entry[SPENT]]
    if entry[UNCONFIRMED] and entry[RELEASED] is not None:
        last = Releases.from_dict(entry[RELEASED])
        done.append(Releases(last.chance, last.noise_multiplier, last.times * entry[UNCONFIRMED]))
    return together(done)


def _check_task(told: Sequence[Mapping[str, Any]], released: Mapping[str, Any], scopes: Sequence[str]) -> None:
    """Raise ValueError unless these are releases, those of the last round among them."""
    done, last = [Releases.from_dict(one) for one in told], Releases.from_dict(released)
    is_in = any((one.chance, one.noise_multiplier) == (last.chance, last.noise_multiplier) for one in done)
    if not is_in or sum(one.times for one in done) < last.times or max(one.times for one in done) > MOST_TIMES:
        raise ValueError("what was released in a round is not in the ledger")
    if any(one.chance < LEAST_CHANCE or not LEAST_NOISE <= one.noise_multiplier <= MOST_NOISE for one in done):
        raise ValueError("no client has such a chance, or adds such noise")
    if not all(type(scope) is str and len(scope) <= 300 for scope in scopes):
        raise ValueError("scopes are names")


def _check_sent(extra: Extra, tasks: Sequence[str], options: Mapping[str, Any]) -> str | None:
    """Why what a client sent is no ledger of its tasks."""
    told, released, scopes = (extra.values.get(part, {}) for part in (SPENT, RELEASED, SCOPES))
    is_whole = not extra.tensors and set(extra.values) == {SPENT, RELEASED, SCOPES}
    if not is_whole or not set(told) == set(released) == set(scopes) or not set(told) <= set(tasks):
        return "its ledger of noise is not one of its tasks"
    given = options["noise_multiplier"]
    for task in told:
        _check_task(told[task], released[task], scopes[task])
        if given is not None and released[task]["noise_multiplier"] != given:
            return f"it added other noise to the gradients of {task} than the config says"
    return None


def _refused(config: Config) -> str | None:
    """The first setting that does not go together with noise on gradients: its key, why, and what to write."""
    training, example = config.training, config.privacy.example
    if example is None:
        return None
    distillation = training.distillation
    found = {
        "training.smart": (training.smart is not None, "its penalty has a gradient that is not clipped"),
        "training.distillation.where": (
            distillation is not None and distillation.where == "clients",
            "its losses are compared over a batch; write `where: server`",
        ),
        "training.loss_weighting": (
            training.loss_weighting == "uncertainty",
            "the weights it learns are not an example's; write `loss_weighting: fixed`",
        ),
        "training.logit_adjustment": (
            bool(training.logit_adjustment),
            "it adds what follows from a client's labels to every example's loss; write 0",
        ),
        "model.windows": (
            config.model.windows is not None,
            "the gradients of a text's windows, which are one example, are not added up; write `windows: null`",
        ),
        "training.task_schedule": (
            training.task_schedule not in PLANNED,
            f"it draws how many steps a task makes, which the noise depends on; write one of {', '.join(PLANNED)}",
        ),
        "federation.vocabulary_slices": (
            config.federation.vocabulary_slices,
            "the token rows that a client's texts use would leave without noise; write `vocabulary_slices: false`",
        ),
        **{
            f"tasks.{name}.class_weights": (
                task.class_weights == "balanced",
                "they follow from a client's labels; write them as numbers",
            )
            for name, task in config.tasks.items()
        },
        **{
            f"tasks.{name}.kind": (
                (task.kind or getattr(BUILTIN.get(name), "kind", None)) not in (None, *KINDS),
                "its losses are not known to be of one example each; write one of " + ", ".join(KINDS),
            )
            for name, task in config.tasks.items()
        },
        **{
            f"methods.{name}": (name not in BUILT_IN, "it is not known to see nothing but noisy gradients")
            for name in config.methods
        },
    }
    if (example.noise_multiplier or 0.0) > MOST_NOISE:
        return f"privacy.example.noise_multiplier: found {example.noise_multiplier:g}; write {MOST_NOISE:g} at most"
    return next((f"{key}: found with privacy.example; {why}" for key, (is_set, why) in found.items() if is_set), None)


def _is_masked(config: Config) -> bool:
    """Whether updates leave clients under masks, so that no ledger can go along."""
    return config.privacy.secure_aggregation is not None and config.mode.startswith("federated")


def _client_options(config: Config, plan: SharingPlan, names: Sequence[str]) -> dict[str, Any] | None:
    example = config.privacy.example
    if example is None:
        return None
    reason = _refused(config)
    if reason is not None:
        raise ConfigError(reason)
    return {**example.model_dump(), "masked": _is_masked(config)}


def _open(setup: ServerSetup) -> ServerMethod | None:
    example = setup.config.privacy.example
    if example is None:
        return None
    # What a filter does, it does to an update that has its noise.
    others = [name for name in setup.settings.methods if name not in FITTING and find(name).local is not None]
    if others:
        raise ConfigError(f"privacy.example: found with {others[0]}, which may see more than noisy gradients")
    # Whether what they need is installed shows before the first round.
    most_spent([Releases(1.0, 1.0, 1)], example.delta)
    KeyedNoise(bytes(32))
    settings = setup.settings
    if setup.most_examples is not None and example.epsilon is not None:
        check_reach(example, settings, {task: setup.most_examples(task) for task in setup.tasks})
    check = partial(check_infos, example, settings)
    if _is_masked(setup.config):
        return MaskedExamplePrivacy(example, settings, list(setup.model.canonical()), check)
    return ExamplePrivacy(example.delta, example.max_grad_norm, setup.config.training.num_rounds, check)


def _check_received(extra: Extra, tasks: Mapping[str, Task], options: Mapping[str, Any]) -> str | None:
    """Why it is not the number of jobs of each task, which comes along where updates are masked."""
    if not extra and not options["masked"]:
        return None
    jobs = extra.values.get(JOBS)
    is_fine = options["masked"] and not extra.tensors and set(extra.values) == {JOBS} and isinstance(jobs, Mapping)
    if not is_fine or not all(type(number) is int and number > 0 for number in dict(jobs or {}).values()):
        return "the job's number of jobs is none"
    return None


def _check_policy(policy: Policy, config: Config) -> str | None:
    required, example = policy.require.example_privacy, config.privacy.example
    if required is None:
        return None
    if example is None:
        return "the policy requires noise on gradients (require.example_privacy); the server's config has none"
    if example.delta > required.max_delta or (example.epsilon or 0.0) > required.max_epsilon:
        epsilon = "" if example.epsilon is None else f"epsilon {example.epsilon:g} and "
        return (
            f"the server's privacy.example has {epsilon}delta {example.delta:g}; the policy allows"
            f" {required.max_epsilon:g} and {required.max_delta:g} (require.example_privacy)"
        )
    return None


CAPABILITY = Capability(
    NAME,
    PrivateGradients,
    _client_options,
    _open,
    check_sent=_check_sent,
    check_received=_check_received,
    check_policy=_check_policy,
    is_quiet_under_masks=True,
)

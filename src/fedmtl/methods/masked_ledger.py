"""What can be stated of noise on gradients where updates are masked, and no client tells what it has spent.

The chance of an example to be in a step, the number of steps and the noise found for them tell how many examples a
client has, so none of it leaves a client under `privacy.secure_aggregation`. The server counts the jobs that it sent,
and those that were answered. It states the most that so many jobs can have spent at any client:

* With `epsilon`, that number. A client's noise is found for all rounds, and it answers no job beyond them.
* With `noise_multiplier` and `max_sampling_rate`, what a client of that chance spends in so many jobs (`agreed`).

Each client holds its own ledger to the same bound before it answers, and counts its answers: more of them than the
server says it sent are refused. So the statement rests on what was done, and on the clients' own code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from fedmtl.config.privacy import ExamplePrivacyConfig
from fedmtl.federation.messages import ClientId, ClientInfo, State
from fedmtl.federation.server_method import RoundSettings, ServerMethod, Step
from fedmtl.methods.accounting import Releases, most_spent
from fedmtl.runs.event_lines import Event
from fedmtl.runs.events import ExamplePrivacyEvent, ExampleSpending, ReleaseFacts
from fedmtl.sharing.plan import NO_EXTRA, Extra, SharingPlan
from fedmtl.training.local_method import LocalSettings

NAME, CLIENTS = "example_privacy", "clients"
# In a job, of each task the jobs that one client was sent at most; in a state, of each client, its jobs and answers.
JOBS, ANSWERS = "jobs", "answers"
# An epsilon that every client keeps to, and that no ledger gives.
BOUND = "bound"

CheckCounts = Callable[[Mapping[ClientId, Sequence[str]], Mapping[ClientId, ClientInfo]], None]


def agreed(max_sampling_rate: float, noise_multiplier: float, settings: LocalSettings, jobs: int) -> Releases:
    """What so many jobs spend at most, at clients whose examples have that chance at most to be in a step.

    A client of smaller chance has more batches in an epoch, and spends less in all, but for the last batch.
    """
    steps = settings.steps or settings.epochs * (math.ceil(1 / max_sampling_rate - 1e-9) + 1)
    return Releases(max_sampling_rate, noise_multiplier, steps * jobs)


class MaskedExamplePrivacy(ServerMethod):
    """Counts the jobs of every client, and states what so many come to, where nobody's ledger can be read."""

    name = NAME

    def __init__(
        self,
        example: ExamplePrivacyConfig,
        settings: LocalSettings,
        names: Sequence[str],
        check: CheckCounts = lambda sampled, infos: None,
    ) -> None:
        self._example, self._settings, self._names, self._check = example, settings, names, check
        self._sampled: Mapping[ClientId, Sequence[str]] = {}

    def before_round(
        self, state: State, sampled: Mapping[ClientId, Sequence[str]], infos: Mapping[ClientId, ClientInfo]
    ) -> RoundSettings:
        if state.round == 0:
            self._check(sampled, infos)
        self._sampled = dict(sampled)
        # No more than will be stated: of those who are sent a job now.
        jobs = _most_jobs({client: tasks for client, tasks in _counted(state).items() if client in sampled})
        tasks = sorted({task for given in sampled.values() for task in given})
        return RoundSettings(extra=Extra({JOBS: {task: jobs.get(task, 0) + 1 for task in tasks}}))

    def after_aggregation(self, before: State, after: State) -> Step:
        clients = {client: dict(tasks) for client, tasks in _counted(before).items()}
        for client, tasks in self._sampled.items():
            has_answered = after.accepted.get(client) == after.round
            known = clients.setdefault(client, {})
            for task in tasks:
                old = known.get(task, {JOBS: 0, ANSWERS: 0})
                known[task] = {JOBS: old[JOBS] + 1, ANSWERS: old[ANSWERS] + has_answered}
        return Step(after.with_extra(NAME, Extra({CLIENTS: clients})))

    def report(self, state: State) -> tuple[Event, ...]:
        by_task: dict[str, list[Mapping[str, int]]] = {}
        for tasks in _counted(state).values():
            for task, entry in tasks.items():
                by_task.setdefault(task, []).append(entry)
        if not by_task:
            return ()
        example = self._example
        return (
            ExamplePrivacyEvent(
                round=state.round,
                delta=example.delta,
                max_grad_norm=example.max_grad_norm,
                tasks={task: self._spending(task, entries, state.plan) for task, entries in sorted(by_task.items())},
            ),
        )

    def check(self, extra: Extra) -> None:
        if extra.tensors or set(extra.values) - {CLIENTS}:
            raise ValueError("the ledger has clients alone")
        for tasks in extra.values.get(CLIENTS, {}).values():
            for entry in tasks.values():
                jobs, answers = entry[JOBS], entry[ANSWERS]
                if type(jobs) is not int or type(answers) is not int or not 0 <= answers <= jobs:
                    raise ValueError("jobs and answers are counted in whole numbers")

    def _spending(self, task: str, entries: Sequence[Mapping[str, int]], plan: SharingPlan) -> ExampleSpending:
        """What the client that was sent the most jobs has spent at most; a job without an answer counts as done."""
        example, jobs = self._example, max(entry[JOBS] for entry in entries)
        keys = plan.keys(self._names, [task], "")[task].values()
        releases: list[Releases] = []
        if example.epsilon is None:
            assert example.noise_multiplier is not None
            assert example.max_sampling_rate is not None
            releases = [agreed(example.max_sampling_rate, example.noise_multiplier, self._settings, jobs)]
        # By the orders that clients compare with: by distributions both sides would be smaller, not by as much.
        epsilon = most_spent(releases, example.delta) if example.epsilon is None else example.epsilon
        return ExampleSpending(
            epsilon=epsilon,
            epsilon_rdp=epsilon,
            accountant="rdp" if releases else BOUND,
            client="",
            releases=[ReleaseFacts(**one.to_dict()) for one in releases],
            clients=len(entries),
            scopes=sorted({key.scope for key in keys if plan.trains(key)}),
            unconfirmed=sum(entry[JOBS] - entry[ANSWERS] for entry in entries),
            unknown=sum(not entry[ANSWERS] for entry in entries),
            jobs=jobs,
        )


def _most_jobs(clients: Mapping[ClientId, Mapping[str, Mapping[str, int]]]) -> dict[str, int]:
    most: dict[str, int] = {}
    for tasks in clients.values():
        for task, entry in tasks.items():
            most[task] = max(most.get(task, 0), entry[JOBS])
    return most


def _counted(state: State) -> Mapping[ClientId, Mapping[str, Mapping[str, int]]]:
    found: Mapping[ClientId, Mapping[str, Mapping[str, int]]]
    found = state.extra.get(NAME, NO_EXTRA).values.get(CLIENTS, {})
    return found

"""What a server sends: its settings, the clients that a round samples, and the job that each of them gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from torch import Tensor

from fedmtl.config import EvaluationConfig, FederationConfig
from fedmtl.federation.aggregators.mean import Mean
from fedmtl.federation.aggregators.protocol import Aggregator
from fedmtl.federation.client import fixed_digest
from fedmtl.federation.messages import ClientId, ClientInfo, Codecs, Job, JobKind, State
from fedmtl.federation.server_method import ServerMethod
from fedmtl.seeds import derive_seed
from fedmtl.sharing.plan import Extra, Key, Rows, Weights, take_rows
from fedmtl.tasks.task import Task
from fedmtl.timing import timed
from fedmtl.training.local_method import LocalSettings


@dataclass(frozen=True)
class ServerSettings:
    """Everything that the server's loop needs to know of a run beside its state and its engine.

    `names` are the model's canonical parameter names, `table` the token table's among them.
    `known` are digests of fixed values that every client's model starts with, so that they need not travel.
    `task_weights` count in the mean, those of the settings in the loss; `weight_in` says which of them methods change.
    `methods` are the server's halves of the capabilities that are switched on.
    """

    tasks: Mapping[str, Task]
    names: tuple[str, ...]
    table: str
    active_tasks: Callable[[ClientId, int], tuple[str, ...]]
    federation: FederationConfig
    evaluation: EvaluationConfig
    settings: LocalSettings
    task_weights: Mapping[str, float]
    seed: int
    codecs: Codecs = field(default_factory=Codecs)
    known: frozenset[str] = frozenset()
    weight_in: Literal["averaging", "loss"] = "averaging"
    methods: Sequence[ServerMethod] = ()
    aggregator: Callable[[Weights, Extra], Aggregator] = Mean

    @property
    def rule_name(self) -> str:
        """What the rules of all scopes together are called, in messages and in a state."""
        aggregation = self.federation.aggregation
        return "by_scope" if aggregation.scopes else aggregation.rule

    def is_evaluated(self, round_number: int) -> bool:
        return round_number % self.evaluation.every == 0 or round_number == self.settings.num_rounds


class SampledClients(dict[ClientId, tuple[str, ...]]):
    """The clients of a round with their tasks; `by_method` says that a method chose them."""

    by_method: bool = False


def sample_clients(server: ServerSettings, clients: Mapping[ClientId, ClientInfo], round_number: int) -> SampledClients:
    """The clients of a round with their tasks; the longest to train first, so that no worker waits for a late one."""
    active = {client: server.active_tasks(client, round_number) for client in sorted(clients)}
    active = {client: tasks for client, tasks in active.items() if tasks}
    # Every method sees the candidates, and the first one that chooses decides.
    choices = [method.sample(active, round_number) for method in server.methods]
    by_method = next((choice for choice in choices if choice is not None), None)
    chosen = list(active) if by_method is None else list(by_method)
    wanted = server.federation.clients_per_round
    if by_method is None and wanted is not None and wanted < len(chosen):
        rng = np.random.Generator(np.random.PCG64(derive_seed(server.seed, "sample", round_number)))
        chosen = [chosen[i] for i in rng.choice(len(chosen), wanted, replace=False)]
    size = {client: _work(clients[client], active[client]) for client in chosen}
    ordered = sorted(chosen, key=lambda client: (-size[client], client))
    sampled = SampledClients((client, active[client]) for client in ordered)
    sampled.by_method = by_method is not None
    return sampled


def _work(info: ClientInfo, tasks: Sequence[str]) -> int:
    """Tokens where they are known, else examples."""
    counts = info.num_tokens or info.num_examples
    return sum(counts.get(task, 0) for task in tasks)


class Dispatch:
    """Makes Jobs, and remembers which fixed values each client already has, so that they travel once.

    Those that its model starts with do not travel at all; a client that failed is sent them too, as it may have started
    with others.
    """

    def __init__(self, server: ServerSettings) -> None:
        self._server = server
        self._client_digests: dict[ClientId, set[str]] = {}
        self._digests: dict[Key, tuple[Tensor, str]] = {}

    @timed("cutting slices")
    def job(
        self,
        kind: JobKind,
        state: State,
        client: ClientId,
        tasks: tuple[str, ...],
        rows: Rows | None,
        round_number: int,
        settings: Mapping[str, Any],
        extra: Mapping[str, Extra] | None = None,
    ) -> Job:
        """The slice of the state that a client needs for these tasks, by scope and by token row.

        Of the tensors in `extra` it gets those whose keys it gets, cut to the same rows.
        """
        views = state.plan.keys(self._server.names, tasks, client)
        keys = dict.fromkeys(key for view in views.values() for key in view.values())
        if not self._server.federation.vocabulary_slices or not _is_sliceable(state, self._server.table):
            rows = None
        weights: Weights = {}
        fixed: dict[str, str] = {}
        for key in keys:
            if key.scope.startswith("client:"):
                continue
            value = state.weights[key]
            if key.scope == "fixed":
                fixed[key.name] = self._digest(key, value)
                if fixed[key.name] in self._client_digests.get(client, self._server.known):
                    continue
            weights[key] = self._slice(key, value, rows)
        return Job(
            kind,
            round_number,
            client,
            tasks,
            weights,
            state.plan,
            rows,
            derive_seed(self._server.seed, "job", kind, round_number, client),
            state.accepted.get(client, 0),
            settings,
            fixed,
            self._server.codecs,
            {name: self._cut(one, weights, rows) for name, one in (extra or {}).items()},
        )

    def _cut(self, extra: Extra, weights: Weights, rows: Rows | None) -> Extra:
        def sliced(values: Mapping[Key, Tensor]) -> Weights:
            return {key: self._slice(key, values[key], rows) for key in weights if key in values}

        return extra.changed(sliced)

    def _slice(self, key: Key, value: Tensor, rows: Rows | None) -> Tensor:
        """The rows of a token table, or all of another value."""
        return value if rows is None or key.name != self._server.table else take_rows(value, rows)

    def answered(self, job_client: ClientId, fixed: Mapping[str, str]) -> None:
        """The client has these fixed values now."""
        self._client_digests.setdefault(job_client, set(self._server.known)).update(fixed.values())

    def lost(self, client: ClientId) -> None:
        """The client failed: it may have been replaced by an empty one."""
        self._client_digests[client] = set()

    def _digest(self, key: Key, value: Tensor) -> str:
        known = self._digests.get(key)
        if known is None or known[0] is not value:
            known = (value, fixed_digest(key, value))
            self._digests[key] = known
        return known[1]


def _is_sliceable(state: State, table: str) -> bool:
    # A table that stays at its client is whole there; a fixed one travels once and is named by its digest.
    return state.plan.level(table) not in ("client", "fixed")

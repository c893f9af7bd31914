"""What a server needs to lead a federation, but the weights and the engine; and the clients that a round samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from fedmtl.config import EvaluationConfig, FederationConfig
from fedmtl.federation.aggregators.mean import Mean
from fedmtl.federation.aggregators.protocol import Aggregator
from fedmtl.federation.messages import ClientId, ClientInfo, Codecs
from fedmtl.federation.server_method import ServerMethod
from fedmtl.seeds import derive_seed
from fedmtl.sharing.extra import Extra
from fedmtl.sharing.keys import Weights
from fedmtl.tasks.task import Task
from fedmtl.training.settings import LocalSettings


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

    def is_evaluated(self, round_number: int) -> bool:
        return round_number % self.evaluation.every == 0 or round_number == self.settings.num_rounds


def sample_clients(
    server: ServerSettings, clients: Mapping[ClientId, ClientInfo], round_number: int
) -> dict[ClientId, tuple[str, ...]]:
    """The clients of a round with their tasks; the longest to train first, so that no worker waits for a late one."""
    active = {client: server.active_tasks(client, round_number) for client in sorted(clients)}
    chosen = [client for client, tasks in active.items() if tasks]
    wanted = server.federation.clients_per_round
    if wanted is not None and wanted < len(chosen):
        rng = np.random.Generator(np.random.PCG64(derive_seed(server.seed, "sample", round_number)))
        chosen = [chosen[i] for i in rng.choice(len(chosen), wanted, replace=False)]
    size = {client: _work(clients[client], active[client]) for client in chosen}
    return {client: active[client] for client in sorted(chosen, key=lambda client: (-size[client], client))}


def _work(info: ClientInfo, tasks: Sequence[str]) -> int:
    """Tokens where they are known, else examples."""
    counts = info.num_tokens or info.num_examples
    return sum(counts.get(task, 0) for task in tasks)

"""pfl-research's simulation: FederatedAveraging on its SimulatedBackend, in one process or under torchrun.

Tokens cached, batches by length, fused AdamW. pfl keeps one model per process and sums the users' differences.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pfl.aggregate.base import get_num_datapoints_weight_name
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.common_types import Population
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor

from simulator.contestants.examples import BATCH, SAMPLES, Batch, Tokens, task_of
from simulator.contestants.network import LEARNING_RATE, Network, num_parameters
from simulator.contestants.telling import Round, tell

# The first round is "evaluated" nevertheless; `Model.metrics` then does nothing.
NEVER = 10**9


class Model(Network):
    """The network with the two methods that pfl calls."""

    def loss(self, ids: Tensor, segments: Tensor, mask: Tensor, labels: Tensor, task: str) -> Tensor:
        self.train()
        return self.loss_of(task, Batch(ids, segments, mask, labels))

    def metrics(self, *batch: Any, **options: Any) -> dict[str, Any]:
        return {}


class User(Dataset):
    """A client's batches, padded as they are read."""

    def __init__(self, tokens: Tokens, client: int, visit: int) -> None:
        self._task = task_of(client)
        super().__init__((), user_id=str(client), train_kwargs={"task": self._task})
        self._tokens, self._client, self._visit = tokens, client, visit

    def __len__(self) -> int:
        return SAMPLES

    def iter(self, batch_size: int | None) -> Iterator[list[Tensor]]:
        for batch in self._tokens.bucketed(self._client, np.random.default_rng([self._visit, self._client])):
            made = self._tokens.batch(batch, self._task)
            yield [made.ids, made.segments, made.mask, made.labels]
        trained = self._tokens.take_count()
        assert trained == len(self), f"{trained} examples trained, not {len(self)}"


class Timer(TrainingProcessCallback):
    """A round runs from the end of the one before to its callback."""

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self._round = Round(1).__enter__()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        counted = aggregate_metrics[get_num_datapoints_weight_name(Population.TRAIN)]
        self._round.samples = int(counted.weighted_value)
        self._round.__exit__(None, None, None)
        self._round = Round(central_iteration + 2).__enter__()
        return False, Metrics()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    np.random.seed(0)
    tokens = Tokens(args.workload / f"clients-{args.clients}" / "tokens.npz")
    network = Model(args.workload / "encoder")
    is_first = os.environ.get("RANK", "0") == "0"
    visits = [0] * args.clients

    def make_user(client: int) -> User:
        visits[client] += 1
        return User(tokens, client, visits[client])

    users = list(range(args.clients))
    data = FederatedDataset(make_user, get_user_sampler("minimize_reuse", users))
    model = PyTorchModel(
        model=network,
        local_optimizer_create=lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, fused=True),
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )
    if is_first:
        tell("model", parameters=num_parameters(network))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=args.rounds,
            evaluation_frequency=NEVER,
            train_cohort_size=args.clients,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=LEARNING_RATE, local_batch_size=BATCH
        ),
        callbacks=[Timer()] if is_first else [],
    )


if __name__ == "__main__":
    main()

"""What a worker process knows: how to build its model and open its clients' examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from fedmtl.config import ModelConfig
from fedmtl.federation.client import InitialValues, Site
from fedmtl.federation.wire import MAX_BYTES
from fedmtl.methods.noise import derive_key
from fedmtl.model.multitask import MultiTaskModel, open_model
from fedmtl.sharing.plan import Key
from fedmtl.tasks.batches import Shard
from fedmtl.tasks.task import Task


@dataclass(frozen=True)
class SiteSetup:
    """Everything from which a worker makes its `Site`; small enough to hand to every worker."""

    model: ModelConfig
    seed: int
    tasks: Mapping[str, Task]
    train: Mapping[str, Mapping[str, Shard]]
    validation: Mapping[str, Mapping[str, Shard]]
    shared_validation: Mapping[str, Shard]
    folder: Path
    spool: Path
    device: str
    plain_encoder: bool = False
    max_bytes: int = MAX_BYTES
    log_variances: bool = False
    plugins: tuple[str, ...] = ()
    profile: bool = False
    # Of a simulated site it follows from the seed, so that every engine computes the same; of a real one it is random.
    secret: bytes = b""
    required: Mapping[str, Any] = field(default_factory=dict)
    counts_to: int = 1
    sends_losses: bool = True


def open_site(setup: SiteSetup, model: MultiTaskModel | None = None) -> Site:
    """Open the data, and build the model where there is none yet; done once per worker."""
    for module in setup.plugins:
        import_module(module)
    if model is None:
        _, model = open_model(
            setup.model, setup.tasks, setup.seed, plain=setup.plain_encoder, log_variances=setup.log_variances
        )
    device = torch.device(setup.device)
    model.to(device)
    initial = InitialValues(
        {Key("", name): getattr(module, leaf).detach().cpu() for name, (module, leaf) in model.canonical().items()}
    )

    def validation(client: str, task: str) -> Shard:
        client_shards = setup.validation.get(client, {})
        return client_shards[task] if task in client_shards else setup.shared_validation[task]

    secret = setup.secret or derive_key(str(setup.seed).encode(), "the secret of a simulated site")
    return Site(
        model,
        initial,
        lambda client, task: setup.train[client][task],
        validation,
        setup.folder,
        device,
        secret=secret,
        required=setup.required,
        counts_to=setup.counts_to,
        sends_losses=setup.sends_losses,
    )

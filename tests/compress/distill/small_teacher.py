"""A teacher of two layers, 32 wide, with three tasks, as a finished run would hold it."""

from pathlib import Path

import torch

from fedmtl.config import ModelConfig, SharingConfig
from fedmtl.model.multitask import BoundModel, MultiTaskModel
from fedmtl.model.saved import SavedModel, load_model, save_model
from fedmtl.sharing.plan import plan_from_config
from fedmtl.sharing.weights import initial_weights
from model.tiny import LENGTH, load, make_task, write_encoder

PLAN = plan_from_config(SharingConfig())
TASKS = (
    make_task("single"),
    make_task("one", outputs=1),
    make_task("score", kind="regression", text=("a", "b"), pair="dual", pool="mean"),
)


def make_teacher(folder: Path, kind: str = "bert") -> SavedModel:
    encoder, model = load(write_encoder(kind, folder / "encoder"), TASKS)
    with torch.no_grad():
        # Fresh heads answer nearly the same for every text.
        for task in TASKS:
            model.heads[task.name].weight.normal_(generator=torch.Generator().manual_seed(3))
    config = ModelConfig(max_length=LENGTH)
    save_model(folder / "model", encoder, model.tasks, PLAN, initial_weights(model, PLAN), config)
    return load_model(folder / "model")


def bind(model: MultiTaskModel, *, read: bool = False) -> BoundModel:
    bound = BoundModel(model, PLAN, list(model.tasks), "", initial_weights(model, PLAN), read=read)
    model.adds_gradients = True
    return bound

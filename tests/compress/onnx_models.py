"""A small model with single, cross and dual tasks, one of them with a hidden layer, to be exported."""

import torch

from fedmtl.config import ModelConfig
from fedmtl.model.encoder import load_encoder
from fedmtl.model.multitask import build_model, wants_pooler
from fedmtl.model.saved import SavedModel
from fedmtl.sharing.plan import SharingPlan
from fedmtl.sharing.weights import initial_weights
from fedmtl.tasks.task import HiddenLayer
from model.tiny import LENGTH, make_task

PLAN = SharingPlan((("heads.*", "task"), ("adapters.*", "task"), ("*", "all")))
TASKS = [
    make_task("single", pool="cls"),
    make_task("cross", pool="mean", text=("a", "b"), labels=("x", "y", "z"), head=HiddenLayer(16, "gelu")),
    make_task("dual", pool="mean", text=("a", "b"), pair="dual", outputs=1),
    make_task("score", pool="cls", text=("a", "b"), pair="dual", kind="regression", score_range=(1.0, 5.0)),
]


def make_saved(folder, tasks=TASKS, plan=PLAN, **keys):
    """A model whose values all differ from where they started."""
    by_name = {task.name: task for task in tasks}
    config = ModelConfig(server_model=str(folder), max_length=LENGTH, **keys)
    encoder = load_encoder(config, 0, wants_pooler(by_name))
    model = build_model(encoder, by_name, 0, config)
    weights = initial_weights(model, plan)
    generator = torch.Generator().manual_seed(1)
    for key in weights:
        weights[key] = weights[key] + 0.1 * torch.randn(weights[key].shape, generator=generator)
    return SavedModel(model, encoder, by_name, plan, weights, LENGTH)

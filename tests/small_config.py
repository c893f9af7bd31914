"""A run of some seconds: three tasks, two clients each, forty examples a task."""

SMALL = (
    "defaults=plain",
    "model.server_model=random-1x32",
    "model.pair=dual",
    "model.pool=cls",
    *(f"tasks.{task}={{train_samples: 40, val_samples: 24}}" for task in ("sentiment", "paraphrase", "similarity")),
    "federation.clients_per_task=2",
    "training.num_rounds=2",
    "training.batch_size=8",
    "training.learning_rate=1e-3",
    "compute.workers=0",
    "compute.device=cpu",
)

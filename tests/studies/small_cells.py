"""A cell that is a run of a second."""


def settings(num_rounds=2, **more):
    return {
        "mode": "centralized",
        "model": {"server_model": "random-1x32", "pool": "cls"},
        "tasks": {"sentiment": {"train_samples": 24, "val_samples": 8}},
        "training": {"num_rounds": num_rounds, "local_steps": 1, "batch_size": 8, **more},
        "compute": {"device": "cpu", "workers": 0},
    }

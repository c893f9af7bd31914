"""Cells with curves that a test writes down."""

from fedmtl_studies.scaling import ScalingOptions
from fedmtl_studies.scaling_results import Known, Result, Setup


def result(*curve, chance=0.5, **more):
    """A finished cell with these accuracies, from round 0 on."""
    told = {
        "cell": "a cell", "curve": dict(enumerate(curve)), "chance": chance, "examples": (4, 4), "num_train": 8,
        "num_scored": 10, "is_cut": False, "steps": 2, "round_bytes": 100.0, "train_seconds": 1.0,
        "evaluate_seconds": 0.5, "device": "cpu", "precision": "fp32", "cells_at_once": 1,
    }  # fmt: skip
    return Result(**{**told, **more})


def known(cells, rounds=2, threshold_rounds=3, encoder="tiny", **given):
    """A study of one encoder on sentiment; `cells` are each number of clients' results, a list is one per seed."""
    listed = {clients: own if isinstance(own, list) else [own] for clients, own in cells.items()}
    seeds = range(max(len(own) for own in listed.values()))
    options = ScalingOptions(
        quick=True, clients=tuple(cells), tasks=("sentiment",), encoders=(encoder,), seeds=tuple(seeds),
        rounds=rounds, threshold_rounds=threshold_rounds, **given,
    )  # fmt: skip
    return Known(
        options, {Setup(encoder, "sentiment", clients): dict(enumerate(own)) for clients, own in listed.items()}
    )

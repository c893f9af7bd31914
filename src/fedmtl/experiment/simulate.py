"""A run over Flower's simulation."""

from __future__ import annotations

from importlib.util import find_spec

from fedmtl.engines.flower.simulation import SimulationEngine
from fedmtl.errors import ConfigError, FedmtlError, needs_extra
from fedmtl.experiment.prepare import Prepared, open_engine, site_setup
from fedmtl.runs.folder import RunFolder


def open_simulation(prepared: Prepared, run: RunFolder) -> SimulationEngine:
    """The engine of a prepared run, with Ray started."""
    if find_spec("ray") is None:
        raise FedmtlError(needs_extra("--engine flower", "ray", "simulation"))
    if prepared.compute.device != "cpu":
        raise ConfigError(
            f"compute.device: found {prepared.compute.device}, Flower's simulation here is for CPUs; write `cpu`"
        )
    scorer = open_engine(prepared, run)
    return SimulationEngine(site_setup(prepared, run), prepared.clients, scorer, max(1, prepared.compute.workers))

"""MLflow (mlflow.org): a run in an experiment of a tracking server, or of a SQLite file on this machine.

MLflow's client is used, not its `mlflow.start_run`, which tags a run with the user, the source file and the commit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, field_validator

from fedmtl.errors import FedmtlError
from fedmtl.runs.folder import RunFolder
from fedmtl.trackers.points import StoredOptions, leaves, without_secret

# What a server takes in one request, and how long a parameter may be.
MOST_METRICS, MOST_PARAMETERS, LONGEST = 1000, 100, 6000
TAG = "fedmtl.id"
STATUS = {"done": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
Item = TypeVar("Item")


class Options(StoredOptions):
    address: str | None = Field(
        None,
        description="The tracking server, such as http://127.0.0.1:5000, or sqlite:///FILE; empty is"
        " MLFLOW_TRACKING_URI, and without that `mlflow.db` beside the run folders.",
    )
    experiment: str = Field("fedmtl", description="The experiment, which is made where it is missing.")

    @field_validator("address")
    @classmethod
    def _has_no_password(cls, address: str | None) -> str | None:
        return without_secret(address, "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD")


class Mlflow:
    def __init__(self, options: Options, run: RunFolder, id: str) -> None:
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        from mlflow import MlflowClient

        local = run.path.absolute().parent / "mlflow.db"
        address = options.address or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{local}"
        self._client = MlflowClient(tracking_uri=address, registry_uri=address)
        experiment = self._experiment(options.experiment, local if address.startswith("sqlite:") else None)
        found = self._client.search_runs([experiment], f"tags.`{TAG}` = '{id}'", max_results=2)
        if len(found) > 1:
            raise FedmtlError(
                f"experiment {options.experiment} has {len(found)} runs with the id {id}; delete all but one"
            )
        if found:
            self._run = found[0]
            self._client.set_terminated(self._run.info.run_id, "RUNNING")
        else:
            self._run = self._client.create_run(experiment, run_name=run.name, tags={TAG: id})
        self._id = self._run.info.run_id

    def _experiment(self, name: str, local: Path | None) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is None:
            # Without an address of its own, a local store would put files into the folder that one happens to be in.
            files = None if local is None else (local.parent / "mlflow-artifacts").as_uri()
            try:
                return str(self._client.create_experiment(name, artifact_location=files))
            except MlflowException:
                # Two runs may begin at once.
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        if found.lifecycle_stage != "active":
            raise FedmtlError(f"experiment {name} is deleted in MLflow; restore it, or name another one")
        return str(found.experiment_id)

    def logged(self) -> Mapping[int, set[str]]:
        found: dict[int, set[str]] = {}
        for name in self._client.get_run(self._id).data.metrics:
            for metric in self._client.get_metric_history(self._id, name):
                found.setdefault(metric.step, set()).add(name)
        return found

    def describe(self, facts: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        known = self._client.get_run(self._id).data.params
        # A parameter never changes in MLflow: of a setting that was edited between two sessions the first value stays.
        new = [Param(key, value[:LONGEST]) for key, value in leaves(facts) if key not in known]
        for some in _batches(new, MOST_PARAMETERS):
            self._client.log_batch(self._id, params=some)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        for some in _batches([Metric(name, value, now, step) for name, value in metrics.items()], MOST_METRICS):
            self._client.log_batch(self._id, metrics=some)

    def store(self, name: str, path: Path) -> None:
        if path.is_dir():
            self._client.log_artifacts(self._id, str(path), name)
        else:
            self._client.log_artifact(self._id, str(path))

    def finish(self, status: str, summary: Mapping[str, float | str], step: int) -> None:
        known = self._client.get_run(self._id).data.metrics
        numbers = {name: float(value) for name, value in summary.items() if not isinstance(value, str)}
        self.log(step, {name: value for name, value in numbers.items() if name not in known})
        for name, value in summary.items():
            if isinstance(value, str):
                self._client.set_tag(self._id, f"fedmtl.{name}", value)
        self._client.set_terminated(self._id, STATUS.get(status, "FINISHED"))

    def close(self) -> None:
        pass


def _batches(items: Sequence[Item], most: int) -> Iterator[Sequence[Item]]:
    return (items[start : start + most] for start in range(0, len(items), most))

"""Tables out of the Hugging Face hub."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from fedmtl.config import SourceConfig
from fedmtl.errors import DataError
from fedmtl.tasks.sources import Table, as_text

SECONDS_TO_ANSWER = 5


def hub_name(source: SourceConfig) -> str:
    """The dataset in words: owner/name, with its subset."""
    return f"{source.hub}/{source.subset}" if source.subset else f"{source.hub}"


def read_hub(source: SourceConfig, split: str, *, task: str = "<name>") -> Table:
    """One split of a hub dataset; class labels come as their numbers. A hub out of reach is a DataError.

    What an earlier run has downloaded is read without the hub.
    """
    origin = f"hub {hub_name(source)} {split}"
    instead = f"use files: `data.root=FOLDER` for a built-in task or `tasks.{task}.source.train: FILE`"
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{origin}: needs the datasets package; run `pip install fedmtl[hub]`, or {instead}") from error
    try:
        with _cached_only_when_out_of_reach():
            _refuse_code(datasets)
            values = datasets.load_dataset(source.hub, source.subset, split=split).to_dict()
    except Exception as error:
        # Dozens of types from four libraries mean "not there"; none of them is a mistake of ours.
        reason = next(iter(str(error).splitlines()), "").strip().rstrip(".") or type(error).__name__
        raise DataError(f"{origin}: cannot be loaded ({reason}); {instead}") from error
    return Table({name: [as_text(value) for value in column] for name, column in values.items()}, origin)


def _refuse_code(datasets: Any) -> None:
    """Before its version 4, `datasets` ran a dataset's own Python code, or asked a person whether to."""
    if hasattr(datasets.config, "HF_DATASETS_TRUST_REMOTE_CODE"):
        datasets.config.HF_DATASETS_TRUST_REMOTE_CODE = False


@contextmanager
def _cached_only_when_out_of_reach() -> Iterator[None]:
    """Spare a machine without a network the half minute of retries that `datasets` makes and prints."""
    import datasets
    from huggingface_hub import constants

    switches: tuple[Any, ...] = (datasets.config, constants)
    before = [switch.HF_HUB_OFFLINE for switch in switches]
    is_offline = any(before) or not _hub_answers()
    try:
        for switch in switches:
            switch.HF_HUB_OFFLINE = is_offline
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.HF_HUB_OFFLINE = value


def _hub_answers() -> bool:
    # Behind a proxy only the proxy can tell.
    if getproxies():
        return True
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    try:
        socket.create_connection((endpoint.hostname or "", port), timeout=SECONDS_TO_ANSWER).close()
    except OSError:
        return False
    return True

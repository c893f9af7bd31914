"""Small configs on the embedded data; no network, and no cache outside the test's own folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

from fedmtl.config import Config
from fedmtl.config.file import load_config

MakeConfig = Callable[..., Config]


@pytest.fixture(autouse=True, scope="session")
def _token_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("FEDMTL_CACHE")
    os.environ["FEDMTL_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["FEDMTL_CACHE"]
    else:
        os.environ["FEDMTL_CACHE"] = before


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    """A config of three tasks, two clients each, forty examples a task; overrides as of `--set`."""

    def make(*overrides: str) -> Config:
        small = [
            "model.server_model=random-1x32",
            "model.pair=dual",
            "model.pool=cls",
            *(f"tasks.{t}={{train_samples: 40, val_samples: 24}}" for t in ("sentiment", "paraphrase", "similarity")),
            "federation.clients_per_task=2",
            "training.num_rounds=2",
            "training.batch_size=8",
            "training.learning_rate=1e-3",
            "compute.workers=0",
            "compute.device=cpu",
            f"output={tmp_path / 'runs'}",
        ]
        return load_config(None, [*small, *overrides])

    return make

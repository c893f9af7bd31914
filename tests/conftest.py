"""Small configs on the embedded data; no network, and no cache outside the test's own folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest
from filelock import FileLock

from small_config import SMALL

os.environ["HF_HUB_OFFLINE"] = "1"

from fedmtl.config import Config
from fedmtl.config.file import load_config
from fedmtl.engines.start_up import ENCODER_CODE
from fedmtl.runs.folder import RunFolder

MakeConfig = Callable[..., Config]
RunOnce = Callable[..., RunFolder]
PRELOADED = ("fedmtl.engines.local", ENCODER_CODE, "fedmtl_studies.cells", "fedmtl_studies.computing")


@pytest.fixture(autouse=True, scope="session")
def _token_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("FEDMTL_CACHE")
    os.environ["FEDMTL_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["FEDMTL_CACHE"]
    else:
        os.environ["FEDMTL_CACHE"] = before


@pytest.fixture(autouse=True, scope="session")
def _loaded_workers() -> Iterator[None]:
    """Workers and cells are forked from one process, loaded with what any of them imports: it takes seconds for each.

    A run preloads what it needs itself; here one such process serves the runs of all tests, and the first one would
    decide for the others.
    """
    with pytest.MonkeyPatch.context() as patch:
        first = forkserver.set_forkserver_preload
        patch.setattr(forkserver, "set_forkserver_preload", lambda names: first([*names, *PRELOADED]))
        yield


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    """A config of three tasks, two clients each, forty examples a task; overrides as of `--set`."""

    def make(*overrides: str) -> Config:
        return load_config(None, [*SMALL, f"output={tmp_path / 'runs'}", *overrides])

    return make


@pytest.fixture(scope="session")
def run_once(tmp_path_factory: pytest.TempPathFactory) -> RunOnce:
    """A finished run of `make_config(*overrides)`, made once; tests compare theirs with it and change nothing of it."""
    from fedmtl.experiment.run import start_run

    made: dict[tuple[str, ...], RunFolder] = {}

    def run(*overrides: str) -> RunFolder:
        if overrides not in made:
            output = f"output={tmp_path_factory.mktemp('once')}"
            made[overrides] = start_run(load_config(None, [*SMALL, output, *overrides]), "once")
        return made[overrides]

    return run


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A run's workers have one thread each; with several, sums come out in another order."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """A saved model and its ONNX file, which tests of all processes share: tracing one takes seconds."""
    from compress.onnx_models import make_saved
    from fedmtl.export.onnx import export_onnx
    from model.tiny import write_encoder

    saved = make_saved(write_encoder("bert", tmp_path_factory.mktemp("bert") / "encoder"))
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    file = folder / "exported" / "model.onnx"
    with FileLock(folder / "exported.lock"):
        if not file.exists():
            export_onnx(saved, saved.bind(), file)
    return saved, file

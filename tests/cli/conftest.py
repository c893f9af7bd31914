"""The command line in this process, and a few small runs that all of these tests share."""

import shutil
import sys
from pathlib import Path

import pytest

from cli.small_runs import MADE, Cli, Result
from fedmtl.cli import main
from fedmtl.cli.export import Format, export
from fedmtl.config.file import load_config
from fedmtl.experiment.run import start_run
from small_config import SMALL


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    """`fedmtl` with these arguments, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    # Under `python -m pytest`, click would call the program `python -m pytest.fedmtl`.
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)

    def run(*arguments: str) -> Result:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["fedmtl", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Result(int(ended.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def made_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "runs"
    for name, overrides in MADE.items():
        start_run(load_config(None, [*SMALL, *overrides, f"output={folder}"]), name)
    return folder


@pytest.fixture
def runs(made_runs: Path, tmp_path: Path) -> Path:
    """The finished runs of `MADE`, where `fedmtl` looks for them; a copy, so that a test may change it."""
    shutil.copytree(made_runs, tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture(scope="session")
def exported_run(made_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run `demo` with its ONNX file, made once."""
    folder = tmp_path_factory.mktemp("exported") / "runs" / "demo"
    shutil.copytree(made_runs / "demo", folder)
    export(str(folder), Format.onnx)
    return folder

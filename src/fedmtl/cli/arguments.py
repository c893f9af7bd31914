"""Arguments and options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedmtl.errors import FedmtlError


def complete_run(incomplete: str) -> list[str]:
    """The runs here whose name begins so; for the shell."""
    names = sorted(path.parent.name for path in Path("runs").glob("[!.]*/config.yaml"))
    return [name for name in names if name.startswith(incomplete)]


Run = Annotated[str, typer.Argument(help="A run's name or folder.", autocompletion=complete_run)]
Model = Annotated[
    str,
    typer.Argument(
        help="A run's name or folder, or an ONNX bundle or file of one.", autocompletion=complete_run, metavar="RUN"
    ),
]
Client = Annotated[str | None, typer.Option(help="With the values that stay at this client.")]
Round = Annotated[
    str | None,
    typer.Option(
        "--round",
        help="The model after this round: best (overall score; of a task that stopped early, its score), last,"
        " or a number; otherwise the model that the run ended with.",
        metavar="best|last|N",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else on stdout.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Replace one setting, such as training.num_rounds=5.", metavar="KEY=VALUE"),
]
LayerMap = Annotated[
    str,
    typer.Option(
        "--layer-map",
        help="The teacher's hidden states to learn from: uniform, top, bottom, or numbers such as 0,3,6.",
        metavar="MAP",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Argument(help="YAML file; without one, a demonstration on embedded data.", metavar="[CONFIG]"),
]


def onnx_path(run: str, client: str | None = None, round: str | None = None) -> Path | None:
    """The ONNX file, or the graph of the bundle, that is named instead of a run; None where a run is."""
    path = Path(run)
    if not run.endswith(".onnx"):
        path = path / "model.onnx"
        if not path.is_file():
            return None
    for option, value in (("--client", client), ("--round", round)):
        if value is not None:
            raise FedmtlError(f"{option} {value}: an ONNX file has one set of values; export it with {option}")
    return path

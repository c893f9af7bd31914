"""The files of a Flower app's project: a few lines each, since what they do is installed with this package."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from fedmtl import __version__
from fedmtl.config.file import explained_config, explained_demo
from fedmtl.config.honoured import COMMANDS
from fedmtl.config.yaml_text import write_yaml
from fedmtl.deploy.tasks import configured_tasks
from fedmtl.errors import FedmtlError

PYPROJECT = """\
[project]
name = "{name}"
version = "1.0.0"
description = "A run of fedmtl as a Flower app"
license = "Apache-2.0"
# Nothing: fedmtl {version} is installed at the SuperLink and at every SuperNode by those who run them.
dependencies = []

[tool.flwr.app]
publisher = "fedmtl"

[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"

# Each can be given to one run: flwr run . SUPERLINK --run-config 'set="training.num_rounds=3"'
[tool.flwr.app.config]
output = ""  # The folder of runs at the SuperLink; the config's `output` unless given.
name = ""    # The run's name; a taken one gets -2, -3, ...
set = ""     # Settings in place of config.yaml's: KEY=VALUE KEY=VALUE
resume = ""  # A run's folder: go on with it after its last whole round.
nodes = ""   # Which SuperNode may join as which client: NAME=NUMBER,NAME=NUMBER
"""
SERVER_APP = '''\
"""Leads a run of fedmtl with the settings of config.yaml."""

from pathlib import Path

from fedmtl.deploy.flower_app import server_app

app = server_app(Path(__file__).with_name("config.yaml"))
'''
CLIENT_APP = '''\
"""Takes part in a run of fedmtl, as the node config of its SuperNode says."""

from fedmtl.deploy.flower_app import client_app

app = client_app()
'''
README = """\
# {name}

A run of fedmtl as a Flower app. `config.yaml` has its settings; `fedmtl run config.yaml` trains the same weights on one
machine. fedmtl {version} and Flower are installed at the SuperLink and at every SuperNode.

On one machine, to try it:

    export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
    flower-superlink --insecure --disable-runtime-dependency-installation
{supernodes}
    flwr run . SUPERLINK --stream

SUPERLINK is a connection that `flwr config list` shows. The run folder is at the SuperLink. A site's personal values,
its record (audit.jsonl) and its counts are in its folder, `sites/NAME` unless the node config has another `folder`.
More: docs/flower.md of fedmtl.
"""
NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")


def write_project(folder: Path, config: Path | None) -> list[str]:
    """Write a project into a new folder, with the settings of `config` or of the demonstration; return its clients."""
    if config is None:
        explained = explained_demo()
        text = files("fedmtl").joinpath("demo.yaml").read_text(encoding="utf-8")
    else:
        explained = explained_config(config)
        # Its paths are absolute: the project lies elsewhere, and runs elsewhere.
        text = write_yaml(dict(explained.given))
    COMMANDS["server"].check_file(explained.config)
    name = folder.absolute().name.lower().replace("_", "-")
    if NAME.fullmatch(name) is None:
        raise FedmtlError(f"{folder}: is no name of a Flower app; use letters, digits and `-`")
    tasks = configured_tasks(explained.config)
    words = {"name": name, "version": __version__, "supernodes": _supernodes(tasks)}
    texts = {
        "pyproject.toml": PYPROJECT.format(**words),
        "README.md": README.format(**words),
        "config.yaml": text,
        "server_app.py": SERVER_APP,
        "client_app.py": CLIENT_APP,
    }
    try:
        folder.mkdir(parents=True)
        for file, content in texts.items():
            (folder / file).write_text(content, encoding="utf-8")
    except FileExistsError:
        raise FedmtlError(f"{folder}: is there already; name a folder that is not") from None
    return list(tasks)


def _supernodes(tasks: Mapping[str, tuple[str, ...]]) -> str:
    """One command for each client, with a port for each: they share this machine."""
    return "\n".join(
        "    flower-supernode --insecure --superlink 127.0.0.1:8000 --port"
        f' {9100 + number} --node-config \'client="{client}" tasks="{",".join(names)}"\''
        for number, (client, names) in enumerate(tasks.items())
    )

"""fedmtl study"""

from __future__ import annotations

import typer

from fedmtl.cli.study.compression import compression
from fedmtl.cli.study.federated import federated
from fedmtl.cli.study.multitask import multitask
from fedmtl.cli.study.scaling import scaling
from fedmtl.cli.study.wire import wire

study = typer.Typer(name="study", help="Many runs, as tables and pictures.", no_args_is_help=True)
for command in (wire, multitask, compression, federated, scaling):
    study.command()(command)

"""The guide's `federated_main.py`: its options as ours; what it does not know goes through."""

from __future__ import annotations

import argparse
import sys

from fedmtl.cli.app import main as run_command


def main() -> None:
    sys.argv = ["fedmtl", *as_command(sys.argv[1:])]
    run_command()


def as_command(arguments: list[str]) -> list[str]:
    """The guide's arguments as those of a `fedmtl` command."""
    parser = argparse.ArgumentParser(prog="federated_main.py", description="Federated multi-task learning.")
    parser.add_argument("--mode", choices=["server", "client"], required=True)
    parser.add_argument("--config", help="YAML file; the server's.")
    parser.add_argument("--client_id", help="The client's name.")
    known, rest = parser.parse_known_args(arguments)
    command = [known.mode, *rest]
    if known.mode == "server":
        # The guide's lines of a round.
        command += ["--verbose"]
        if known.config is not None:
            command += ["--config", known.config]
    if known.mode == "client" and known.client_id is not None:
        command += ["--client-id", known.client_id]
    return command

"""The command line: parse, call, print. It holds no logic, and `fedmtl --help` loads no numeric library."""

from fedmtl.cli.app import main

__all__ = ["main"]

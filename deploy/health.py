"""Say whether a container does what it is there for: its exit code is 0 or 1.

health.py port 9092        a server listens and speaks TLS
health.py folder /data/x   a process is at work in this folder, as a site is in its own
health.py package          fedmtl can be imported
"""

from __future__ import annotations

import importlib
import socket
import ssl
import sys
from pathlib import Path


def listens(port: int) -> bool:
    """Whether a TLS handshake with the port of this machine succeeds; whose certificate it is does not matter here."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port), 5) as plain, context.wrap_socket(plain):
        return True


def works(what: str, *rest: str) -> bool:
    if what == "port":
        return listens(int(rest[0]))
    if what == "folder":
        from fedmtl.runs.folder import is_busy

        return is_busy(Path(rest[0]))
    return importlib.import_module("fedmtl") is not None


if __name__ == "__main__":
    try:
        healthy = works(*sys.argv[1:])
    except (OSError, ImportError) as error:
        print(error)
        healthy = False
    sys.exit(0 if healthy else 1)

"""How long a site needs to join while outsiders hold the port, and what they cost the server.

    python benchmarks/outsiders.py [--outsiders 500] [--bodies 100] [--files 0 256] [--out FILE]

A real `fedmtl server` with certificates listens on loopback. Half of the outsiders connect and say nothing, a quarter
finish TLS and say nothing, a quarter send a request's headers a byte at a time; whoever is thrown out comes back.
Others send bodies of 8 MB that nobody signed. Meanwhile a site that is enrolled joins, five times: from its first
connection until it has the server's welcome, after which it would load its examples. Printed and written: seconds to
join, the growth of the server's resident memory at its worst and at the end, and how many sockets the server had at its
worst and has left. `--files` is the server's `ulimit -n`, 0 for as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from fedmtl.engines.flower.addresses import Address
from fedmtl.engines.flower.certificates import CA, make_authority, make_node_key, read_private_key
from fedmtl.engines.flower.enrolment import enroll
from fedmtl.engines.flower.line import Line, LineLost, SiteKeys

MB = 1e6
BODY = 8_000_000
CONFIG = {
    "defaults": "plain",
    "model": {"server_model": "random-2x64", "max_length": 32},
    "tasks": {"sentiment": {"train_samples": 12, "val_samples": 4}},
    "federation": {"min_clients": 2, "join_timeout": 600},
    "compute": {"workers": 1, "device": "cpu"},
}


class Meter(threading.Thread):
    """The server's resident memory and connections, ten times a second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self.first = self.now = self.peak = resident_bytes(pid)
        self.connections = self.most_connections = 0
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.1):
            self.look()

    def look(self) -> None:
        self.now = resident_bytes(self._pid)
        self.peak = max(self.peak, self.now)
        self.connections = server_connections(self._pid)
        self.most_connections = max(self.most_connections, self.connections)

    def stop(self) -> None:
        self._done.set()
        self.join()


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def server_connections(pid: int) -> int:
    """Sockets that the process has open."""
    count = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            count += str(entry.readlink()).startswith("socket:")
        except OSError:
            continue
    return count


class Outsiders:
    """Connections of people who are not sites, from one process and few threads."""

    def __init__(self, where: tuple[str, int], ca: Path, count: int, bodies: int) -> None:
        self._where, self._count, self._bodies = where, count, bodies
        self._context = ssl.create_default_context(cafile=str(ca))
        self._done = threading.Event()
        self.opened = self.thrown_out = self.sent_bodies = 0
        self._threads = [
            *(threading.Thread(target=self._hold, args=(kind,), daemon=True) for kind in range(4)),
            *(threading.Thread(target=self._pour, daemon=True) for _ in range(min(10, bodies))),
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(30)

    def _hold(self, kind: int) -> None:
        """Keep a quarter of the outsiders connected; two of the four kinds never begin TLS."""
        there: list[socket.socket] = []
        while not self._done.is_set():
            gone = [each for each in there if not self._is_open(each, kind)]
            self.thrown_out += len(gone)
            for each in gone:
                there.remove(each)
                each.close()
            for _ in range(self._count // 4 - len(there)):
                made = self._connect(has_tls=kind >= 2)
                if made is not None:
                    there.append(made)
                    self.opened += 1
            self._done.wait(0.2)
        for each in there:
            each.close()

    def _connect(self, *, has_tls: bool) -> socket.socket | None:
        plain = None
        try:
            plain = socket.create_connection(self._where, 5)
            if has_tls:
                return self._context.wrap_socket(plain, server_hostname="127.0.0.1")
            return plain
        except OSError:
            if plain is not None:
                plain.close()
            return None

    def _is_open(self, connection: socket.socket, kind: int) -> bool:
        try:
            if kind == 3:
                connection.sendall(b"P")
            connection.settimeout(0)
            return connection.recv(1) != b""
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False
        finally:
            connection.settimeout(5)

    def _pour(self) -> None:
        """Send large bodies that nobody signed, one after the other."""
        head = b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % BODY
        while not self._done.is_set() and self.sent_bodies < self._bodies:
            self.sent_bodies += 1
            made = self._connect(has_tls=True)
            if made is None:
                continue
            try:
                made.sendall(head)
                for _ in range(BODY // 100_000):
                    made.sendall(bytes(100_000))
            except OSError:
                continue
            finally:
                made.close()


def seconds_to_join(line: Line, log: Path) -> float:
    """From the first connection until the server has welcomed the site and the site has all of the welcome."""
    started = time.monotonic()
    while time.monotonic() < started + 60:
        try:
            line.join()
            received = line.receive()
        except LineLost:
            continue
        if received is not None and received.envelope.kind == "welcome":
            return time.monotonic() - started
    raise SystemExit(f"the site did not join within 60 s; the server wrote:\n{log.read_text()}")


def measure(folder: Path, outsiders: int, bodies: int, files: int) -> dict[str, Any]:
    certs = folder / "certs"
    make_authority(certs, ["127.0.0.1"])
    names = ("sentiment_client_1", "sentiment_client_2")
    keys = {}
    for name in names:
        private, public = make_node_key(name, folder)
        enroll(certs, name, public.read_bytes(), ["sentiment"])
        keys[name] = SiteKeys(read_private_key(private), certs / CA)
    (folder / "run.yaml").write_text(json.dumps(CONFIG))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    log = folder / "server.log"
    command = [sys.executable, "-m", "fedmtl", "server", "--config", "run.yaml", "--listen", f"127.0.0.1:{port}"]
    with log.open("wb") as file:
        server = subprocess.Popen(
            [*command, "--certs", "certs", "--name", "besieged"],
            cwd=folder,
            stdout=file,
            stderr=file,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            preexec_fn=(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))) if files else None,
        )
    try:
        while "listening on" not in log.read_text():
            if server.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.1)
        time.sleep(1)
        return besiege(server.pid, Address("127.0.0.1", port), keys[names[0]], folder, outsiders, bodies) | {
            "server_is_up": server.poll() is None
        }
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)


def besiege(pid: int, address: Address, keys: SiteKeys, folder: Path, outsiders: int, bodies: int) -> dict[str, Any]:
    calm = Line(address, keys, folder / "calm/spool", 1 << 30)
    in_peace = seconds_to_join(calm, folder / "server.log")
    calm.close()
    meter = Meter(pid)
    meter.start()
    crowd = Outsiders((address.host, address.port), keys.ca, outsiders, bodies)
    # All of them have come at least once.
    end = time.monotonic() + 30
    while crowd.opened < outsiders and time.monotonic() < end:
        time.sleep(0.1)
    joins = []
    for number in range(5):
        line = Line(address, keys, folder / f"site{number}/spool", 1 << 30)
        joins.append(seconds_to_join(line, folder / "server.log"))
        line.close()
        time.sleep(1)
    while crowd.sent_bodies < bodies and time.monotonic() < end + 60:
        time.sleep(0.2)
    crowd.stop()
    time.sleep(20)
    meter.stop()
    meter.look()
    return {
        "outsiders": outsiders,
        "outsiders_connected": crowd.opened,
        "outsiders_thrown_out": crowd.thrown_out,
        "unsigned_bodies": crowd.sent_bodies,
        "seconds_to_join_in_peace": round(in_peace, 2),
        "seconds_to_join": [round(each, 2) for each in joins],
        "memory_growth_mb_at_most": round((meter.peak - meter.first) / MB, 1),
        "memory_growth_mb_at_the_end": round((meter.now - meter.first) / MB, 1),
        "sockets_at_most": meter.most_connections,
        "sockets_left": meter.connections,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--outsiders", type=int, default=500)
    parser.add_argument("--bodies", type=int, default=100)
    parser.add_argument("--files", type=int, nargs="+", default=[0, 256], help="the server's ulimit -n; 0: as it is")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    # The outsiders need open files too.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    results = {}
    for files in options.files:
        with tempfile.TemporaryDirectory() as name:
            found = measure(Path(name), options.outsiders, options.bodies, files)
        found["holds"] = max(found["seconds_to_join"]) <= 5 and found["memory_growth_mb_at_most"] <= 100
        results[f"ulimit -n {files}" if files else "files as they are"] = found
        print(json.dumps(found, indent=1), flush=True)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    if not all(each["holds"] and each["server_is_up"] for each in results.values()):
        raise SystemExit("not within 5 s and 100 MB")


if __name__ == "__main__":
    main()

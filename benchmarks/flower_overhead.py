"""Seconds of a round that are not training, and memory, over three sites with TLS: this project on its port, and
as a Flower app on a stock SuperLink, and a plain Flower app.

    python benchmarks/flower_overhead.py [--size 17 440] [--rounds 4] [--systems fedmtl app plain] [--out FILE]

All run on this machine's loopback, one after the other, with the load of the machine before each. The plain app has the
same number of bytes in one array, imports torch as an app that trains would, and sends back what it received; its
rounds are all overhead. Ours trains one step, on the port and in the app, and what its slowest site says it trained is
taken off. Memory is the proportional set size of all processes of a side, four times a second; beside it stands what
server and worker have when the same config runs on one machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedmtl.engines.flower.certificates import make_authority, make_node_key
from fedmtl.engines.flower.enrolment import enroll
from fedmtl.runs.events import RoundEvent
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events

SIDE = "FEDMTL_BENCH_SIDE"
# Encoders whose weights have about that many MB.
ENCODERS = {17: "random-5x256", 440: "random-16x768"}
SITES = ("sentiment_client_1", "sentiment_client_2", "sentiment_client_3")
BIN = Path(sys.executable).parent
MB = 1e6

SERVER_APP = """
import json, time
import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    weights = [np.random.default_rng(0).normal(size=context.run_config["values"]).astype(np.float32)]
    while len(nodes := list(grid.get_node_ids())) < 3:
        time.sleep(0.2)
    seconds = []
    for _ in range(context.run_config["rounds"]):
        started = time.perf_counter()
        content = RecordDict({"weights": ArrayRecord(weights)})
        replies = grid.send_and_receive([Message(content, node, "train") for node in nodes])
        arrays = [reply.content["weights"].to_numpy_ndarrays()[0] for reply in replies]
        weights = [sum(arrays) / len(arrays)]
        seconds.append(time.perf_counter() - started)
    with open(context.run_config["out"], "w") as file:
        json.dump(seconds, file)
"""
CLIENT_APP = """
import torch
from flwr.app import Message
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message, context):
    return Message(message.content, reply_to=message)
"""
PROJECT = """
[project]
name = "plain"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "bench"
[tool.flwr.app.components]
serverapp = "plain.server_app:app"
clientapp = "plain.client_app:app"
[tool.flwr.app.config]
values = {values}
rounds = {rounds}
out = "{out}"
"""


class Meter(threading.Thread):
    """The most memory that each side had at once."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peaks: dict[str, float] = defaultdict(float)
        self.pids: dict[str, int] = {}
        self._done = threading.Event()

    def run(self) -> None:
        looked = 0.0
        while not self._done.wait(0.25):
            if time.monotonic() > looked + 1:
                there, looked = members(), time.monotonic()
            now: dict[str, float] = defaultdict(float)
            for side, pid in there:
                used = proportional_bytes(pid)
                now[side] += used
                if pid == self.pids.get(side):
                    now[f"{side}, its own process"] = used
            for side, size in now.items():
                self.peaks[side] = max(self.peaks[side], size)

    def stop(self) -> dict[str, int]:
        self._done.set()
        self.join()
        return {side: round(size / MB) for side, size in sorted(self.peaks.items())}


def members() -> list[tuple[str, int]]:
    """Every process that was started for a side, whatever session it went to."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            sides = [each.partition(b"=")[2].decode() for each in variables if each.startswith(SIDE.encode() + b"=")]
            found += [(side, int(entry.name)) for side in sides]
    return found


def proportional_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def start(side: str, folder: Path, *command: str, **variables: str) -> subprocess.Popen[bytes]:
    with (folder / f"{side}.log").open("ab") as log:
        environment = {SIDE: side, "HF_HUB_OFFLINE": "1", "PATH": f"{BIN}:{os.environ['PATH']}", **variables}
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env={**os.environ, **environment})


def end_all() -> None:
    for _, pid in members():
        os.kill(pid, signal.SIGKILL)
    while members():
        time.sleep(0.1)


def config_of(size: int, rounds: int, clients: int) -> str:
    return json.dumps(
        {
            "defaults": "plain",
            "model": {"server_model": ENCODERS[size], "max_length": 32},
            "tasks": {"sentiment": {"train_samples": 12, "val_samples": 4}},
            "federation": {"clients_per_task": clients, "vocabulary_slices": False},
            "training": {"num_rounds": rounds, "local_steps": 1, "batch_size": 4},
            "evaluation": {"every": 1000},
            "compute": {"workers": 1, "device": "cpu"},
        }
    )


def prepare(folder: Path, size: int, rounds: int) -> None:
    """The config of ours, and certificates for all."""
    (folder / "run.yaml").write_text(config_of(size, rounds, len(SITES)))
    certs = folder / "certs"
    make_authority(certs, ["127.0.0.1"])
    for name in SITES:
        _, public = make_node_key(name, certs)
        enroll(certs, name, public.read_bytes(), ["sentiment"])


def measure_ours(folder: Path, port: int) -> dict[str, Any]:
    meter = Meter()
    meter.start()
    fedmtl = (sys.executable, "-m", "fedmtl")
    where = f"127.0.0.1:{port}"
    server = start("server", folder, *fedmtl, "server", "--config", "run.yaml", "--listen", where, "--certs", "certs")
    meter.pids["server"] = server.pid
    for number, name in enumerate(SITES):
        options = ("--client-id", name, "--tasks", "sentiment", "--server", where)
        keys = ("--ca", "certs/ca.crt", "--key", f"certs/{name}.key")
        start(f"site{number}", folder, *fedmtl, "client", *options, *keys)
    assert server.wait(1500) == 0, (folder / "server.log").read_text()
    peaks = meter.stop()
    end_all()
    return {**overheads(RunFolder(folder / "runs/run")), "peak_mb": peaks}


def overheads(run: RunFolder) -> dict[str, Any]:
    """What the rounds of a run took beyond what the slowest site says it trained."""
    rounds = [event for event in read_events(run) if isinstance(event, RoundEvent)][1:]
    spent = [each.train_seconds - each.longest_client_seconds for each in rounds]
    return {
        "overhead_seconds": [round(each, 2) for each in spent],
        "median_overhead_seconds": round(statistics.median(spent[1:]), 2),
        "training_seconds": [round(each.longest_client_seconds, 2) for each in rounds],
        "slice_mb": round(rounds[-1].bytes_down / len(SITES) / MB, 1),
    }


def measure_training(folder: Path, size: int) -> dict[str, int]:
    """What the two sides hold without a network: the same config on one machine, with one worker."""
    (folder / "alone.yaml").write_text(config_of(size, 2, 3))
    process = start("alone", folder, sys.executable, "-m", "fedmtl", "run", "alone.yaml")
    worker = main = 0.0
    while process.poll() is None:
        for _, pid in members():
            used = proportional_bytes(pid)
            if pid == process.pid:
                main = max(main, used)
            else:
                worker = max(worker, used)
        time.sleep(0.25)
    return {"server": round(main / MB), "worker": round(worker / MB)}


def measure_plain(folder: Path, values: int, rounds: int, port: int) -> dict[str, Any]:
    app = folder / "plain/plain"
    app.mkdir(parents=True)
    out = folder / "seconds.json"
    (app / "__init__.py").write_text("")
    (app / "server_app.py").write_text(SERVER_APP)
    (app / "client_app.py").write_text(CLIENT_APP)
    (app.parent / "pyproject.toml").write_text(PROJECT.format(values=values, rounds=rounds, out=out))
    peaks = run_stock(folder, app.parent, port, [""] * len(SITES), "", out.exists)
    seconds = json.loads(out.read_text())
    return {
        "overhead_seconds": [round(each, 2) for each in seconds],
        "median_overhead_seconds": round(statistics.median(seconds[1:]), 2),
        "peak_mb": peaks,
    }


def measure_app(folder: Path, port: int) -> dict[str, Any]:
    """Our run as a Flower app: the same config, on the same SuperLink as the plain app."""
    project, run = folder / "fedmtl-app", RunFolder(folder / "app-runs/app")
    start(
        "project", folder, sys.executable, "-m", "fedmtl", "flower", "new", str(project), "--config", "run.yaml"
    ).wait(120)
    nodes = [f'client="{name}" tasks="sentiment" folder="{folder / "app-sites" / name}"' for name in SITES]
    given = f'name="app" output="{run.path.parent}"'
    peaks = run_stock(folder, project, port, nodes, given, lambda: '"event": "end"' in text_of(run.events))
    return {**overheads(run), "peak_mb": peaks}


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def run_stock(
    folder: Path, app: Path, port: int, nodes: list[str], given: str, is_over: Callable[[], bool]
) -> dict[str, int]:
    """Run an app on a stock SuperLink with TLS, and a SuperNode for each of `nodes`; the memory of each side."""
    certs, home = folder / "certs", folder / f"home-{app.name}"
    home.mkdir()
    where = f"127.0.0.1:{port}"
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "bench"\n[superlink.bench]\naddress = "{where}"\n'
        f'root-certificates = "{certs / "ca.crt"}"\n'
    )
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_HOME": str(home)}
    tls = ("--ssl-certfile", str(certs / "server.crt"), "--ssl-keyfile", str(certs / "server.key"),
           "--ssl-ca-certfile", str(certs / "ca.crt"))  # fmt: skip
    meter = Meter()
    meter.start()
    local = ("--host", "127.0.0.1", "--port")
    start("server", folder, "flower-superlink", *tls, *local, str(port),
          "--disable-runtime-dependency-installation", **quiet)  # fmt: skip
    wait_until(lambda: "Uvicorn running" in text_of(folder / "server.log"), folder)
    for number, config in enumerate(nodes):
        trust = ("--superlink", where, "--root-certificates", str(certs / "ca.crt"))
        about = ("--node-config", config) if config else ()
        start(f"site{number}", folder, "flower-supernode", *trust, *about, *local, str(port + 1 + number), **quiet)
    command = ("flwr", "run", str(app), "bench", *(("--run-config", given) if given else ()))
    start("client", folder, *command, **quiet).wait(300)
    wait_until(is_over, folder)
    time.sleep(0.5)
    peaks = meter.stop()
    end_all()
    for log in folder.glob("*.log"):
        log.unlink()
    return peaks


def wait_until(is_so: Callable[[], bool], folder: Path) -> None:
    end = time.monotonic() + 1500
    while not is_so():
        assert time.monotonic() < end, "".join(log.read_text()[-2000:] for log in folder.glob("*.log"))
        time.sleep(0.5)


SYSTEMS = ("fedmtl", "app", "plain")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", type=int, nargs="+", default=[17, 440], choices=sorted(ENCODERS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--port", type=int, default=19200)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for size in options.size:
        found: dict[str, Any] = {}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            prepare(folder, size, options.rounds)
            for number, system in enumerate(options.systems):
                load, port = os.getloadavg()[0], options.port + 10 * number
                if system == "fedmtl":
                    found[system] = measure_ours(folder, port)
                    found["on one machine, MB"] = measure_training(folder, size)
                elif system == "app":
                    found[system] = measure_app(folder, port)
                else:
                    bytes_down = next((found[each]["slice_mb"] for each in ("fedmtl", "app") if each in found), size)
                    found[system] = measure_plain(folder, int(bytes_down * MB / 4), options.rounds, port)
                found[system]["load_before"] = round(load, 1)
                print(system, json.dumps(found[system]), flush=True)
        results[f"{size} MB"] = found
        print(json.dumps({f"{size} MB": results[f"{size} MB"]}, indent=1), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

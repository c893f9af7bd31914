"""How fast `fedmtl serve` answers: requests of one sentence each, sent at a fixed rate whatever the answers take.

    python benchmarks/serve_load.py runs/demo runs/demo/export/onnx --rate 200 --seconds 20

Each model is served by its process on a loopback port. The generator runs beside it on the same cores, so what it costs
is in the figures. A request's time counts from the moment at which it was due, not from when it was sent: one that
waits behind a slow answer is slow too. The sentences are those of the embedded sentiment task, in order.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from dataclasses import dataclass

from fedmtl.config.file import load_config
from fedmtl.tasks.load import load_tasks

WARM_UP_SECONDS = 2.0


@dataclass(frozen=True)
class Load:
    """What is sent: so many requests a second for so long, over so many connections that stay open."""

    rate: float
    seconds: float
    connections: int


@dataclass(frozen=True)
class Outcome:
    """Seconds of every request that was answered with 200, and how many were not."""

    seconds: list[float]
    failed: int
    elapsed: float

    def quantile(self, share: float) -> float:
        """The time that this share of the requests did not exceed; not a number where none was answered."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


async def generate(port: int, texts: Sequence[str], load: Load) -> Outcome:
    """Send the load to a server on this machine, and return what became of it."""
    loop = asyncio.get_running_loop()
    due: asyncio.Queue[tuple[float, str]] = asyncio.Queue()
    seconds: list[float] = []
    failed = 0

    async def connection() -> None:
        nonlocal failed
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            while True:
                when, text = await due.get()
                try:
                    status = await _post(reader, writer, text)
                finally:
                    due.task_done()
                if status == 200:
                    seconds.append(loop.time() - when)
                else:
                    failed += 1
        finally:
            writer.close()

    workers = [asyncio.create_task(connection()) for _ in range(load.connections)]
    started = loop.time()
    for number in range(int(load.rate * load.seconds)):
        when = started + number / load.rate
        await asyncio.sleep(max(0.0, when - loop.time()))
        due.put_nowait((when, texts[number % len(texts)]))
    await due.join()
    for worker in workers:
        worker.cancel()
    return Outcome(seconds, failed, loop.time() - started)


async def _post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, text: str) -> int:
    body = json.dumps({"texts": [text]}).encode()
    head = f"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    answer = await reader.readuntil(b"\r\n\r\n")
    found = re.search(rb"content-length: (\d+)", answer, re.IGNORECASE)
    assert found, "an answer without a length"
    await reader.readexactly(int(found[1]))
    return int(answer[9:12])


async def measure(model: str, texts: Sequence[str], load: Load) -> Outcome:
    """Serve a model, warm it up, send the load, and end the server."""
    command = (sys.executable, "-m", "fedmtl", "serve", model, "--port", "0")
    server = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    assert server.stdout is not None
    try:
        said = (await server.stdout.readline()).decode()
        port = re.search(r"http://127\.0\.0\.1:(\d+)", said)
        if port is None:
            raise SystemExit(f"{model}: the server did not start")
        print(said.strip())
        await generate(int(port[1]), texts, Load(load.rate, WARM_UP_SECONDS, load.connections))
        return await generate(int(port[1]), texts, load)
    finally:
        if server.returncode is None:
            server.send_signal(signal.SIGTERM)
            await server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="+", help="runs, ONNX bundles or ONNX files")
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second (default 200)")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long (default 20)")
    parser.add_argument("--connections", type=int, default=32, help="connections that stay open (default 32)")
    given = parser.parse_args()
    texts = load_tasks(load_config(None, ["tasks.sentiment={}"]))["sentiment"].train.texts[0]
    for model in given.models:
        print(f"load average before: {os.getloadavg()[0]:.2f} on {len(os.sched_getaffinity(0))} cores")
        found = asyncio.run(measure(model, texts, Load(given.rate, given.seconds, given.connections)))
        answered = len(found.seconds)
        shares = ", ".join(f"p{100 * share:g} {1e3 * found.quantile(share):.1f} ms" for share in (0.5, 0.95, 0.99))
        print(f"{answered} answered ({answered / found.elapsed:.0f}/s), {found.failed} failed; {shares}")


if __name__ == "__main__":
    main()

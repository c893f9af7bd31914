"""A switch in this process between network namespaces: every frame is late by 50 ms, and one in a hundred is lost.

The kernel's netem does the same where it is built in; this needs only root and /dev/net/tun.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterable

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
LONGEST_FRAME = 65536


def run_command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def why_not() -> str | None:
    """Why there can be no such network here."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "network namespaces are joined through /dev/net/tun, which is not here"
    try:
        run_command("ip", "netns", "add", "fedmtl-probe")
    except FileNotFoundError:
        return "network namespaces need iproute2"
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made: {error.stderr.decode().strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", "fedmtl-probe"], check=False, capture_output=True)
    return None


class Network:
    """Namespaces with an address each, on one switch; `cut` holds those whose cable is pulled."""

    def __init__(self, tag: str, addresses: dict[str, str], slow: Iterable[str], delay: float, loss: float) -> None:
        self.names = {name: f"{tag}-{number}" for number, name in enumerate(addresses)}
        self.cut: set[str] = set()
        self.dropped = 0
        self._slow, self._delay, self._loss = set(slow), delay, loss
        self._chance = random.Random(0)
        self._ports: dict[int, str] = {}
        self._places: dict[bytes, int] = {}
        self._done = threading.Event()
        for number, (name, address) in enumerate(addresses.items()):
            self._ports[self._plug(f"{tag}t{number}", self.names[name], address)] = name
        self._thread = threading.Thread(target=self._switch, daemon=True)
        self._thread.start()

    def _plug(self, device: str, place: str, address: str) -> int:
        run_command("ip", "netns", "add", place)
        port = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(port, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TAP | IFF_NO_PI))
        run_command("ip", "link", "set", device, "netns", place)
        run_command("ip", "-n", place, "link", "set", "lo", "up")
        run_command("ip", "-n", place, "address", "add", f"{address}/24", "dev", device)
        run_command("ip", "-n", place, "link", "set", device, "up")
        return port

    def _switch(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []
        count = 0
        while not self._done.is_set():
            pause = min(0.05, max(0.0, waiting[0][0] - time.monotonic())) if waiting else 0.05
            for port in select.select(list(self._ports), [], [], pause)[0]:
                for frame in self._frames(port):
                    for target in self._targets(port, frame):
                        late = self._delay * len({self._ports[port], self._ports[target]} & self._slow)
                        heapq.heappush(waiting, (time.monotonic() + late, count, target, frame))
                        count += 1
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, target, frame = heapq.heappop(waiting)
                if self._ports[target] not in self.cut:
                    self._write(target, frame)

    def _frames(self, port: int) -> Iterable[bytes]:
        for _ in range(64):
            try:
                frame = os.read(port, LONGEST_FRAME)
            except OSError:
                return
            if self._ports[port] in self.cut or self._chance.random() < self._loss:
                self.dropped += 1
                continue
            yield frame

    def _targets(self, port: int, frame: bytes) -> list[int]:
        self._places[frame[6:12]] = port
        known = self._places.get(frame[:6])
        return [known] if known is not None else [other for other in self._ports if other != port]

    def _write(self, port: int, frame: bytes) -> None:
        try:
            os.write(port, frame)
        except OSError:
            # Its queue is full or it is going away; networks lose frames.
            self.dropped += 1

    def close(self) -> None:
        self._done.set()
        self._thread.join(5)
        for port in self._ports:
            os.close(port)
        for place in self.names.values():
            subprocess.run(["ip", "netns", "del", place], check=False, capture_output=True)

"""What a run costs: seconds of CPU and GPU, joules where the machine tells them, and an estimate where it does not.

The CPU's joules come from RAPL (`/sys/class/powercap` of Linux), which counts whole processors, whoever uses them.
Where it cannot be read they are estimated as codecarbon does for a process and its children
(github.com/mlco2/codecarbon, `external/hardware.py`): CPU seconds times watts over cores, with codecarbon's
`POWER_CONSTANT` of 85 watts unless the config says another number. A GPU's joules come from NVML's counter of the whole
card. Memory, disks, cooling and networks are not counted.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedmtl.runs.event_lines import Event
from fedmtl.runs.events import EnergyEvent, EnergyTotals

# codecarbon's POWER_CONSTANT, for a processor that it does not know.
CPU_WATTS = 85.0
JOULES_PER_KWH = 3.6e6
# A run that is killed loses what it spent since its last event; more events would say no more.
SECONDS_BETWEEN_EVENTS = 30.0
# RAPL's counters begin again at zero after some 260 kJ, which takes a large processor ten minutes.
SECONDS_BETWEEN_READINGS = 60.0


class Meter:
    """Counts from its making on; `take` gives what was spent since the last call."""

    def __init__(self, cpu_watts: float = CPU_WATTS, powercap: Path = Path("/sys/class/powercap")) -> None:
        self._watts, self._cores = cpu_watts, os.cpu_count() or 1
        self._rapl = Rapl(powercap)
        self._nvml: Nvml | None = None
        self._gpu_from: float | None = None
        self._cpu_before = self._cpu = cpu_seconds()
        self._cpu_joules = self._gpu_joules = 0.0
        self._taken = time.monotonic()

    def watch(self, device: str) -> None:
        """Count a GPU from now on; `auto` is the first one, where there is any."""
        if device != "cpu":
            self._nvml = Nvml.open(device)
        if device.startswith("cuda") or self._nvml is not None:
            self._gpu_from = time.monotonic()
            self._gpu_joules = (self._nvml and self._nvml.joules()) or 0.0

    @property
    def is_due(self) -> bool:
        """Whether it is long enough since the last event for another one."""
        return time.monotonic() - self._taken >= SECONDS_BETWEEN_EVENTS

    def sample(self) -> None:
        """Look at the CPU seconds now: those of a process that ends may not be found later."""
        self._cpu = max(self._cpu, cpu_seconds())

    def take(self) -> EnergyEvent:
        """What was spent since the last call, or since the meter was made."""
        self.sample()
        now = time.monotonic()
        seconds, spent = now - self._taken, self._cpu - self._cpu_before
        cpu_total = self._rapl.joules()
        estimate = spent * self._watts / self._cores
        gpu_total = None if self._nvml is None else self._nvml.joules()
        event = EnergyEvent(
            seconds=seconds,
            cpu_seconds=spent,
            gpu_seconds=0.0 if self._gpu_from is None else now - max(self._taken, self._gpu_from),
            cpu_joules=estimate if cpu_total is None else cpu_total - self._cpu_joules,
            cpu_source="estimated" if cpu_total is None else "rapl",
            cpu_watts=self._watts if cpu_total is None else None,
            cores=self._cores,
            gpu_joules=None if gpu_total is None else max(0.0, gpu_total - self._gpu_joules),
            gpu_source=None if gpu_total is None else "nvml",
        )
        self._taken, self._cpu_before = now, self._cpu
        self._cpu_joules = self._cpu_joules if cpu_total is None else cpu_total
        self._gpu_joules = self._gpu_joules if gpu_total is None else gpu_total
        return event

    def close(self) -> None:
        self._rapl.close()


def cpu_seconds() -> float:
    """The CPU seconds of this process and of all that it started, those that have ended among them.

    On Linux the living ones are found in /proc: workers are children of multiprocessing's fork server. Elsewhere a
    child counts once it has ended.
    """
    stats = _process_stats()
    me = os.getpid()
    if me not in stats:
        times = os.times()
        return time.process_time() + times.children_user + times.children_system
    ticks = os.sysconf("SC_CLK_TCK")
    children: dict[int, list[int]] = {}
    for process, (parent, _, _) in stats.items():
        children.setdefault(parent, []).append(process)
    total, open_ = stats[me][2] / ticks, list(children.get(me, ()))
    while open_:
        process = open_.pop()
        total += sum(stats[process][1:]) / ticks
        open_ += children.get(process, ())
    return time.process_time() + total


def _process_stats() -> dict[int, tuple[int, int, int]]:
    """Every process's parent, its ticks, and those of its children that have ended."""
    found: dict[int, tuple[int, int, int]] = {}
    try:
        folders = [path for path in Path("/proc").iterdir() if path.name.isdigit()]
    except OSError:
        return found
    for folder in folders:
        try:
            # The name of a program may hold spaces and brackets.
            values = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            user, system, children_user, children_system = map(int, values[11:15])
            found[int(folder.name)] = (int(values[1]), user + system, children_user + children_system)
        except (OSError, ValueError, IndexError):
            continue
    return found


class Rapl:
    """The counters of all processor packages, added up; `joules` is None where they cannot be read."""

    def __init__(self, folder: Path) -> None:
        self._zones: dict[Path, tuple[int, int]] = {}
        self._total = 0
        self._lock, self._is_over = threading.Lock(), threading.Event()
        try:
            for zone in sorted(folder.glob("*-rapl:*")):
                is_package = (zone / "name").read_text().startswith("package")
                if is_package and re.fullmatch(r".*-rapl:[0-9]+", zone.name):
                    self._zones[zone] = _whole(zone / "energy_uj"), _whole(zone / "max_energy_range_uj")
        except (OSError, ValueError):
            # Most systems let only root read them.
            self._zones = {}
        if self._zones:
            threading.Thread(target=self._follow, daemon=True, name="rapl").start()

    def joules(self) -> float | None:
        """What was used since the counters were opened."""
        with self._lock:
            try:
                for zone, (before, most) in self._zones.items():
                    now = _whole(zone / "energy_uj")
                    self._total += now - before if now >= before else now - before + most
                    self._zones[zone] = now, most
            except (OSError, ValueError):
                self._zones = {}
            return self._total / 1e6 if self._zones else None

    def close(self) -> None:
        self._is_over.set()

    def _follow(self) -> None:
        while not self._is_over.wait(SECONDS_BETWEEN_READINGS):
            self.joules()


def _whole(path: Path) -> int:
    return int(path.read_text())


class Nvml:
    """One card's counter of millijoules, by NVIDIA's library of the driver; no package is needed."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle

    @classmethod
    def open(cls, device: str) -> Nvml | None:
        """The card of a device such as cuda or cuda:1; None without NVIDIA's driver or such a counter."""
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
            handle, name = ctypes.c_void_p(), _card(device)
            if library.nvmlInit_v2() != 0:
                return None
            if name.isdigit():
                error = library.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(handle))
            else:
                error = library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
        except (OSError, AttributeError):
            return None
        card = cls(library, handle)
        return card if error == 0 and card.joules() is not None else None

    def joules(self) -> float | None:
        """What the card has used since its driver was loaded."""
        total = ctypes.c_ulonglong()
        try:
            error = self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(total))
        except AttributeError:
            return None
        return None if error else total.value / 1000.0


def _card(device: str) -> str:
    """The index or UUID of a device among all cards; CUDA_VISIBLE_DEVICES may have renumbered them."""
    number = int(device.partition(":")[2] or 0)
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return visible[number] if number < len(visible) else str(number)


def total_energy(events: Iterable[Event], grams_per_kwh: float | None = None) -> EnergyTotals | None:
    """What a run has spent over all its sessions; None where no event tells of it."""
    spent = [event for event in events if isinstance(event, EnergyEvent)]
    if not spent:
        return None
    cpu = sum(event.cpu_joules or 0.0 for event in spent)
    has_gpu = any(event.gpu_joules is not None for event in spent)
    gpu = sum(event.gpu_joules or 0.0 for event in spent) if has_gpu else None
    return EnergyTotals(
        cpu_seconds=sum(event.cpu_seconds for event in spent),
        gpu_seconds=sum(event.gpu_seconds for event in spent),
        cpu_joules=cpu,
        gpu_joules=gpu,
        estimated=any(event.cpu_source == "estimated" for event in spent),
        grams_co2=None if grams_per_kwh is None else (cpu + (gpu or 0.0)) / JOULES_PER_KWH * grams_per_kwh,
    )


def energy_words(total: EnergyTotals) -> str:
    """A run's costs in a line, which says what is an estimate and what is not known."""
    words = f"{_seconds(total.cpu_seconds)} of CPU, {_joules(total.cpu_joules)}"
    words += " (estimated)" if total.estimated else " (RAPL, the whole processor)"
    if total.gpu_seconds:
        known = (
            f"{_joules(total.gpu_joules)} (NVML, the whole card)" if total.gpu_joules is not None else "joules unknown"
        )
        words += f"; {_seconds(total.gpu_seconds)} with a GPU, {known}"
    return words if total.grams_co2 is None else f"{words}; {total.grams_co2:.3g} g CO2"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 3600:.2f} h"


def _joules(joules: float) -> str:
    for unit, size in (("MJ", 1e6), ("kJ", 1e3)):
        if joules >= size:
            return f"{joules / size:.2f} {unit}"
    return f"{joules:.1f} J"

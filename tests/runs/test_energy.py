"""What a run spent: the sums are worked out here, and the counters are files and processes of the tests."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from fedmtl.engines.processes import warm_up
from fedmtl.runs import energy
from fedmtl.runs.energy import JOULES_PER_KWH, Meter, Rapl, cpu_seconds, energy_words, total_energy
from fedmtl.runs.events import EndEvent, EnergyEvent, EnergyTotals
from fedmtl.runs.summary import run_status, summarize


def burn(seconds):
    begun = time.process_time()
    while time.process_time() - begun < seconds:
        pass


def burn_and_wait(seconds, burned, end):
    burn(seconds)
    burned.set()
    end.wait()


def spent(**changes):
    plain = {"seconds": 2.0, "cpu_seconds": 4.0, "gpu_seconds": 0.0, "cpu_joules": 100.0, "cpu_source": "estimated"}
    return EnergyEvent(**(plain | changes))


@pytest.fixture
def powercap(tmp_path):
    """A folder of counters as Linux has them: a package, its cores inside, and the whole platform beside it."""

    def write(package, cores=7, most=1_000_000_000):
        for name, kind, value in (
            ("intel-rapl:0", "package-0", package),
            ("intel-rapl:0:0", "core", cores),
            ("intel-rapl:1", "psys", 10**12),
        ):
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            (folder / "name").write_text(f"{kind}\n")
            (folder / "energy_uj").write_text(f"{value}\n")
            (folder / "max_energy_range_uj").write_text(f"{most}\n")
        return tmp_path

    return write


def test_rapl_counts_packages_only_and_over_the_end_of_its_counter(powercap):
    rapl = Rapl(powercap(999_000_000))
    powercap(999_500_000)
    assert rapl.joules() == 0.5
    # To the end of the counter another 0.5 J, and 2 J from its beginning.
    powercap(2_000_000)
    assert rapl.joules() == 3.0
    rapl.close()


def test_counters_that_cannot_be_read_are_none(powercap, tmp_path):
    assert Rapl(tmp_path / "nothing").joules() is None
    rapl = Rapl(powercap(5))
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
    assert rapl.joules() is None
    rapl.close()


def test_a_meter_takes_what_the_counters_say_and_each_joule_once(powercap):
    meter = Meter(powercap=powercap(1_000_000))
    powercap(4_000_000)
    first, second = meter.take(), meter.take()
    assert (first.cpu_joules, first.cpu_source, first.cpu_watts) == (3.0, "rapl", None)
    assert second.cpu_joules == 0.0
    meter.close()


def test_without_counters_joules_are_cpu_seconds_times_watts_over_cores(tmp_path):
    meter = Meter(cpu_watts=40.0, powercap=tmp_path)
    burn(0.05)
    event = meter.take()
    assert event.cpu_seconds >= 0.05
    assert event.cpu_joules == event.cpu_seconds * 40.0 / os.cpu_count()
    assert (event.cpu_source, event.cpu_watts, event.gpu_joules) == ("estimated", 40.0, None)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="living processes are found in /proc")
@pytest.mark.parametrize("method", [pytest.param("forkserver", marks=pytest.mark.slow), "spawn"])
def test_the_seconds_of_workers_count_while_they_live_and_once_when_they_have_ended(method):
    # The fork server that it may be the first to need serves all other tests of this process.
    warm_up()
    context = multiprocessing.get_context(method)
    burned, end = context.Event(), context.Event()
    before = cpu_seconds()
    worker = context.Process(target=burn_and_wait, args=(0.2, burned, end))
    worker.start()
    assert burned.wait(60)
    alive = cpu_seconds()
    assert alive - before >= 0.15
    end.set()
    worker.join()
    # The fork server takes note of an ended child a moment later; until then it counts as a zombie.
    ended = cpu_seconds()
    assert alive - 0.02 <= ended <= alive + 1.0


def test_sums_are_over_all_sessions():
    events = [spent(), spent(cpu_joules=50.0, cpu_source="rapl"), spent(gpu_seconds=2.0, gpu_joules=7.0)]
    total = total_energy(events, grams_per_kwh=300.0)
    assert total == EnergyTotals(
        cpu_seconds=12.0,
        gpu_seconds=2.0,
        cpu_joules=250.0,
        gpu_joules=7.0,
        estimated=True,
        grams_co2=257.0 / JOULES_PER_KWH * 300.0,
    )
    assert total_energy([]) is None


def test_there_is_no_co2_without_the_users_number():
    assert total_energy([spent()]).grams_co2 is None
    assert "CO2" not in energy_words(total_energy([spent()]))
    assert energy_words(total_energy([spent()], 3600.0)) == "4.0 s of CPU, 100.0 J (estimated); 0.1 g CO2"


def test_words_say_what_is_measured_and_what_is_unknown():
    measured = total_energy([spent(cpu_source="rapl", cpu_joules=5200.0)])
    assert energy_words(measured) == "4.0 s of CPU, 5.20 kJ (RAPL, the whole processor)"
    blind = total_energy([spent(gpu_seconds=7200.0)])
    assert energy_words(blind).endswith("; 2.00 h with a GPU, joules unknown")
    card = total_energy([spent(gpu_seconds=3.0, gpu_joules=2e6)])
    assert energy_words(card).endswith("; 3.0 s with a GPU, 2.00 MJ (NVML, the whole card)")


def test_status_and_summary_have_the_end_or_the_sum_so_far():
    assert run_status([spent(), spent()], "a").energy.cpu_seconds == 8.0
    end = EndEvent(status="done", energy=total_energy([spent(), spent()], 3600.0))
    assert summarize([spent(), spent(), end], "a").energy.grams_co2 == pytest.approx(0.2)
    assert summarize([], "a").energy is None


class Driver:
    """NVIDIA's library as far as it is called; the card has spent `millijoules`."""

    def __init__(self, millijoules, error=0):
        self.millijoules, self.error, self.opened = millijoules, error, None

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        self.opened = index
        return 0

    def nvmlDeviceGetHandleByUUID(self, name, handle):
        self.opened = name
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, total):
        total._obj.value = self.millijoules
        return self.error


def test_a_card_counts_from_the_moment_it_is_watched(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    driver = Driver(5_000_000)
    monkeypatch.setattr(energy.ctypes, "CDLL", lambda name: driver)
    meter = Meter(powercap=tmp_path)
    meter.watch("cuda:1")
    assert driver.opened == 1
    driver.millijoules += 1500
    event = meter.take()
    assert (event.gpu_joules, event.gpu_source) == (1.5, "nvml")
    assert 0 < event.gpu_seconds <= event.seconds
    assert meter.take().gpu_joules == 0.0


def test_a_card_without_a_counter_has_seconds_and_no_joules(monkeypatch, tmp_path):
    monkeypatch.setattr(energy.ctypes, "CDLL", lambda name: Driver(0, error=3))
    meter = Meter(powercap=tmp_path)
    meter.watch("cuda")
    event = meter.take()
    assert (event.gpu_joules, event.gpu_source) == (None, None)
    assert event.gpu_seconds > 0


def test_a_machine_without_a_card_counts_none(monkeypatch, tmp_path):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(energy.ctypes, "CDLL", missing)
    meter = Meter(powercap=tmp_path)
    meter.watch("auto")
    assert meter.take().gpu_seconds == 0.0


@pytest.mark.parametrize(
    ("visible", "device", "card"),
    [(None, "cuda", "0"), (None, "cuda:2", "2"), ("3,1", "cuda:1", "1"), ("GPU-ab,GPU-cd", "cuda", "GPU-ab")],
)
def test_a_device_is_the_card_that_the_environment_numbers_so(monkeypatch, visible, device, card):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert energy._card(device) == card

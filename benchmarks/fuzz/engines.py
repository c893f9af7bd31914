"""Other ways to make inputs: Hypothesis, which shrinks what fails, and atheris, which follows coverage."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FunctionType
from typing import Any

from fuzz.loop import error_class, outcome, quiet
from fuzz.targets import Target, scratch

Engine = Callable[[Sequence[Target], float, int, Path], int]


def with_hypothesis(targets: Sequence[Target], seconds: float, seed: int, found: Path) -> int:
    """Inputs by Hypothesis: seeds of the corpus with a drawn number of drawn mutations. 1 where anything was found."""
    from hypothesis import HealthCheck, Phase, settings
    from hypothesis import seed as seeded

    quiet()
    status = 0
    for target in targets:
        end = time.monotonic() + seconds / len(targets)
        tried = 0
        with scratch() as folder:
            run = target.open(folder)

            def check(data: bytes, run: Any = run, target: Target = target, end: float = end) -> None:
                nonlocal tried
                if time.monotonic() > end:
                    return
                tried += 1
                with _alarm(target.seconds):
                    error = outcome(run, data)
                if error is not None and not isinstance(error, target.expected):
                    _save(found, target, data, error)
                    raise error

            quick = settings(
                max_examples=1_000_000,
                deadline=None,
                database=None,
                phases=(Phase.generate, Phase.shrink),
                suppress_health_check=list(HealthCheck),
            )
            try:
                _bounded(quick, seeded(seed), inputs_of(target), check, end)
                word = "nothing unexpected"
            except Exception as error:
                status, word = 1, error_class(error)
        print(f"{target.name}: {tried:,} inputs by Hypothesis, {word}", flush=True)
    return status


def inputs_of(target: Target) -> Any:
    """A strategy for a target's inputs; the random numbers of its mutations are drawn, so that they shrink."""
    from hypothesis import strategies as st

    corpus = target.corpus() or [b""]

    def mutated(data: bytes, randoms: list[Random]) -> bytes:
        for random in randoms:
            data = target.format.mutate(data, random, corpus)
        return data

    return st.builds(mutated, st.sampled_from(corpus), st.lists(st.randoms(use_true_random=False), max_size=4))


def _bounded(quick: Any, seeded: Any, strategy: Any, check: Callable[[bytes], None], end: float) -> None:
    from hypothesis import given

    @seeded
    @quick
    @given(strategy)
    def attempt(data: bytes) -> None:
        if time.monotonic() > end:
            raise _Over
        check(data)

    try:
        attempt()
    except _Over:
        return


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise an error in what takes longer; nobody watches this process."""

    def ring(*signal: object) -> None:
        raise TimeoutError(f"took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class _Over(BaseException):
    """The target's time is over."""


def with_atheris(targets: Sequence[Target], seconds: float, seed: int, found: Path) -> int:
    """Inputs by atheris, led by the lines of fedmtl that they reach; our mutations are its mutator's."""
    if not has_atheris():
        raise SystemExit("--engine atheris: it is not installed; run `pip install atheris`")
    status = 0
    for target in targets:
        # It ends its process itself, with another code where something was found.
        with scratch() as folder:
            child = os.fork()
            if child == 0:
                _follow_coverage(target, folder, seconds / len(targets), seed, found)
            failed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
        status |= failed
        print(f"{target.name}: {'found something' if failed else 'nothing unexpected'} by atheris", flush=True)
    return int(status)


def has_atheris() -> bool:
    return importlib.util.find_spec("atheris") is not None


def _follow_coverage(target: Target, folder: Path, seconds: float, seed: int, found: Path) -> None:
    import atheris

    quiet()
    for function in _loaded_functions():
        atheris.instrument_func(function)
    with atheris.instrument_imports(include=["fedmtl"]):
        run = target.open(folder)
    corpus = target.corpus() or [b""]

    def mutate(data: bytes, max_size: int, number: int) -> bytes:
        random = Random(number)
        if random.random() < 0.3:
            return bytes(atheris.Mutate(data, max_size))
        return target.format.mutate(data, random, corpus)[:max_size]

    def check(data: bytes) -> None:
        error = outcome(run, data)
        if error is not None and not isinstance(error, target.expected):
            _save(found, target, data, error)
            raise error

    start = folder / ".corpus"
    start.mkdir()
    for number, data in enumerate(corpus):
        (start / str(number)).write_bytes(data)
    options = [f"-max_total_time={max(1, round(seconds))}", f"-seed={seed + 1}", f"-timeout={round(target.seconds)}"]
    limits = [
        "-max_len=65536",
        "-rss_limit_mb=4096",
        f"-artifact_prefix={folder}/",
        "-print_final_stats=0",
        "-verbosity=0",
    ]
    atheris.Setup([sys.argv[0], *options, *limits, str(start)], check, custom_mutator=mutate)
    atheris.Fuzz()
    os._exit(0)


def _loaded_functions() -> list[FunctionType]:
    """The functions of fedmtl that are loaded already, those of the format among them."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("fedmtl.")]
    named = [(module, value) for module in modules for value in vars(module).values()]
    return [f for module, f in named if isinstance(f, FunctionType) and f.__module__ == module.__name__]


def _save(found: Path, target: Target, data: bytes, error: BaseException) -> None:
    """The file that `--repro` reads; a shorter input of the same class replaces it."""
    found.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(f"exception {error_class(error)}".encode()).hexdigest()[:8]
    path = found / f"{target.name}--exception-{name}"
    if not path.exists() or len(path.read_bytes()) > len(data):
        path.write_bytes(data)
        about = "".join(traceback.format_exception(error))
        path.with_name(path.name + ".txt").write_text(about, encoding="utf-8", errors="replace")


ENGINES: dict[str, Engine] = {"hypothesis": with_hypothesis, "atheris": with_atheris}

"""What stands in the way of a run on this machine: every check is a finding with what was found and what to do.

The machine itself is looked at in `deploy/machine.py`; here are folders, the tokenizer and the policy of a config. No
check changes anything: a folder is tried with a file that is removed at once.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedmtl.config import Config
from fedmtl.config.file import demo_config, load_config
from fedmtl.deploy.machine import (
    Finding,
    Level,
    certificate_findings,
    clock_finding,
    gpu_finding,
    import_error,
    installed,
    kernel_finding,
    port_finding,
    server_clock_finding,
    version_findings,
)
from fedmtl.errors import FedmtlError
from fedmtl.foreign import excerpt

RESERVE = 100 << 20
# Parameters of the token table of `random-LxH` and, in a layer, of its products.
RANDOM_ROWS, RANDOM_LAYER = 40_000, 12
TOKENIZER_VERSION = "1.0"
# An encoder may have rows that no token uses, to be a multiple of something.
MOST_SPARE = 0.1


@dataclass(frozen=True)
class Examined:
    """What is looked at besides the machine itself; whatever is None is left out."""

    config: Path | None = None
    policy: Path | None = None
    tasks: tuple[str, ...] = ()
    listen: str | None = None
    server: str | None = None
    ca: Path | None = None
    key: Path | None = None
    certs: Path | None = None

    def left_out(self) -> list[str]:
        """What was not looked at, each with the option that would have it looked at."""
        options = {"--config": self.config, "--policy": self.policy, "--listen": self.listen,
                   "--server": self.server, "--certs": self.certs}  # fmt: skip
        about = ("your config (the demonstration's stands for it)", "a policy", "a port", "a server's clock",
                 "certificates")  # fmt: skip
        return [f"{what}: {option}" for (option, given), what in zip(options.items(), about, strict=True) if not given]


def examine(examined: Examined) -> list[Finding]:
    """All findings, in the order of the table."""
    found = [*version_findings(), kernel_finding()]
    config: Config | None = None
    try:
        config = load_config(examined.config) if examined.config else demo_config()
    except FedmtlError as error:
        found.append(Finding("config", "fault", str(error), "correct the config; what depends on it was left out"))
    found.append(gpu_finding(config.compute.device if config else "auto"))
    found.append(clock_finding())
    if examined.server is not None:
        found.append(server_clock_finding(examined.server, examined.ca, examined.key))
    if examined.listen is not None:
        found.append(port_finding(examined.listen))
    if examined.certs is not None:
        found += certificate_findings(examined.certs)
    if config is not None:
        found += storage_findings(config)
        found.append(tokenizer_finding(config.model.server_model))
    if examined.policy is not None:
        found += policy_findings(examined.policy, config if examined.config else None, examined.tasks)
    return found


def as_json(found: Sequence[Finding], left_out: Sequence[str]) -> str:
    counts = {f"{level}s": sum(each.level == level for each in found) for level in ("warning", "fault")}
    return json.dumps({"findings": [asdict(each) for each in found], **counts, "not_examined": list(left_out)})


def storage_findings(config: Config) -> Iterator[Finding]:
    """The output folder and the cache of tokens: whether they can be written, and have the space that a run may need.

    On one disk, they need the sum.
    """
    from fedmtl.tasks.tokens import token_cache

    output, cache = Path(config.output), token_cache(config.data)
    parameters = num_parameters(config.model.server_model)
    needs = [run_bytes(config, parameters or 0), cache_bytes(config)]
    if _existing(output).stat().st_dev == _existing(cache).stat().st_dev:
        needs = [sum(needs)] * 2
    for option, folder, need in zip(("output", "data.cache"), (output, cache), needs, strict=True):
        about, there = f"{option} {folder}", _existing(folder)
        refused = _cannot_write(there)
        if refused is not None:
            remedy = f"mount it writable or change its rights, or name another folder ({option})"
            yield Finding(about, "fault", f"{there} cannot be written: {refused}", remedy)
            continue
        free = shutil.disk_usage(there).free
        found = f"{_size(free)} free, a run needs about {_size(need)}"
        found += "" if parameters is not None else ", and more for the encoder, whose size is not known here"
        level: Level = "fault" if free < need else "warning" if free < 2 * need else "ok"
        remedy = f"free space there, or name a folder on another disk ({option})"
        yield Finding(about, level, found, "" if level == "ok" else remedy)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there, in which it would be made."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def _cannot_write(folder: Path) -> str | None:
    """Why no file can be made in a folder, found by making one: rights say little of root, of mounts and of quotas."""
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".fedmtl-doctor-") as file:
            file.write(b"x")
    except OSError as error:
        return "its file system is mounted read-only" if error.errno == errno.EROFS else error.strerror or str(error)
    return None


def num_parameters(encoder: str) -> int | None:
    """How many values an encoder has, by its name or the heads of its files; None where they are not here."""
    from fedmtl.model.encoder_files import encoder_folder

    shape = re.fullmatch(r"random-(\d+)x(\d+)", encoder)
    if shape:
        layers, width = int(shape[1]), int(shape[2])
        return RANDOM_ROWS * width + RANDOM_LAYER * layers * width**2
    files = list(encoder_folder(encoder).glob("*.safetensors")) if encoder_folder(encoder).is_dir() else []
    try:
        return sum(map(_num_values, files)) if files else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _num_values(path: Path) -> int:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        head = json.loads(file.read(min(length, 100 << 20)))
    return sum(math.prod(entry["shape"]) for name, entry in head.items() if name != "__metadata__")


def run_bytes(config: Config, parameters: int) -> int:
    """About what a run's folder may have at most: checkpoints, the model twice, and each client's job and update."""
    from fedmtl.tasks.task import task_clients

    every = config.checkpoint.every
    # The last two, the best, the one that is being written, and every n-th.
    checkpoints = 4 + (config.training.num_rounds // every if every else 0)
    moments = {"none": 0, "fedavgm": 1}.get(config.federation.server_optimizer.kind, 2)
    clients = set().union(*task_clients(config).values())
    copies = checkpoints * (1 + moments) + 2 + 2 * len(clients)
    return RESERVE + 4 * parameters * copies


def cache_bytes(config: Config) -> int:
    """About what the tokens of the config's files take: twice a file, eight times one that is packed."""
    sources = [source for task in config.tasks.values() if (source := task.source)]
    named = [name for source in sources for name in (source.train, source.validation, *source.more_validation.values())]
    files = [Path(name) for name in named if name and Path(name).is_file()]
    return RESERVE + sum(path.stat().st_size * (8 if path.suffix in (".gz", ".parquet") else 2) for path in files)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def tokenizer_finding(encoder: str) -> Finding:
    """Whether the installed tokenizers reads an encoder's tokenizer.json, and whether its tokens fit the encoder."""
    from fedmtl.model.encoder_files import encoder_folder

    about, folder = f"tokenizer of {encoder}", encoder_folder(encoder)
    if re.fullmatch(r"random-\d+x\d+", encoder):
        return Finding(about, "ok", "the one in the package")
    if not folder.is_dir():
        return Finding(about, "ok", "the encoder is no folder here; it comes from the hub when a run begins")
    file = folder / "tokenizer.json"
    again = "load it with the transformers that is installed here, and `save_pretrained` it into the folder again"
    if not file.is_file():
        if (folder / "vocab.txt").is_file():
            return Finding(about, "warning", "old: vocab.txt alone, from which one is made at each start", again)
        return Finding(about, "fault", f"{folder} has no tokenizer.json", again)
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        format_ = record.get("version") if isinstance(record, dict) else None
    except (OSError, ValueError, RecursionError) as error:
        return Finding(about, "fault", f"{file} cannot be read: {excerpt(str(error))}", "put back a copy of the file")
    if format_ != TOKENIZER_VERSION:
        found = f"{file} has the format {excerpt(str(format_))}, and {TOKENIZER_VERSION} is read here"
        return Finding(about, "fault", f"old: {found}", again)
    try:
        from tokenizers import Tokenizer

        size = max(Tokenizer.from_file(str(file)).get_vocab().values(), default=-1) + 1
    except Exception as error:  # its kinds are not public
        found = f"old or damaged: tokenizers {installed('tokenizers')} cannot load {file} ({excerpt(str(error))})"
        return Finding(about, "fault", found, again)
    return _fit(about, size, folder)


def _fit(about: str, size: int, folder: Path) -> Finding:
    try:
        rows = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        rows = None
    if not isinstance(rows, int):
        return Finding(about, "ok", f"{size:,} tokens")
    found = f"{size:,} tokens, the encoder has {rows:,}"
    remedy = f"put the tokenizer into {folder} with which the encoder was trained"
    if size > rows:
        return Finding(about, "fault", f"{found}: some have no row", remedy)
    is_other = size < (1 - MOST_SPARE) * rows
    return Finding(about, "warning" if is_other else "ok", found, remedy if is_other else "")


def policy_findings(path: Path, config: Config | None, tasks: Sequence[str] = ()) -> Iterator[Finding]:
    """What a site with this policy would refuse of the config, task by task, in the words it would refuse it with."""
    from fedmtl.federation.policy import read_policy

    about = f"policy {path}"
    try:
        policy = read_policy(path)
    except FedmtlError as error:
        yield Finding(about, "fault", str(error), "correct the line; `fedmtl policy init` writes one that is right")
        return
    if config is None:
        yield Finding(about, "ok", policy.words())
        return
    if import_error("torch") is not None:
        remedy = "install torch, then look again"
        yield Finding(about, "warning", "was not compared with the config, which needs torch", remedy)
        return
    refused = 0
    for task in tasks or tuple(config.tasks):
        reason = _refusal(policy, config, task)
        if reason is not None:
            refused += 1
            yield Finding(about, "fault", f"forbids {task}: {reason}",
                          "allow it in the policy if its owner wants that, change the config, or name the tasks that"
                          " this site brings with --tasks")  # fmt: skip
    if not refused:
        yield Finding(about, "ok", f"allows {', '.join(tasks or tuple(config.tasks))}")


def _refusal(policy: Any, config: Config, task: str) -> str | None:
    """Let a site of one task take the config as it takes a server's; a file of its examples stands for its data."""
    from fedmtl.deploy.site_config import site_config
    from fedmtl.deploy.site_worker import SiteSettings
    from fedmtl.deploy.tasks import check_deployable

    here = Path(os.curdir)
    allowed = policy.tasks.get(task)
    examples = allowed.file if allowed is not None and allowed.file else os.devnull
    encoder = config.model.server_model if Path(config.model.server_model).is_dir() else None
    site = SiteSettings("site", (task,), here, here, files={task: examples}, model=encoder, policy=policy)
    try:
        check_deployable(config)
        site_config(config, site)
    except FedmtlError as error:
        # The server names labels beside its config, from its examples or its sites'.
        return None if error.code == "labels_missing" else str(error)
    return None

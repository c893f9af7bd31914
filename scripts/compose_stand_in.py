"""Start what deploy/compose.yaml says where there is no container runtime: its commands, as processes on loopback.

    python scripts/compose_stand_in.py deploy/compose.yaml --folder stand-in

Every service has the command and the environment that the file gives it, and each of its volumes is a folder under
`--folder`; a service sees the paths of these folders wherever its command has a path inside the container. The names of
services become 127.0.0.1. Services start in the order of `depends_on` with its conditions, health checks included. What
a container adds, the user, the read-only root and the limits, is not there: the image's own steps are for that.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

# What the image's Dockerfile says: where a container starts, and by which command.
ENTRYPOINT, WORKDIR = ["fedmtl"], "/data"
PORT = 9092
HEALTH = "/usr/local/lib/fedmtl-health.py"
LONGEST = 1800.0
WHAT = ("service_started", "service_healthy", "service_completed_successfully")


class Wrong(Exception):
    """The file says what this script does not do, or a service failed."""


@dataclass
class Service:
    """One service, its paths and names replaced by those of this machine."""

    name: str
    command: list[str]
    environment: dict[str, str]
    folder: Path
    depends_on: dict[str, str]
    health: list[str] | None
    process: subprocess.Popen[bytes] | None = None
    log: Path = field(default=Path())


KNOWN = {
    "image", "build", "user", "read_only", "tmpfs", "cap_drop", "security_opt", "pids_limit", "environment", "restart",
    "entrypoint", "command", "volumes", "depends_on", "healthcheck", "stop_grace_period", "profiles", "ports",
}  # fmt: skip


def read_services(path: Path, folder: Path, port: int | None = None) -> dict[str, Service]:
    """The services of a compose file that are in no profile, with their volumes under a folder.

    A `port` is used instead of the server's, where that may be somebody else's on this machine.
    """
    text = path.read_text(encoding="utf-8")
    plain = yaml.safe_load(text if port is None else re.sub(rf"\b{PORT}\b", str(port), text))
    sections = {name: one for name, one in plain["services"].items() if not one.get("profiles")}
    names = list(plain.get("volumes") or {})
    return {name: _service(name, one, path, folder, names, list(sections)) for name, one in sections.items()}


def _service(
    name: str, section: Mapping[str, Any], path: Path, folder: Path, volumes: Sequence[str], services: Sequence[str]
) -> Service:
    unknown = sorted(set(section) - KNOWN)
    if unknown:
        raise Wrong(f"{path}: services.{name}.{unknown[0]} is a key that this script does not know")
    mounts: dict[str, Path] = {}
    for mount in section.get("volumes", []):
        source, target = mount.split(":")[:2]
        if source in volumes:
            mounts[target] = folder / "volumes" / source
            mounts[target].mkdir(parents=True, exist_ok=True, mode=0o700)
        elif source.startswith("."):
            mounts[target] = (path.parent / source).resolve(strict=True)
        else:
            raise Wrong(f"{path}: services.{name}.volumes: {source} is no volume of the file")
    mounts[HEALTH] = path.parent.resolve() / "health.py"
    environment = {
        key: _here(str(value), mounts, services) for key, value in (section.get("environment") or {}).items()
    }
    words = [*section.get("entrypoint", ENTRYPOINT), *section.get("command", [])]
    depends = section.get("depends_on") or {}
    conditions = {other: depends[other]["condition"] for other in depends}
    for other, condition in conditions.items():
        if other not in services or condition not in WHAT:
            raise Wrong(f"{path}: services.{name}.depends_on: {other} with {condition} is not known")
    check = (section.get("healthcheck") or {}).get("test")
    if check is not None and check[0] != "CMD":
        raise Wrong(f"{path}: services.{name}.healthcheck.test: begins with CMD")
    return Service(
        name,
        [_here(word, mounts, services) for word in words],
        environment,
        mounts.get(WORKDIR, folder / "empty"),
        conditions,
        [_here(word, mounts, services) for word in check[1:]] if check else None,
        log=folder / f"{name}.log",
    )


def _here(text: str, mounts: Mapping[str, Path], services: Sequence[str]) -> str:
    """A word of a command with this machine's paths and addresses."""
    for target in sorted(mounts, key=len, reverse=True):
        text = re.sub(rf"(?<![\w/.]){re.escape(target)}(?=[/\s;]|$)", str(mounts[target]), text)
    text = text.replace("0.0.0.0:", "127.0.0.1:")
    for service in services:
        text = re.sub(rf"(?<![\w/.-]){re.escape(service)}(?=:\d)", "127.0.0.1", text)
    return text


def in_order(services: Mapping[str, Service]) -> Iterator[Service]:
    """The services, each after those that it depends on."""
    done: set[str] = set()
    while len(done) < len(services):
        ready = [one for one in services.values() if one.name not in done and done >= one.depends_on.keys()]
        if not ready:
            raise Wrong(f"services depend on each other: {', '.join(sorted(services.keys() - done))}")
        for one in ready:
            done.add(one.name)
            yield one


def start(service: Service, programs: Path) -> None:
    """Start a service with its own environment and nothing of this process's but where programs lie."""
    service.folder.mkdir(parents=True, exist_ok=True)
    kept = {key: os.environ[key] for key in ("PYTHONPATH", "LANG", "TMPDIR") if key in os.environ}
    environment = {
        **kept,
        "PATH": f"{programs}:/usr/bin:/bin",
        "HOME": str(service.folder),
        "FEDMTL_CACHE": str(service.folder / "cache"),
        "PYTHONDONTWRITEBYTECODE": "1",
        **service.environment,
    }
    with service.log.open("wb") as log:
        service.process = subprocess.Popen(
            service.command, cwd=service.folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )


def wait_for(service: Service, services: Mapping[str, Service], programs: Path, deadline: float) -> None:
    """Wait until what a service depends on is as it wants it."""
    for name, condition in service.depends_on.items():
        other = services[name]
        assert other.process is not None
        while True:
            code = other.process.poll()
            if condition == "service_completed_successfully" and code is not None:
                break
            if code is not None:
                raise _failed(other)
            if condition == "service_started" or (condition == "service_healthy" and _is_healthy(other, programs)):
                break
            if time.monotonic() > deadline:
                raise Wrong(f"{name} did not become {condition} in time; see {other.log}")
            time.sleep(0.2)
        if code:
            raise _failed(other)


def _failed(service: Service) -> Wrong:
    assert service.process is not None
    last = service.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
    return Wrong(f"{service.name} ended with {service.process.returncode}: {' / '.join(last)}")


def _is_healthy(service: Service, programs: Path) -> bool:
    if service.health is None:
        raise Wrong(f"{service.name} has no healthcheck, and another service waits for it")
    program = programs / service.health[0] if (programs / service.health[0]).exists() else service.health[0]
    done = subprocess.run([str(program), *service.health[1:]], capture_output=True, check=False, timeout=60)
    return done.returncode == 0


def run_all(services: Mapping[str, Service], programs: Path, seconds: float) -> None:
    """Start every service in its turn, and wait until all have ended; one that fails ends the others."""
    deadline = time.monotonic() + seconds
    try:
        for service in in_order(services):
            wait_for(service, services, programs, deadline)
            print(f"{service.name}: {shlex.join(service.command)}", flush=True)
            start(service, programs)
        for service in services.values():
            assert service.process is not None
            if service.process.wait(max(1.0, deadline - time.monotonic())):
                raise _failed(service)
    except subprocess.TimeoutExpired as error:
        raise Wrong(f"not over after {seconds:.0f} s") from error
    finally:
        for service in services.values():
            if service.process is not None and service.process.poll() is None:
                service.process.terminate()
        for service in services.values():
            if service.process is not None:
                try:
                    service.process.wait(20)
                except subprocess.TimeoutExpired:
                    service.process.kill()
                    service.process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--folder", type=Path, required=True, help="where volumes and logs are put")
    parser.add_argument("--programs", type=Path, default=Path(sys.executable).parent, help="the folder of `fedmtl`")
    parser.add_argument("--port", type=int, help=f"of the server, instead of {PORT}")
    parser.add_argument("--seconds", type=float, default=LONGEST)
    parser.add_argument("--list", action="store_true", help="print the commands, and start nothing")
    options = parser.parse_args(arguments)
    folder = options.folder.absolute()
    (folder / "empty").mkdir(parents=True, exist_ok=True)
    try:
        services = read_services(options.file, folder, options.port)
        if options.list:
            for service in in_order(services):
                print(f"{service.name}: {shlex.join(service.command)}")
            return 0
        run_all(services, options.programs.absolute(), options.seconds)
    except Wrong as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print((folder / "server.log").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

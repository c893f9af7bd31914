"""Start what deploy/compose.yaml says where there is no container runtime: its commands, as processes on loopback.

    python scripts/compose_stand_in.py deploy/compose.yaml --folder stand-in

Every service has the command and the environment that the file gives it, and each of its volumes is a folder under
`--folder`; a service sees the paths of these folders wherever its command has a path inside the container. The names of
services become 127.0.0.1. Services start in the order of `depends_on` with its conditions, health checks included. What
a container adds, the user, the read-only root and the limits, is not there.

    python scripts/compose_stand_in.py deploy/compose.yaml --folder stand-in --root IMAGE

With the files of an image, as `buildah mount` gives them, and as root on Linux, every service runs in that root, which
is read-only, as the file's user, with its volumes where the file mounts them and its commands as they stand. Limits and
capabilities are those of a plain process of that user, and the network is this machine's.
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
DOCKERFILE = Path(__file__).parents[1] / "deploy" / "Dockerfile"
PORT = 9092
HEALTH = "/usr/local/lib/fedmtl-health.py"
LONGEST = 1800.0
WHAT = ("service_started", "service_healthy", "service_completed_successfully")


# What a service finds in its root: what it mounts, memory under /tmp, devices, and nothing that it may write beside.
IN_ROOT = """set -e
root=$1; user=$2; shift 2
mount --bind "$root" "$root"
while [ "$1" != -- ]; do
    mount --bind "$1" "$root$2"
    [ "$3" = rw ] || mount -o remount,bind,ro "$root$2"
    shift 3
done
shift
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -o remount,bind,ro "$root"
PATH="$PATH:/usr/sbin:/sbin" exec chroot --userspec="$user" "$root" /bin/sh -c 'cd "$0" && exec "$@"' "$@"
"""


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

    def words(self) -> str:
        """The command as it would be typed, without how it comes into its root."""
        begin = self.command.index("--") + 2 if self.command[0] == "unshare" else 0
        return shlex.join(self.command[begin:])


KNOWN = {
    "image", "build", "user", "read_only", "tmpfs", "cap_drop", "security_opt", "pids_limit", "environment", "restart",
    "entrypoint", "command", "volumes", "depends_on", "healthcheck", "stop_grace_period", "profiles", "ports",
}  # fmt: skip


def read_services(path: Path, folder: Path, port: int | None = None, root: Path | None = None) -> dict[str, Service]:
    """The services of a compose file that are in no profile, with their volumes under a folder.

    A `port` is used instead of the server's, where that may be somebody else's on this machine. With the `root` of an
    image, commands run in it.
    """
    text = path.read_text(encoding="utf-8")
    plain = yaml.safe_load(text if port is None else re.sub(rf"\b{PORT}\b", str(port), text))
    sections = {name: one for name, one in plain["services"].items() if not one.get("profiles")}
    names = list(plain.get("volumes") or {})
    found = {}
    for name, section in sections.items():
        service, mounts = _service(name, section, path, folder, names, list(sections))
        if root is not None:
            _into(root, service, section, mounts, folder, list(sections))
        found[name] = service
    return found


def _service(
    name: str, section: Mapping[str, Any], path: Path, folder: Path, volumes: Sequence[str], services: Sequence[str]
) -> tuple[Service, dict[str, Path]]:
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
    service = Service(
        name,
        [_here(word, mounts, services) for word in words],
        environment,
        mounts.get(WORKDIR, folder / "empty"),
        conditions,
        [_here(word, mounts, services) for word in check[1:]] if check else None,
        log=folder / f"{name}.log",
    )
    return service, mounts


def _into(
    root: Path,
    service: Service,
    section: Mapping[str, Any],
    mounts: Mapping[str, Path],
    folder: Path,
    services: Sequence[str],
) -> None:
    """Let a service run in the root of an image, by the words of the compose file as they stand."""
    user = section.get("user", "0:0")
    hosts = folder / "hosts"
    hosts.write_text(f"127.0.0.1 localhost {' '.join(services)}\n", encoding="utf-8")
    modes = {each.split(":")[1]: each.split(":")[2:] == ["ro"] for each in section.get("volumes", [])}
    words: list[str] = []
    for target, source in {**mounts, "/etc/hosts": hosts}.items():
        if target == HEALTH:
            continue
        inside = root / target.lstrip("/")
        if source.is_dir():
            inside.mkdir(parents=True, exist_ok=True)
            os.chown(source, *map(int, user.split(":")))
        else:
            inside.parent.mkdir(parents=True, exist_ok=True)
            inside.touch()
        words += [str(source), target, "ro" if modes.get(target, True) else "rw"]
    prefix = ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", IN_ROOT, "sh", str(root), user]
    prefix += [*words, "--", WORKDIR]
    service.command = [*prefix, *section.get("entrypoint", ENTRYPOINT), *section.get("command", [])]
    if service.health is not None:
        service.health = [*prefix, *section["healthcheck"]["test"][1:]]
    service.environment = {**_of_image(), **{k: str(v) for k, v in (section.get("environment") or {}).items()}}


def _of_image() -> dict[str, str]:
    """The environment that the last stage of the Dockerfile sets."""
    last = DOCKERFILE.read_text(encoding="utf-8").replace("\\\n", " ").split("\nFROM ")[-1]
    [line] = [line for line in last.splitlines() if line.startswith("ENV ")]
    pairs = (word.partition("=") for word in shlex.split(line.removeprefix("ENV ")))
    return {name: value.replace("$PATH", "/usr/local/bin:/usr/bin:/bin") for name, _, value in pairs}


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
    with service.log.open("wb") as log:
        service.process = subprocess.Popen(
            service.command,
            cwd=service.folder,
            env=_environment(service, programs),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _environment(service: Service, programs: Path) -> dict[str, str]:
    if service.command[0] == "unshare":
        return service.environment
    kept = {key: os.environ[key] for key in ("PYTHONPATH", "LANG", "TMPDIR") if key in os.environ}
    return {
        **kept,
        "PATH": f"{programs}:/usr/bin:/bin",
        "HOME": str(service.folder),
        "FEDMTL_CACHE": str(service.folder / "cache"),
        "PYTHONDONTWRITEBYTECODE": "1",
        **service.environment,
    }


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
    environment = _environment(service, programs)
    done = subprocess.run(service.health, capture_output=True, check=False, timeout=60, env=environment)
    return done.returncode == 0


def run_all(services: Mapping[str, Service], programs: Path, seconds: float) -> None:
    """Start every service in its turn, and wait until all have ended; one that fails ends the others."""
    deadline = time.monotonic() + seconds
    try:
        for service in in_order(services):
            wait_for(service, services, programs, deadline)
            print(f"{service.name}: {service.words()}", flush=True)
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
    parser.add_argument("--root", type=Path, help="the files of the image, in which everything runs then")
    parser.add_argument("--seconds", type=float, default=LONGEST)
    parser.add_argument("--list", action="store_true", help="print the commands, and start nothing")
    options = parser.parse_args(arguments)
    folder = options.folder.absolute()
    (folder / "empty").mkdir(parents=True, exist_ok=True)
    try:
        services = read_services(options.file, folder, options.port, options.root and options.root.absolute())
        if options.list:
            for service in in_order(services):
                print(f"{service.name}: {service.words()}")
            return 0
        run_all(services, options.programs.absolute(), options.seconds)
    except Wrong as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print((folder / "server.log").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

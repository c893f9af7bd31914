"""What a machine has for fedmtl: versions, kernels, a GPU, its clock, a port, certificates; a finding for each.

Nothing is changed: a port is bound and released, and a server is sent one request that it refuses. A check that cannot
look says so in its finding.
"""

from __future__ import annotations

import ctypes
import datetime
import errno
import platform
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from fedmtl.errors import FedmtlError, needs_extra
from fedmtl.foreign import excerpt

Level = Literal["ok", "warning", "fault"]

PYTHONS = ((3, 11), (3, 14))
# The lowest version that works, the first that is known not to or that nobody has tried, and the tested one, as in
# pyproject.toml and constraints.txt; tests compare them.
REQUIRED = {
    "torch": ("2.11", None, "2.13.0"),
    "transformers": ("5.17", None, "5.22.2"),
    "tokenizers": (None, None, None),
    "safetensors": ("0.8", None, "0.8.0"),
    "numpy": ("1.26", None, None),
    "pydantic": ("2.7", None, None),
}
# Of these only what is installed is compared; the extra is what brings it.
EXTRAS = {
    "flwr": ("flower", "1.40", "1.43", "1.41.0"),
    "cryptography": ("flower", "50.0.2", None, "50.0.2"),
    "starlette": ("serve", "1.3.1", "2", "1.3.1"),
    "scikit-learn": ("baselines", "1.4", None, None),
    "peft": ("lora", "0.18", None, "0.21.2"),
    "dp-accounting": ("privacy", "0.6", None, "0.6.0"),
    "onnx": ("onnx", "1.19", None, "1.23.2"),
    "onnxruntime": ("onnx", "1.23", None, "1.31.1"),
    "datasets": ("hub", "3", None, "5.2.0"),
    "pyarrow": ("parquet", "15", None, None),
}
NVIDIA, DISPLAYS = "0x10de", "0x03"
# From here on a clock's difference is worth a line; a server refuses requests from 300 s on.
CLOCK_WARNS, CLOCK_REFUSES = 30.0, 300.0
UNSYNCHRONISED = 5


@dataclass(frozen=True)
class Finding:
    """What one check came to; an ok one has nothing to do."""

    about: str
    level: Level
    found: str
    remedy: str = ""


def version_findings() -> Iterator[Finding]:
    """Python, what every run needs, and the installed extras, each against the versions that fedmtl is tested with."""
    here = sys.version_info
    wanted = f"{PYTHONS[0][0]}.{PYTHONS[0][1]} to {PYTHONS[1][0]}.{PYTHONS[1][1] - 1}"
    fits = PYTHONS[0] <= (here.major, here.minor) < PYTHONS[1]
    yield Finding("python", "ok" if fits else "fault", platform.python_version(),
                  "" if fits else f"make an environment with Python {wanted}")  # fmt: skip
    for name, (lowest, above, tested) in REQUIRED.items():
        yield _version(name, lowest, above, tested, is_required=True)
    missing = [name for name in EXTRAS if installed(name) is None]
    for name, (_, lowest, above, tested) in EXTRAS.items():
        if name not in missing:
            yield _version(name, lowest, above, tested, is_required=False)
    if missing:
        extras = ", ".join(dict.fromkeys(EXTRAS[name][0] for name in missing))
        yield Finding("extras", "ok", f"not installed: {', '.join(missing)} (of the extras {extras})")


def _version(name: str, lowest: str | None, above: str | None, tested: str | None, *, is_required: bool) -> Finding:
    found = installed(name)
    install = "run `pip install -c constraints.txt '.[all]'` in the folder of fedmtl's source"
    if found is None:
        return Finding(name, "fault", "is not installed", install)
    bounds = " and ".join(filter(None, (lowest and f"{lowest} or later", above and f"below {above}")))
    if (lowest and _numbers(found) < _numbers(lowest)) or (above and _numbers(found) >= _numbers(above)):
        return Finding(name, "fault", f"{found}; fedmtl needs {bounds}", install)
    if is_required:
        broken = import_error(name)
        if broken is not None:
            return Finding(name, "fault", f"{found} cannot be imported: {broken}", install)
    if name == "flwr" and found != tested:
        lacking = _missing_of_flower()
        if lacking:
            return Finding(name, "fault", f"{found} does not have {lacking}", install)
    if tested and _numbers(found) > _numbers(tested):
        return Finding(name, "warning", f"{found}, newer than {tested}, which is tested", f"if a run fails, {install}")
    is_tested = tested is None or _numbers(found) == _numbers(tested)
    return Finding(name, "ok", found if is_tested else f"{found} (tested with {tested})")


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    """A release as numbers, without what a build adds to it, such as `+cpu`; zeros at the end do not count."""
    release = re.match(r"\d+(\.\d+)*", text)
    numbers = [int(part) for part in release[0].split(".")] if release else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def import_error(name: str) -> str | None:
    """Why an installed package cannot be imported; None where it can."""
    try:
        __import__(name)
    # A library that is built for another machine raises what it likes.
    except Exception as error:
        return f"{type(error).__name__}: {excerpt(str(error))}"
    return None


def _missing_of_flower() -> str:
    from fedmtl.engines.flower.private import missing

    return ", ".join(missing())


def kernel_finding(library: Path | None = None) -> Finding:
    """Whether BERT is computed by compiled kernels on a CPU, and if not, what is missing for it."""
    from fedmtl.model.bert.cpu.compile_kernels import FOLDER

    library = library or FOLDER / "_kernels.so"
    slow = "training on a CPU uses torch's operations, which are slower"
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        where = f"{platform.system()} on {platform.machine()}"
        return Finding("kernels", "ok", f"there are none for {where}; {slow}")
    compile_ = "run `python -m fedmtl.model.bert.cpu.compile_kernels`"
    has_gcc = shutil.which("gcc") is not None
    if not library.is_file():
        if not has_gcc:
            found = f"not compiled, and there is no gcc on the PATH; {slow}"
            return Finding("kernels", "fault", found, f"install gcc, then {compile_}")
        return Finding("kernels", "fault", f"not compiled, though gcc is here; {slow}", compile_)
    again = f"remove {library}, then {compile_ if has_gcc else f'install gcc and {compile_}'}"
    try:
        loaded = ctypes.CDLL(str(library))
        is_supported = bool(loaded.is_supported())
    except (OSError, AttributeError) as error:
        return Finding("kernels", "fault", f"cannot be loaded: {excerpt(str(error))}; {slow}", again)
    if not is_supported:
        return Finding("kernels", "warning", f"this CPU has no AVX-512, which they are compiled for; {slow}",
                       "nothing, or choose a machine with AVX-512")  # fmt: skip
    if _lacks_functions(loaded):
        return Finding("kernels", "fault", "stale: compiled from an older kernels.c, functions are missing", again)
    sources = [FOLDER / "kernels.c", FOLDER / "kernels.h"]
    if any(path.is_file() and path.stat().st_mtime > library.stat().st_mtime for path in sources):
        return Finding("kernels", "warning", "perhaps stale: kernels.c was written after they were compiled", again)
    return Finding("kernels", "ok", "compiled")


def _lacks_functions(library: ctypes.CDLL) -> bool:
    try:
        from fedmtl.model.bert.cpu.encoder_pass import SIGNATURES, SUFFIXES
    except Exception:  # torch is broken, which another line says
        return False
    return not all(hasattr(library, f"{name}_{suffix}") for name in SIGNATURES for suffix in SUFFIXES.values())


def gpu_finding(device: str = "auto", root: Path = Path("/")) -> Finding:
    """Whether torch can use the GPU of this machine; `device` is the config's, `root` where /sys and /proc are."""
    try:
        import torch
    except Exception:
        return Finding("gpu", "warning", "nobody can say without torch", "install torch, then look again")
    if torch.cuda.is_available():
        found = f"{torch.cuda.get_device_name(0)}, {torch.cuda.device_count()} in all, CUDA {torch.version.cuda}"
        return Finding("gpu", "ok", found)
    cards = _nvidia_cards(root)
    if not cards:
        if device.startswith("cuda"):
            return Finding("gpu", "fault", f"none here, and the config says compute.device: {device}",
                           "write `compute: {device: auto}`, or run where there is a GPU")  # fmt: skip
        return Finding("gpu", "ok", "none; clients train on the CPU")
    level: Level = "warning" if device == "cpu" else "fault"
    many = f"{cards} of NVIDIA's"
    driver = root / "proc/driver/nvidia/version"
    if not driver.is_file():
        return Finding("gpu", level, f"{many}, and no driver is loaded; clients train on the CPU",
                       "install NVIDIA's driver and restart, or write `compute: {device: cpu}`")  # fmt: skip
    if torch.version.cuda is None:
        return Finding("gpu", level, f"{many} with a driver, but torch {torch.__version__} is built without CUDA",
                       "install a CUDA build of torch (pytorch.org), or write `compute: {device: cpu}`")  # fmt: skip
    words = re.search(r"Module[^\n]*?(\d+\.\d+(?:\.\d+)?)", driver.read_text(errors="replace"))
    found = f"{many}, but torch's CUDA {torch.version.cuda} cannot use the driver{f' {words[1]}' if words else ''}"
    return Finding("gpu", level, found, "update NVIDIA's driver, or install torch for an older CUDA")


def _nvidia_cards(root: Path) -> int:
    def text(path: Path) -> str:
        try:
            return path.read_text().strip()
        except OSError:
            return ""

    devices = root.glob("sys/bus/pci/devices/*")
    return sum(text(each / "vendor") == NVIDIA and text(each / "class").startswith(DISPLAYS) for each in devices)


def clock_finding() -> Finding:
    """This machine's clock by itself: its date, and whether the system says that it follows others."""
    newest = Path(__file__).stat().st_mtime
    today = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    if time.time() < newest - 86400:
        return Finding("clock", "fault", f"it says {today} UTC, which is before fedmtl was written here",
                       "set it, best by NTP (`timedatectl set-ntp true`)")  # fmt: skip
    if sys.platform == "linux":
        # struct timex has 208 bytes; with modes 0, which zeros are, nothing is set.
        try:
            state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(1024))
        except (OSError, AttributeError):
            state = -1
        if state == UNSYNCHRONISED:
            remedy = "switch NTP on (`timedatectl set-ntp true`), or compare with --server HOST:PORT"
            return Finding("clock", "warning", f"{today} UTC; the system does not follow a time server", remedy)
    return Finding("clock", "ok", f"{today} UTC")


def server_clock_finding(server: str, ca: Path | None, key: Path | None) -> Finding:
    """This machine's clock against a server's, by one request that is refused; nobody joins."""
    about = f"clock of {server}"
    lacking = _lacking("flwr", "cryptography")
    if lacking is not None:
        return Finding(about, "fault", *lacking)
    from fedmtl.engines.flower.addresses import is_loopback, parse_address
    from fedmtl.engines.flower.certificates import read_private_key
    from fedmtl.engines.flower.line import SiteKeys, server_time_difference

    try:
        address = parse_address(server, "--server")
        if (ca is None) != (key is None) or (ca is None and not is_loopback(address.host)):
            return Finding(about, "fault", "was not compared: a site's keys are missing",
                           "give --ca ca.crt and --key NAME.key of this site")  # fmt: skip
        keys = None if ca is None or key is None else SiteKeys(read_private_key(key), ca)
        ahead = server_time_difference(address, keys)
    except FedmtlError as error:
        return Finding(about, "fault", str(error), "start the server, or correct --server, --ca and --key")
    side = "ahead of" if ahead > 0 else "behind"
    found = f"this machine's clock is {abs(ahead):.0f} s {side} the server's"
    if abs(ahead) < CLOCK_WARNS:
        return Finding(about, "ok", f"they differ by {abs(ahead):.1f} s")
    remedy = f"set both by NTP; the server refuses a site from {CLOCK_REFUSES:.0f} s on"
    return Finding(about, "fault" if abs(ahead) >= CLOCK_REFUSES else "warning", found, remedy)


def port_finding(listen: str) -> Finding:
    """Whether a server could listen there, by doing so for a moment."""
    from fedmtl.engines.flower.addresses import parse_address

    about = f"port {listen}"
    try:
        address = parse_address(listen, "--listen")
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        socket.create_server((address.host, address.port), family=family).close()
    except FedmtlError as error:
        return Finding(about, "fault", str(error), "write HOST:PORT")
    except OSError as error:
        remedies = {
            errno.EADDRINUSE: f"end what listens there (`ss -ltnp 'sport = :{listen.rpartition(':')[2]}'` names it),"
            " or choose another --listen",
            errno.EADDRNOTAVAIL: "name an address of this machine, or 0.0.0.0 for all of them",
            errno.EACCES: "choose a port above 1023",
        }
        known = {
            errno.EADDRINUSE: "taken: another program listens there",
            errno.EADDRNOTAVAIL: "this machine does not have that address",
        }
        words = known.get(error.errno or 0, error.strerror or str(error))
        return Finding(about, "fault", words, remedies.get(error.errno or 0, "choose another --listen"))
    return Finding(about, "ok", "free")


def certificate_findings(folder: Path) -> Iterator[Finding]:
    """A server's or a site's folder: when certificates end, whose keys they are, and who may read the keys."""
    lacking = _lacking("cryptography")
    if lacking is not None:
        yield Finding("certificates", "fault", *lacking)
        return
    from fedmtl.engines.flower.certificates import CA, CERTIFICATE, KEY

    keys = sorted(folder.glob("*.key"))
    certificates = [folder / name for name in (CA, CERTIFICATE) if (folder / name).is_file()]
    if not certificates and not keys:
        yield Finding("certificates", "fault", f"{folder} has none",
                      f"make them with `fedmtl certs init {folder}`, or a site's with `fedmtl certs node`")  # fmt: skip
        return
    for path in certificates:
        yield _end_finding(path, is_authority=path.name == CA)
    for path in keys:
        others = path.stat().st_mode & 0o077
        if others:
            yield Finding(str(path), "fault", f"others than its owner may open it ({path.stat().st_mode & 0o777:04o})",
                          f"run `chmod 600 {path}`; if others could copy it, make a new one")  # fmt: skip
        elif path.name != KEY:
            yield _pair_finding(path)
        else:
            yield Finding(str(path), "ok", "its owner's alone")
    if (folder / CERTIFICATE) in certificates:
        yield _server_key_finding(folder)


def _end_finding(path: Path, *, is_authority: bool) -> Finding:
    from fedmtl.engines.flower.certificates import WARN_DAYS, end_of

    remedy = f"renew it with `fedmtl certs renew {path.parent}`"
    if is_authority:
        remedy = f"make a new authority with `fedmtl certs init` in another folder than {path.parent}, for sites too"
    try:
        end = end_of(path)
    except FedmtlError as error:
        return Finding(str(path), "fault", str(error), remedy)
    left = (end - datetime.datetime.now(datetime.UTC)).days
    if left < 0:
        return Finding(str(path), "fault", f"expired on {end:%Y-%m-%d}", remedy)
    level: Level = "ok" if left > WARN_DAYS else "warning"
    return Finding(str(path), level, f"valid until {end:%Y-%m-%d}, {left} days", "" if level == "ok" else remedy)


def _pair_finding(path: Path) -> Finding:
    """A site's private key with its public half; an authority's key has none beside it, and may have a passphrase."""
    from fedmtl.engines.flower.certificates import CA_KEY, check_public_key, read_private_key
    from fedmtl.engines.flower.signing import Signer

    public = path.with_suffix(".pub")
    if path.name == CA_KEY or not public.is_file():
        return Finding(str(path), "ok", "its owner's alone")
    try:
        fits = Signer(read_private_key(path)).public_key.decode() == check_public_key(public.read_bytes(), path.stem)
    except FedmtlError as error:
        return Finding(str(path), "fault", str(error), f"make a new one with `fedmtl certs node {path.stem}`")
    if not fits:
        return Finding(str(path), "fault", f"{public} is the public half of another key",
                       "find the right pair, or make a new one with `fedmtl certs node` and enrol it")  # fmt: skip
    return Finding(str(path), "ok", f"its owner's alone, and {public.name} is its public half")


def _server_key_finding(folder: Path) -> Finding:
    from fedmtl.engines.flower.certificates import CA, CERTIFICATE, KEY, mismatch

    wrong = mismatch(folder)
    about = str(folder / CERTIFICATE)
    if wrong is not None:
        return Finding(about, "fault", wrong, f"make both anew with `fedmtl certs renew {folder}`")
    return Finding(about, "ok", f"signed by {CA}, and {KEY} is its key")


def _lacking(*packages: str) -> tuple[str, str] | None:
    """What is missing of the flower extra, with what to do; None where nothing is."""
    missing = [name for name in packages if installed(name) is None]
    return (f"{missing[0]} is not installed", needs_extra("this check", missing[0], "flower")) if missing else None

"""Each fault is planted where it would arise, and `fedmtl doctor` names it with what to do."""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import socket
import tempfile
import threading
import time
import tomllib
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedmtl.config.file import demo_config
from fedmtl.deploy import doctor, machine
from fedmtl.deploy.machine import Finding
from fedmtl.engines.flower.addresses import Address
from fedmtl.engines.flower.certificates import ServerCertificate, make_authority, make_node_key
from fedmtl.engines.flower.fleet_api import FleetApi
from fedmtl.engines.flower.link import Link
from fedmtl.engines.flower.signing import Signer
from fedmtl.federation.policy import policy_text
from fedmtl.model.encoder_files import SHIPPED

ROOT = Path(__file__).parents[2]
NOBODY = 65534


def faults(found) -> list[Finding]:
    given = [each for each in found if each.level == "fault"]
    assert all(each.remedy for each in given)
    return given


def only_fault(found) -> Finding:
    (fault,) = faults(found)
    return fault


# Ten planted faults.


def test_no_gcc(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine.platform, "system", lambda: "Linux")
    monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
    fault = only_fault([machine.kernel_finding(tmp_path / "_kernels.so")])
    assert "no gcc" in fault.found
    assert "install gcc" in fault.remedy


def expired(folder: Path, ended: datetime.datetime) -> None:
    """A server certificate of the authority in the folder that was valid until then."""
    authority = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    key = serialization.load_pem_private_key((folder / "server.key").read_bytes(), None)
    root = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert isinstance(authority, ec.EllipticCurvePrivateKey)
    made = (
        x509.CertificateBuilder()
        .subject_name(root.subject)
        .issuer_name(root.subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(ended - datetime.timedelta(days=10))
        .not_valid_after(ended)
        .sign(authority, hashes.SHA384())
    )
    (folder / "server.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))


def test_expired_certificate(tmp_path):
    make_authority(tmp_path / "certs", ["127.0.0.1"])
    assert faults(machine.certificate_findings(tmp_path / "certs")) == []
    expired(tmp_path / "certs", datetime.datetime(2020, 2, 3, tzinfo=datetime.UTC))
    fault = only_fault(machine.certificate_findings(tmp_path / "certs"))
    assert fault.found == "expired on 2020-02-03"
    assert f"fedmtl certs renew {tmp_path / 'certs'}" in fault.remedy


@pytest.fixture
def server(tmp_path) -> Iterator[FleetApi]:
    """A real port with TLS to which the key `clinic.key` may come."""
    make_authority(tmp_path / "certs", ["127.0.0.1"])
    make_node_key("clinic", tmp_path)
    known = Signer(machine_key(tmp_path / "clinic.key")).public_key
    certificate = ServerCertificate(tmp_path / "certs/server.crt", tmp_path / "certs/server.key")
    api = FleetApi(Link(tmp_path / "spool"), Address("127.0.0.1", 0), certificate, {known}.__contains__)
    yield api
    api.close()


def machine_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


@pytest.mark.parametrize(("off", "level"), [(0, "ok"), (100, "warning"), (1000, "fault")])
def test_clock_off(server, tmp_path, off, level):
    server._app.guard._clock = lambda: time.time() + off
    found = machine.server_clock_finding(str(server.address), tmp_path / "certs/ca.crt", tmp_path / "clinic.key")
    assert found.level == level
    if off:
        assert found.found == f"this machine's clock is {off} s behind the server's"
        assert "NTP" in found.remedy


def test_a_server_that_does_not_know_the_key_is_a_fault_and_so_is_none(server, tmp_path):
    make_node_key("stranger", tmp_path)
    ca, address = tmp_path / "certs/ca.crt", str(server.address)
    assert "not enrolled" in machine.server_clock_finding(address, ca, tmp_path / "stranger.key").found
    assert "keys are missing" in machine.server_clock_finding("10.0.0.1:9", None, None).found
    server.close()
    assert "does not answer" in machine.server_clock_finding(address, ca, tmp_path / "clinic.key").found


def test_a_clock_on_loopback_needs_no_keys_and_nobody_joins(tmp_path):
    link = Link(tmp_path / "spool")
    api = FleetApi(link, Address("127.0.0.1", 0), None, None)
    try:
        api._app.guard._clock = lambda: time.time() - 500
        found = machine.server_clock_finding(str(api.address), None, None)
    finally:
        api.close()
    assert "500 s ahead of" in only_fault([found]).found
    assert not link.activations


def test_what_answers_and_is_no_server_is_a_fault():
    with socket.create_server(("127.0.0.1", 0)) as other:
        thread = threading.Thread(target=lambda: answer(other), daemon=True)
        thread.start()
        found = machine.server_clock_finding(f"127.0.0.1:{other.getsockname()[1]}", None, None)
        thread.join(5)
    assert "no server of fedmtl" in only_fault([found]).found


def answer(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n[]")


def test_a_date_before_fedmtl_was_written(monkeypatch):
    monkeypatch.setattr(machine.time, "time", lambda: 0.0)
    assert "before fedmtl was written" in only_fault([machine.clock_finding()]).found


def test_port_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        fault = only_fault([machine.port_finding(address)])
        assert "taken" in fault.found
        assert "--listen" in fault.remedy
    assert machine.port_finding(address).level == "ok"


@pytest.mark.parametrize("address", ["nowhere", "192.0.2.1:9092"])
def test_an_address_that_is_none_of_this_machine(address):
    assert faults([machine.port_finding(address)])


@pytest.mark.parametrize(("there", "level"), [("2.4.1", "fault"), ("2.11.0", "ok"), ("2.99", "warning")])
def test_wrong_torch(monkeypatch, tmp_path, there, level):
    (tmp_path / f"torch-{there}.dist-info").mkdir()
    (tmp_path / f"torch-{there}.dist-info/METADATA").write_text(
        f"Metadata-Version: 2.1\nName: torch\nVersion: {there}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = next(each for each in machine.version_findings() if each.about == "torch")
    assert (found.level, re.split("[;, ]", found.found)[0]) == (level, there)
    assert level == "ok" or "constraints.txt" in found.remedy
    assert level != "fault" or "2.11 or later" in found.found


@contextmanager
def read_only() -> Iterator[Path]:
    """A folder that this process may read and not write, though tests may run as root, whom rights do not bind."""
    folder, is_root = Path(tempfile.mkdtemp()), os.geteuid() == 0
    folder.chmod(0o555)
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield folder
    finally:
        if is_root:
            os.seteuid(0)
        folder.rmdir()


def test_read_only_folder():
    config = demo_config()
    with read_only() as folder:
        data = config.data.model_copy(update={"cache": f"{folder}/tokens"})
        config = config.model_copy(update={"output": f"{folder}/runs", "data": data})
        found = list(doctor.storage_findings(config))
    for fault, option in zip(faults(found), ("output", "data.cache"), strict=True):
        assert fault.found == f"{folder} cannot be written: Permission denied"
        assert option in fault.remedy


def test_a_read_only_file_system_is_named(monkeypatch, tmp_path):
    def refuse(**given):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    config = demo_config([f"output={tmp_path}", f"data.cache={tmp_path}/tokens"])
    assert all("mounted read-only" in fault.found for fault in faults(doctor.storage_findings(config)))


USAGE = namedtuple("USAGE", "total used free")


@pytest.mark.parametrize(("free", "level"), [(10**6, "fault"), (1.5, "warning"), (10**12, "ok")])
def test_no_disk(monkeypatch, tmp_path, free, level):
    config = demo_config(["model.server_model=random-2x128", f"output={tmp_path}", f"data.cache={tmp_path}/tokens"])
    # 40,000 rows of 128, and two layers of 12 times 128 squared.
    assert doctor.num_parameters("random-2x128") == 40_000 * 128 + 2 * 12 * 128**2 == 5_513_216
    # Four checkpoints, the model twice, and jobs and updates of six clients: 18 copies of four bytes a parameter.
    need = 4 * 5_513_216 * 18 + 2 * doctor.RESERVE
    free = free if free > 2 else int(free * need)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: USAGE(10**13, 0, free))
    found = list(doctor.storage_findings(config))
    assert [each.level for each in found] == [level, level]
    assert all(f"needs about {need / 1e6:.0f} MB" in each.found for each in found)
    assert level == "ok" or all("free space" in each.remedy for each in found)


def plant_gpu(root: Path, *, driver: str | None = None) -> None:
    card = root / "sys/bus/pci/devices/0000:01:00.0"
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x030200\n")
    if driver is not None:
        (root / "proc/driver/nvidia").mkdir(parents=True)
        (root / "proc/driver/nvidia/version").write_text(
            f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Wed\n"
        )


@pytest.fixture
def without_gpu(monkeypatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)


@pytest.mark.usefixtures("without_gpu")
def test_gpu_without_driver(tmp_path):
    assert machine.gpu_finding("auto", tmp_path).level == "ok"
    assert faults([machine.gpu_finding("cuda", tmp_path)])
    plant_gpu(tmp_path)
    fault = only_fault([machine.gpu_finding("auto", tmp_path)])
    assert "no driver" in fault.found
    assert "install NVIDIA's driver" in fault.remedy
    # Who does not want it need not mend it.
    assert machine.gpu_finding("cpu", tmp_path).level == "warning"


@pytest.mark.usefixtures("without_gpu")
def test_a_gpu_that_this_torch_cannot_use(monkeypatch, tmp_path):
    import torch

    plant_gpu(tmp_path, driver="470.57.02")
    assert "without CUDA" in only_fault([machine.gpu_finding("auto", tmp_path)]).found
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "CUDA 13.0 cannot use the driver 470.57.02" in only_fault([machine.gpu_finding("auto", tmp_path)]).found


@pytest.fixture
def encoder(tmp_path) -> Path:
    folder = tmp_path / "encoder"
    folder.mkdir()
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(SHIPPED["tiny"] / name, folder)
    return folder


def changed(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_old_tokenizer(encoder):
    assert doctor.tokenizer_finding(str(encoder)).level == "ok"
    changed(encoder / "tokenizer.json", version="0.9")
    fault = only_fault([doctor.tokenizer_finding(str(encoder))])
    assert "old: " in fault.found
    assert "0.9" in fault.found
    assert "save_pretrained" in fault.remedy
    changed(encoder / "tokenizer.json", version="1.0", model={"type": "Ancient"})
    assert "cannot load" in only_fault([doctor.tokenizer_finding(str(encoder))]).found
    (encoder / "tokenizer.json").unlink()
    assert faults([doctor.tokenizer_finding(str(encoder))])
    (encoder / "vocab.txt").write_text("[PAD]\n")
    assert doctor.tokenizer_finding(str(encoder)).level == "warning"


@pytest.mark.parametrize(("rows", "level"), [(15_999, "fault"), (16_000, "ok"), (17_000, "ok"), (30_522, "warning")])
def test_a_vocabulary_beside_the_encoders(encoder, rows, level):
    changed(encoder / "config.json", vocab_size=rows)
    found = doctor.tokenizer_finding(str(encoder))
    assert found.level == level
    assert f"{rows:,}" in found.found


def test_policy_that_forbids_the_task(tmp_path):
    path, config = tmp_path / "policy.yaml", demo_config()
    path.write_text("tasks: {sentiment: {}}\n")
    found = faults(doctor.policy_findings(path, config))
    assert [each.found.partition(":")[0] for each in found] == ["forbids paraphrase", "forbids similarity"]
    assert "the policy's tasks are sentiment" in found[0].found
    assert faults(doctor.policy_findings(path, config, ["sentiment"])) == []


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("require: {secure_aggregation: true}", "require.secure_aggregation"),
        ("require: {example_privacy: {}}", "require.example_privacy"),
        ("tasks: {sentiment: {labels: [bad, good]}}", "tasks.sentiment.labels"),
        ("tasks: {sentiment: {label: topic}}", "tasks.sentiment.label"),
        ("task: {}", "unknown key"),
    ],
)
def test_a_policy_that_forbids_the_config_in_the_words_of_a_site(tmp_path, policy, words):
    path = tmp_path / "policy.yaml"
    path.write_text(policy)
    assert words in only_fault(doctor.policy_findings(path, demo_config(), ["sentiment"])).found


def test_the_policy_of_the_package_allows_the_demonstration(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(policy_text())
    assert [each.level for each in doctor.policy_findings(path, demo_config())] == ["ok"]
    assert "may leave" in next(iter(doctor.policy_findings(path, None))).found


# What else the lines tell.


def test_keys_that_others_may_open_or_that_belong_elsewhere(tmp_path):
    site = tmp_path / "site"
    make_node_key("clinic", site)
    make_node_key("other", site)
    assert faults(machine.certificate_findings(site)) == []
    (site / "other.key").chmod(0o640)
    (site / "clinic.pub").write_bytes((site / "other.pub").read_bytes())
    pair, rights = faults(machine.certificate_findings(site))
    assert "public half of another key" in pair.found
    assert "0640" in rights.found
    assert f"chmod 600 {site / 'other.key'}" in rights.remedy
    assert faults(machine.certificate_findings(tmp_path / "none"))


def test_a_server_key_of_another_certificate_and_an_authority_of_another_server(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        make_authority(folder, ["127.0.0.1"])
    shutil.copy(second / "server.key", first / "server.key")
    assert "is not its key" in only_fault(machine.certificate_findings(first)).found
    shutil.copy(first / "ca.crt", second / "ca.crt")
    shutil.copy(first / "server.key", second / "server.key")
    assert "is not signed by" in only_fault(machine.certificate_findings(second)).found


def test_kernels_that_are_stale_or_broken(monkeypatch, tmp_path):
    monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(machine.platform, "system", lambda: "Linux")
    library = tmp_path / "_kernels.so"
    library.write_bytes(b"no library")
    assert "cannot be loaded" in only_fault([machine.kernel_finding(library)]).found
    # One of another age has `is_supported` and not all functions.
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda path: type("Old", (), {"is_supported": lambda self: 1})())
    assert "stale" in only_fault([machine.kernel_finding(library)]).found


def test_versions_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    known = {name: (lowest, above, tested) for name, (lowest, above, tested) in machine.REQUIRED.items()}
    known |= {name: tuple(rest) for name, (_, *rest) in machine.EXTRAS.items()}
    for name, (lowest, above, tested) in known.items():
        bounds = ",".join(filter(None, (lowest and f">={lowest}", above and f"<{above}")))
        assert f"{name}{bounds}" in lines, name
        assert pins.get(name) == tested, name
    lowest, above = (".".join(map(str, bound)) for bound in machine.PYTHONS)
    assert project["requires-python"] == f">={lowest},<{above}"

"""fedmtl certs, enroll, unenroll and enrolled, as the server's keeper types them."""

from __future__ import annotations

import datetime
import json
import stat
import threading
import tracemalloc

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from typer.testing import CliRunner

from fedmtl.cli.app import app
from fedmtl.engines.flower import certificates
from fedmtl.engines.flower.certificates import (
    CA,
    CA_KEY,
    CERTIFICATE,
    KEY,
    ServerCertificate,
    end_of,
    expiry_warning,
    make_authority,
    make_node_key,
    renew,
)
from fedmtl.engines.flower.enrolment import BOOK, KeyBook, enroll, read_book
from fedmtl.errors import FedmtlError


@pytest.fixture
def fedmtl(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDMTL_CA_PASSPHRASE", raising=False)

    def call(line: str) -> str:
        result = CliRunner().invoke(app, line.split())
        if result.exception is not None:
            raise result.exception
        return result.stdout

    call("certs init certs --host 10.0.0.1")
    call("certs node clinic")
    return call


def test_a_site_is_entered_listed_changed_and_struck_off(fedmtl, tmp_path):
    assert "clinic may bring sst2, qqp" in fedmtl("enroll clinic --key clinic.pub --tasks sst2,qqp --examples 500")
    listed = fedmtl("enrolled")
    assert "clinic" in listed
    assert "500" in listed
    told = json.loads(fedmtl("enrolled --json"))["clinic"]
    assert told["tasks"] == ["qqp", "sst2"]
    assert told["examples"] == {"qqp": 500, "sst2": 500}
    assert told["fingerprint"] in listed
    assert "clinic is not enrolled any more" in fedmtl("unenroll clinic")
    assert json.loads(fedmtl("enrolled --json")) == {}
    with pytest.raises(FedmtlError, match="is not enrolled in"):
        fedmtl("unenroll clinic")


def test_an_enrolment_is_replaced_only_where_that_is_said(fedmtl, tmp_path):
    fedmtl("enroll clinic --key clinic.pub --tasks sst2")
    with pytest.raises(FedmtlError, match=r"is enrolled already \(tasks sst2; .*--replace"):
        fedmtl("enroll clinic --key clinic.pub --tasks sst9")
    assert read_book(tmp_path / "certs")["clinic"].tasks == ("sst2",)
    assert "may bring sst2" in fedmtl("enroll clinic --key clinic.pub --tasks sst2"), "the same again is no change"
    changed = fedmtl("enroll clinic --key clinic.pub --tasks qqp --replace")
    assert "clinic was: tasks sst2" in changed
    assert read_book(tmp_path / "certs")["clinic"].tasks == ("qqp",)


def test_tasks_are_those_of_the_config_that_is_given(fedmtl, tmp_path):
    (tmp_path / "run.yaml").write_text("tasks: {sentiment: {}, paraphrase: {}}\n")
    with pytest.raises(FedmtlError, match="has no task 'sentment'; did you mean `sentiment`"):
        fedmtl("enroll clinic --key clinic.pub --tasks sentment --config run.yaml")
    assert "may bring sentiment" in fedmtl("enroll clinic --key clinic.pub --tasks sentiment --config run.yaml")


@pytest.mark.parametrize("name", ["../../x<b>", "[/b]", "a\u200bb", ".a", "a/b", "a" * 65, "é"])
def test_a_name_that_is_none_is_refused_everywhere(fedmtl, tmp_path, name):
    with pytest.raises(FedmtlError, match="is no name for a site"):
        fedmtl(f"enroll {name} --key clinic.pub --tasks sst2")
    with pytest.raises(FedmtlError, match="is no name for a site"):
        fedmtl(f"certs node {name}")
    book = {name: {"key": (tmp_path / "clinic.pub").read_text(), "tasks": ["sst2"]}}
    (tmp_path / "certs" / BOOK).write_text(json.dumps(book))
    with pytest.raises(FedmtlError, match=r"enrolled\.json: cannot be read"):
        fedmtl("enrolled")


@pytest.mark.parametrize("examples", ["0", "-1", "x", "sst9=5", "sst2=", "1" * 20, "²"])
def test_a_bound_that_is_no_number_of_a_task_is_refused(fedmtl, examples):
    with pytest.raises(FedmtlError, match="--examples"):
        fedmtl(f"enroll clinic --key clinic.pub --tasks sst2 --examples {examples}")


@pytest.mark.parametrize(
    "content",
    ["", "[]", "[" * 100_000, "1", '{"a": 1}', '{"a": {"key": "x", "tasks": ["t"]}}', '{"a": {"tasks": ["t"]}}', "\xff",
     "1" * 5000, "[" + "{}," * 200_000 + "0]"],
)  # fmt: skip
def test_a_book_that_is_none_is_one_line(tmp_path, content):
    (tmp_path / BOOK).write_bytes(content.encode("latin-1"))
    with pytest.raises(FedmtlError, match=r"enrolled\.json: (cannot be read|bad JSON)") as caught:
        KeyBook(tmp_path).tasks()
    assert "\n" not in str(caught.value)


def test_a_book_of_millions_of_empty_lists_is_not_built(tmp_path):
    # Two letters each in the file, sixty bytes in memory: found by fuzzing, where two megabytes became three hundred.
    (tmp_path / BOOK).write_text("[" + "[]," * 3_000_000 + "0]")
    tracemalloc.start()
    try:
        with pytest.raises(FedmtlError, match="more than 200,000 lists and objects"):
            read_book(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def test_two_enrolments_at_once_are_both_there(tmp_path):
    keys = {f"s{number}": make_node_key(f"s{number}", tmp_path)[1].read_bytes() for number in range(8)}
    threads = [threading.Thread(target=enroll, args=(tmp_path, name, key, ["t"])) for name, key in keys.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(read_book(tmp_path)) == set(keys)


def test_certificates_live_397_days_and_are_renewed_by_the_same_authority(fedmtl, tmp_path):
    folder = tmp_path / "certs"
    authority, before = (folder / CA).read_bytes(), (folder / CERTIFICATE).read_bytes()
    left = end_of(folder / CERTIFICATE) - datetime.datetime.now(datetime.UTC)
    assert 396 <= left.days <= 397
    assert end_of(folder / CA) > end_of(folder / CERTIFICATE)
    renewed = fedmtl("certs renew certs")
    assert "10.0.0.1" in renewed
    assert (folder / CA).read_bytes() == authority
    assert (folder / CERTIFICATE).read_bytes() != before
    leaf = x509.load_pem_x509_certificate((folder / CERTIFICATE).read_bytes())
    leaf.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
    key = serialization.load_pem_private_key((folder / KEY).read_bytes(), None)
    assert key.public_key() == leaf.public_key()
    assert "10.0.0.2" in fedmtl("certs renew certs --host 10.0.0.2")


def test_a_certificate_that_ends_within_thirty_days_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(certificates, "SERVER_DAYS", 29)
    make_authority(tmp_path, ["localhost"])
    shown = ServerCertificate(tmp_path / CERTIFICATE, tmp_path / KEY)
    assert "ends in 28 days" in str(shown.warning())
    assert "fedmtl certs renew" in str(shown.warning())
    yesterday = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    assert "has ended" in str(expiry_warning(yesterday, "renew it"))
    monkeypatch.setattr(certificates, "SERVER_DAYS", 397)
    renew(tmp_path, [])
    assert shown.warning() is None


def test_the_authority_s_key_may_have_a_passphrase_and_lie_elsewhere(fedmtl, tmp_path):
    (tmp_path / "secret").write_text("long and dull\n")
    fedmtl("certs init served --ca-dir safe --passphrase-file secret")
    assert not (tmp_path / "served" / CA_KEY).exists()
    assert b"ENCRYPTED" in (tmp_path / "safe" / CA_KEY).read_bytes()
    with pytest.raises(FedmtlError, match="--ca-dir"):
        fedmtl("certs renew served")
    with pytest.raises(FedmtlError, match="has a passphrase"):
        fedmtl("certs renew served --ca-dir safe")
    (tmp_path / "wrong").write_text("short")
    with pytest.raises(FedmtlError, match="passphrase is another one"):
        fedmtl("certs renew served --ca-dir safe --passphrase-file wrong")
    assert "until" in fedmtl("certs renew served --ca-dir safe --passphrase-file secret")


def test_folders_and_keys_are_for_their_owner_alone(fedmtl, tmp_path):
    assert stat.S_IMODE((tmp_path / "certs").stat().st_mode) == 0o700
    for name in (CA_KEY, KEY):
        assert stat.S_IMODE((tmp_path / "certs" / name).stat().st_mode) == 0o600
    fedmtl("certs renew certs")
    assert stat.S_IMODE((tmp_path / "certs" / KEY).stat().st_mode) == 0o600

"""Keys and certificates: made once, kept private, and each site's own."""

from __future__ import annotations

import stat

import pytest

from fedmtl.engines.flower.certificates import CA, KEY, make_authority, make_node_key, read_private_key
from fedmtl.engines.flower.enrolment import KeyBook, enroll
from fedmtl.errors import FedmtlError


def test_private_keys_are_for_their_owner_and_never_replaced(tmp_path):
    make_authority(tmp_path, ["localhost", "10.0.0.1"])
    private, _ = make_node_key("a", tmp_path)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / KEY, private)] == [0o600, 0o600]
    with pytest.raises(FedmtlError, match="is there already"):
        make_authority(tmp_path, ["localhost"])
    with pytest.raises(FedmtlError, match="is there already"):
        make_node_key("a", tmp_path)


def test_a_key_belongs_to_one_name_and_its_tasks_may_change(tmp_path):
    _, public = make_node_key("a", tmp_path)
    enroll(tmp_path, "a", public.read_bytes(), ["qqp", "sst2"])
    enroll(tmp_path, "a", public.read_bytes(), ["sst2"], replace=True)
    book = KeyBook(tmp_path)
    assert book.tasks() == {"a": ("sst2",)}
    assert book.name_of(public.read_bytes()) == "a"
    assert book.name_of(b"another") == ""
    with pytest.raises(FedmtlError, match="b: this key is enrolled as a"):
        enroll(tmp_path, "b", public.read_bytes(), ["sst2"])


def test_what_is_no_key_is_one_line(tmp_path):
    private, _ = make_node_key("a", tmp_path)
    make_authority(tmp_path, ["localhost"])
    with pytest.raises(FedmtlError, match="no public key"):
        enroll(tmp_path, "a", private.read_bytes(), ["sst2"])
    with pytest.raises(FedmtlError, match="is no private key"):
        read_private_key(tmp_path / CA)
    with pytest.raises(FedmtlError, match="cannot be read"):
        read_private_key(tmp_path / "nowhere.key")


def test_a_folder_without_certificates_says_how_to_make_them(tmp_path):
    with pytest.raises(FedmtlError, match="fedmtl certs init"):
        KeyBook(tmp_path).certificate()

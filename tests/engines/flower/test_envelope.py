"""What is in a message, and how it is kept: chunk by chunk, in files, and refused where it is not ours."""

from __future__ import annotations

import subprocess
import sys

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity

from fedmtl.engines.flower.envelope import fill_envelope, open_envelope
from fedmtl.engines.flower.object_files import SMALL, ObjectFiles
from fedmtl.engines.flower.records import Envelope
from fedmtl.errors import WireError

CHUNK = 5 << 20


@pytest.fixture(autouse=True)
def _identity(monkeypatch):
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def stored(tmp_path, content: RecordDict) -> tuple[ObjectFiles, str]:
    store = ObjectFiles(tmp_path / "objects")
    message = Message(content, 7, "query")
    store.preregister(1, get_object_tree(message))
    for object_id, each in get_all_nested_objects(message).items():
        store.put(object_id, each.deflate())
    return store, message.object_id


def test_a_frame_comes_back_and_its_chunks_are_files(tmp_path):
    # Two chunks of 5 MB, less their numbers, and 19 bytes; the numbers make equal bytes different chunks.
    frame = bytes(2 * CHUNK) + b"end"
    store, root = stored(tmp_path, fill_envelope("job", "words", frame))
    assert store.is_whole(root)
    assert [path.stat().st_size > CHUNK for path in (tmp_path / "objects").iterdir()] == [True, True]
    opened = open_envelope(root, store.get, tmp_path / "frame", len(frame))
    assert opened == Envelope("job", "words", tmp_path / "frame")
    assert (tmp_path / "frame").read_bytes() == frame
    store.delete(root)
    assert not store.has(root)
    assert list((tmp_path / "objects").iterdir()) == []


def test_a_frame_that_is_too_long_is_refused_and_leaves_no_file(tmp_path):
    store, root = stored(tmp_path, fill_envelope("update", frame=bytes(CHUNK + 1)))
    with pytest.raises(WireError, match=f"more than {CHUNK} bytes came"):
        open_envelope(root, store.get, tmp_path / "frame", CHUNK)
    assert not (tmp_path / "frame").exists()


@pytest.mark.parametrize(
    "content",
    [
        RecordDict({}),
        RecordDict({"note": ConfigRecord({"kind": 1, "words": ""})}),
        RecordDict({"note": ConfigRecord({"words": ""})}),
        RecordDict({"note": ConfigRecord({"kind": "update", "words": ""}), "frame": ConfigRecord({})}),
    ],
    ids=["empty", "number", "no kind", "no array"],
)
def test_what_is_not_an_envelope_is_a_wire_error(tmp_path, content):
    store, root = stored(tmp_path, content)
    with pytest.raises(WireError, match="cannot be read"):
        open_envelope(root, store.get, tmp_path / "frame", CHUNK)


def test_an_object_that_does_not_fit_its_hash_is_not_stored(tmp_path):
    store, root = stored(tmp_path, fill_envelope("job"))
    with pytest.raises(ValueError, match="does not fit its hash"):
        store.put(root, bytes(SMALL + 1))


def test_the_process_on_the_line_has_no_numeric_library_and_no_model():
    code = (
        "import sys, fedmtl.deploy.site;"
        "sys.exit([m for m in ('torch', 'transformers', 'fedmtl.model', 'fedmtl.tasks') if m in sys.modules] or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("kind", ["end", "welcome", "refused", "hello"])
def test_a_frame_in_a_message_that_has_none_is_not_written(tmp_path, kind):
    store, root = stored(tmp_path, fill_envelope(kind, "words", bytes(10)))
    with pytest.raises(WireError, match="a frame in a message that has none"):
        open_envelope(root, store.get, tmp_path / "frame", 100)
    assert not (tmp_path / "frame").exists()

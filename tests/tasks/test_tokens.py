import errno
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import numpy as np
import pytest

from fedmtl.errors import ConfigError, FedmtlError, ModelError
from fedmtl.model.wordpiece import basic_tokenizer
from fedmtl.tasks import tokens
from fedmtl.tasks.task import Task
from fedmtl.tasks.tokens import Tokens, map_array, open_tokens, tokenize

TEXTS = ["a b c", "a", "b c d e f g"]
OTHERS = ["x y", "x y z w v", "x"]
CLS, SEP = 2, 3


def make_task(num_texts: int, pair: str = "cross") -> Task:
    return Task("t", "classification", ("a", "b")[:num_texts], "y", "accuracy", labels=("no", "yes"), pair=pair)


SINGLE, CROSS, DUAL = make_task(1), make_task(2), make_task(2, "dual")


@pytest.fixture
def tokenizer():
    return basic_tokenizer()


@pytest.fixture
def calls(monkeypatch):
    """One entry per pass of the tokenizer over a column."""
    seen = []
    encode = tokens._encode
    monkeypatch.setattr(tokens, "_encode", lambda *arguments, **named: seen.append(1) or encode(*arguments, **named))
    return seen


def rows(part: tokens.TokenPart, name: str = "ids") -> list[list[int]]:
    values = getattr(part, name)
    return [values[start:stop].tolist() for start, stop in zip(part.offsets, part.offsets[1:], strict=False)]


def words(tokenizer, *names: str) -> list[int]:
    return tokenizer.convert_tokens_to_ids(list(names))


def opened(task: Task, texts: tuple[list[str], ...], tokenizer, cache: Path, max_length: int = 16) -> Tokens:
    return open_tokens(tokenize(task, texts, tokenizer, max_length, cache)[0])


def test_a_single_text_is_cls_words_sep(tokenizer, tmp_path):
    (part,) = opened(SINGLE, (["a b", "c"],), tokenizer, tmp_path).parts
    assert rows(part) == [[CLS, *words(tokenizer, "a", "b"), SEP], [CLS, *words(tokenizer, "c"), SEP]]
    assert rows(part, "segments") == [[0, 0, 0, 0], [0, 0, 0]]


def test_a_cross_pair_is_one_sequence_with_the_second_text_in_segment_one(tokenizer, tmp_path):
    (part,) = opened(CROSS, (["a b"], ["c"]), tokenizer, tmp_path).parts
    assert rows(part) == [[CLS, *words(tokenizer, "a", "b"), SEP, *words(tokenizer, "c"), SEP]]
    assert rows(part, "segments") == [[0, 0, 0, 0, 1, 1]]


def test_a_dual_pair_is_two_sequences_as_long_as_the_longer(tokenizer, tmp_path):
    found = opened(DUAL, (["a b", "c"], ["c", "a b d"]), tokenizer, tmp_path)
    first, second = found.parts
    assert rows(first)[1] == [CLS, *words(tokenizer, "c"), SEP]
    assert rows(second)[1] == [CLS, *words(tokenizer, "a", "b", "d"), SEP]
    assert not second.segments.any()
    assert found.lengths().tolist() == [4, 5]


def test_more_than_one_block_is_joined(tokenizer, tmp_path, monkeypatch):
    whole = opened(CROSS, (TEXTS, OTHERS), tokenizer, tmp_path / "whole")
    monkeypatch.setattr(tokens, "BLOCK", 2)
    blocks = opened(CROSS, (TEXTS, OTHERS), tokenizer, tmp_path / "blocks")
    for name in tokens.ARRAYS:
        assert np.array_equal(getattr(whole.parts[0], name), getattr(blocks.parts[0], name))


def test_truncated_examples_are_counted_and_cut(tokenizer, tmp_path):
    # With [CLS] and [SEP] the texts have 5, 3 and 8 tokens, the others 4, 7 and 3.
    assert tokenize(SINGLE, (TEXTS,), tokenizer, 5, tmp_path)[1] == 1
    assert tokenize(SINGLE, (TEXTS,), tokenizer, 8, tmp_path)[1] == 0
    # Crossed they share [CLS] and have a third special token: 3+2+3, 1+5+3 and 6+1+3.
    assert tokenize(CROSS, (TEXTS, OTHERS), tokenizer, 8, tmp_path)[1] == 2
    assert opened(CROSS, (TEXTS, OTHERS), tokenizer, tmp_path, 8).lengths().tolist() == [8, 8, 8]
    # Dual, limit 6: the third is cut in its first text and the second in its second; an example counts once.
    assert tokenize(DUAL, (TEXTS, OTHERS), tokenizer, 6, tmp_path)[1] == 2
    assert tokenize(DUAL, (TEXTS, TEXTS), tokenizer, 6, tmp_path)[1] == 1


def test_a_second_call_is_answered_from_the_cache(tokenizer, tmp_path, calls):
    first = tokenize(SINGLE, (TEXTS,), tokenizer, 5, tmp_path)
    assert tokenize(SINGLE, (list(TEXTS),), basic_tokenizer(), 5, tmp_path) == first
    assert len(calls) == 1


def test_the_cache_is_found_whatever_the_tokenizer_did_before(tokenizer, tmp_path, calls):
    # Transformers leaves a call's padding and truncation in the tokenizer; they must not name the folder.
    first = tokenize(SINGLE, (TEXTS,), tokenizer, 5, tmp_path)
    tokenizer(["a"], truncation=True, max_length=7, padding="max_length")
    assert tokenize(SINGLE, (TEXTS,), tokenizer, 5, tmp_path) == first
    assert len(calls) == 1


def test_tokenizing_leaves_the_tokenizer_as_it_was(tokenizer, tmp_path):
    before = tokenizer.backend_tokenizer.to_str()
    tokenize(CROSS, (TEXTS, OTHERS), tokenizer, 5, tmp_path)
    assert tokenizer.backend_tokenizer.to_str() == before


def test_whatever_changes_the_tokens_changes_the_folder(tokenizer, tmp_path):
    cased, left = basic_tokenizer(), basic_tokenizer()
    cased.backend_tokenizer.normalizer = None
    left.truncation_side = "left"
    folders = [
        tokenize(task, texts, used, length, tmp_path)[0]
        for task, texts, used, length in [
            (SINGLE, (TEXTS,), tokenizer, 5),
            (SINGLE, (TEXTS,), tokenizer, 6),
            (SINGLE, (TEXTS,), cased, 5),
            (SINGLE, (TEXTS,), left, 5),
            (SINGLE, (TEXTS[:2],), tokenizer, 5),
            (SINGLE, (TEXTS + OTHERS,), tokenizer, 5),
            (CROSS, (TEXTS, OTHERS), tokenizer, 5),
            (CROSS, (OTHERS, TEXTS), tokenizer, 5),
            (DUAL, (TEXTS, OTHERS), tokenizer, 5),
            (SINGLE, (["a\0b", "c"],), tokenizer, 5),
            (SINGLE, (["a", "b\0c"],), tokenizer, 5),
        ]
    ]
    assert len(set(folders)) == len(folders)


def test_padding_and_truncation_stored_in_the_tokenizer_have_no_effect(tokenizer, tmp_path):
    fixed = basic_tokenizer()
    fixed.backend_tokenizer.enable_padding(length=12)
    fixed.backend_tokenizer.enable_truncation(max_length=4)
    (plain,), (stored,) = (
        opened(SINGLE, (TEXTS,), used, tmp_path / name).parts for name, used in (("plain", tokenizer), ("fixed", fixed))
    )
    assert rows(stored) == rows(plain)
    assert plain.lengths().tolist() == [5, 3, 8]


def test_an_empty_list_is_a_folder_without_examples(tokenizer, tmp_path):
    for task, texts in ((SINGLE, ([],)), (DUAL, ([], []))):
        folder, truncated = tokenize(task, texts, tokenizer, 16, tmp_path)
        assert (truncated, open_tokens(folder).lengths().tolist()) == (0, [])


ODD = ["", " ", "\0", "naïve ﬁ", "👩‍👩‍👧", "\u202eabc", "日本", "é" * 50, "\ud83d\ude00", "a \ud800 b", "a\r\nb"]


def test_odd_characters_are_tokenized(tokenizer, tmp_path):
    (part,) = opened(SINGLE, (ODD,), tokenizer, tmp_path).parts
    assert [(row[0], row[-1]) for row in rows(part)] == [(CLS, SEP)] * len(ODD)
    # A surrogate pair is the character it stands for; half of one is an unknown character between the words.
    (whole,) = opened(SINGLE, (["\U0001f600", "a \ufffd b"],), tokenizer, tmp_path).parts
    assert [rows(part)[8], rows(part)[9]] == rows(whole)


def test_a_length_without_room_for_text_is_refused(tokenizer, tmp_path):
    # [CLS] and [SEP] around one token; a cross pair has a third special token and two texts.
    for task, texts, least in ((SINGLE, (TEXTS,), 3), (DUAL, (TEXTS, OTHERS), 3), (CROSS, (TEXTS, OTHERS), 5)):
        with pytest.raises(ConfigError, match=rf"^model\.max_length: {least - 1} .* write {least} or more$"):
            tokenize(task, texts, tokenizer, least - 1, tmp_path)
        assert opened(task, texts, tokenizer, tmp_path, least).lengths().max() == least


def test_a_tokenizer_without_a_fast_form_is_refused(tmp_path):
    class Slow:
        is_fast = False

    with pytest.raises(ModelError, match=r"^model\.server_model: .* fast tokenizer$"):
        tokenize(SINGLE, (TEXTS,), Slow(), 16, tmp_path)


def failing_save(monkeypatch, error: BaseException) -> None:
    """The third array that is saved fails, as if the disk were full by then."""
    saved = []
    save = np.save

    def save_some(path, values):
        saved.append(path)
        if len(saved) == 3:
            raise error
        save(path, values)

    monkeypatch.setattr(np, "save", save_some)


def test_an_interrupted_write_leaves_nothing_and_the_next_one_works(tokenizer, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        failing_save(patched, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            tokenize(SINGLE, (TEXTS,), tokenizer, 16, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert opened(SINGLE, (TEXTS,), tokenizer, tmp_path).lengths().tolist() == [5, 3, 8]


# numpy reports a short write in its own words, without an error number.
FULL = [OSError(errno.ENOSPC, "No space left on device"), OSError("100 requested and 12 written")]


@pytest.mark.parametrize("error", FULL)
def test_a_full_disk_is_one_line_that_names_the_cache(error, tokenizer, tmp_path, monkeypatch):
    failing_save(monkeypatch, error)
    with pytest.raises(FedmtlError) as failed:
        tokenize(SINGLE, (TEXTS,), tokenizer, 16, tmp_path)
    reason = error.strerror or "100 requested and 12 written"
    assert str(failed.value) == (
        f"data.cache: cannot write tokens to {tmp_path} ({reason}); free space there, or name another folder"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_made_is_one_line_that_names_it(tokenizer, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FedmtlError, match=r"^data\.cache: cannot write tokens to .*/file \(File exists\)"):
        tokenize(SINGLE, (TEXTS,), tokenizer, 16, tmp_path / "file")


@pytest.mark.parametrize("meta", [None, "", "{", "[" * 3000, '{"parts": 9, "truncated": 0}', '{"parts": 1}', "null"])
def test_a_broken_folder_is_made_anew(meta, tokenizer, tmp_path, calls):
    folder, _ = tokenize(SINGLE, (TEXTS,), tokenizer, 16, tmp_path)
    (folder / "meta.json").unlink()
    if meta is not None:
        (folder / "meta.json").write_text(meta)
    assert tokenize(SINGLE, (TEXTS,), tokenizer, 16, tmp_path) == (folder, 0)
    assert len(calls) == 2


# Both processes wait for the other, then write the same folders; nothing but numpy is imported.
WRITER = """
import sys, time
from pathlib import Path
import numpy as np
from fedmtl.tasks import tokens
cache, name = Path(sys.argv[1]), sys.argv[2]
(cache / name).touch()
while len(list(cache.glob("ready-*"))) < 2:
    time.sleep(0.001)
part = tokens.TokenPart(np.arange(10, dtype=np.int32), np.zeros(10, dtype=np.uint8), np.array([0, 4, 10]))
for number in range(100):
    meta = tokens._write(cache / f"folder-{number}", [(part, np.array([True, False]))])
    assert (meta.parts, meta.truncated) == (1, 1)
    assert tokens.open_tokens(cache / f"folder-{number}").lengths().tolist() == [4, 6]
"""


@pytest.mark.parametrize("is_broken", [False, True])
def test_two_processes_may_write_the_same_folders_at_once(is_broken, tmp_path):
    for number in range(100 * is_broken):
        (tmp_path / f"folder-{number}").mkdir()
        (tmp_path / f"folder-{number}" / "0.ids.npy").touch()
    both = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), f"ready-{n}"]) for n in (1, 2)]
    assert [process.wait(30) for process in both] == [0, 0]
    names = sorted(path.name for path in tmp_path.iterdir() if path.name != ".lock")
    assert names == sorted([f"folder-{number}" for number in range(100)] + ["ready-1", "ready-2"])


def test_opened_tokens_are_mapped_and_cannot_be_changed(tokenizer, tmp_path):
    (part,) = opened(SINGLE, (TEXTS,), tokenizer, tmp_path).parts
    assert not part.ids.flags.writeable
    base = part.ids
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert type(base) is np.memmap


def test_the_cache_stands_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("FEDMTL_CACHE", raising=False)
    assert tokens.default_cache() == tmp_path / "xdg" / "fedmtl" / "tokens"
    monkeypatch.setenv("FEDMTL_CACHE", str(tmp_path / "own"))
    assert tokens.default_cache() == tmp_path / "own" / "tokens"


def test_the_cache_is_its_owners_only_and_one_that_was_open_is_closed(tokenizer, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o755)
    cache.chmod(0o755)
    folder, _ = tokenize(SINGLE, (TEXTS,), tokenizer, 16, cache)
    assert cache.stat().st_mode & 0o777 == 0o700
    assert folder.stat().st_mode & 0o777 == 0o700
    # What is there already is found, and the folder closed again.
    cache.chmod(0o755)
    assert tokenize(SINGLE, (TEXTS,), tokenizer, 16, cache) == (folder, 0)
    assert cache.stat().st_mode & 0o777 == 0o700


def test_the_default_cache_is_its_owners_only(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDMTL_CACHE", str(tmp_path / "mine"))
    tokenize(SINGLE, (TEXTS,), tokenizer, 16, tokens.default_cache())
    assert (tmp_path / "mine" / "tokens").stat().st_mode & 0o777 == 0o700


def test_a_folder_of_everybodys_is_no_cache(tokenizer, tmp_path):
    everybodys = tmp_path / "tmp"
    everybodys.mkdir()
    everybodys.chmod(0o1777)
    with pytest.raises(FedmtlError, match=r"data\.cache: .* is everybody's"):
        tokenize(SINGLE, (TEXTS,), tokenizer, 16, everybodys)
    assert everybodys.stat().st_mode & 0o7777 == 0o1777


@pytest.mark.parametrize("name", ["0.ids.npy", "0.segments.npy", "0.offsets.npy", "meta.json"])
def test_a_mutated_cache_is_read_or_refused_in_one_line(tokenizer, tmp_path, name):
    folder, _ = tokenize(SINGLE, (TEXTS,), tokenizer, 16, tmp_path)
    path = folder / name
    whole = path.read_bytes()
    random = Random(7)
    refused: list[str] = []
    for _ in range(300):
        changed = bytearray(whole)
        place = random.randrange(len(changed))
        changed[place : place + random.choice((0, 1, 9))] = random.choice([b"", b"\xff", b"9", b"O", b"'", bytes(3)])
        path.write_bytes(changed)
        open_tokens.cache_clear()
        try:
            open_tokens(folder).lengths()
        except FedmtlError as error:
            refused.append(str(error))
    open_tokens.cache_clear()
    assert refused
    assert not any("\n" in message for message in refused)


def test_threads_read_arrays_one_after_another(tmp_path, monkeypatch):
    # numpy parses a header as Python, which two threads of CPython 3.11 cannot do at once.
    path = tmp_path / "array.npy"
    np.save(path, np.arange(3))
    reading, most = [], []
    load = np.load

    def slow(*args, **kwargs):
        reading.append(1)
        most.append(len(reading))
        time.sleep(0.01)
        try:
            return load(*args, **kwargs)
        finally:
            reading.pop()

    monkeypatch.setattr(np, "load", slow)
    with ThreadPoolExecutor(4) as threads:
        arrays = list(threads.map(map_array, [path] * 8))
    assert [array.tolist() for array in arrays] == [[0, 1, 2]] * 8
    assert max(most) == 1

import gzip

import numpy as np
import pytest
import torch

from fedmtl.compress.augment import copies as copies_module
from fedmtl.compress.augment.candidates import find_words
from fedmtl.compress.augment.copies import augment, make_copies, shares
from fedmtl.compress.augment.settings import AugmentSettings, check_augment, parse_copies
from fedmtl.errors import ConfigError
from fedmtl.tasks.examples import Examples

CPU = torch.device("cpu")
# Two clusters of words: neighbours of `good` are `fine` and `nice`, those of `film` are `movie` and `picture`.
GLOVE = {
    "good": (1.0, 0.1), "fine": (1.0, 0.2), "nice": (1.0, 0.3), "film": (-1.0, 0.1), "movie": (-1.0, 0.2),
    "picture": (-1.0, 0.4), ".": (0.0, 1.0),
}  # fmt: skip
NEAR = {"good": {"fine", "nice"}, "film": {"movie", "picture"}}
PAIRS = Examples((["A good film.", "the end"], ["Film is good", "good"]), np.array([1, 0]))


@pytest.fixture
def glove(tmp_path):
    path = tmp_path / "glove.npz"
    np.savez(path, vectors=np.array(list(GLOVE.values()), dtype=np.float16), words="\n".join(GLOVE))
    return path


def settings(glove, **changes):
    return AugmentSettings(**{"sources": (f"glove:{glove}",), "candidates": 2, "copies": {"": 8}, **changes})


def go(told, cache, examples=None, seed=0, said=None):
    given = examples or {"pair": PAIRS}
    return augment(told, given, "none", cache, seed, CPU, [].append if said is None else said.append)


def test_one_text_changes_at_a_time_and_only_by_candidates(glove, tmp_path):
    made = go(settings(glove), tmp_path)["pair"]
    assert [texts[:2] for texts in made.texts] == [texts[:2] for texts in PAIRS.texts]
    assert len(made) > 6
    seen = set()
    for first, second, label in list(zip(*made.texts, made.labels, strict=True))[2:]:
        source = 0 if label == 1 else 1
        before = PAIRS.texts[0][source], PAIRS.texts[1][source]
        changed = [side for side, text in enumerate((first, second)) if text != before[side]]
        assert len(changed) == 1
        seen.add((source, changed[0]))
        old, new = (
            [word.lower for word in find_words(text)] for text in (before[changed[0]], (first, second)[changed[0]])
        )
        assert all(now == was or now in NEAR[was] for was, now in zip(old, new, strict=True))
    # `the end` has no word that the table knows.
    assert seen == {(0, 0), (0, 1), (1, 1)}


def test_what_is_not_a_word_and_capitals_stay():
    words = [(word, ("movie",)) for word in find_words("A FILM, Film film!")]
    assert make_copies(("A FILM, Film film!",), [words], 1, 1.0, 0) == [("A MOVIE, Movie movie!",)]


def test_without_a_chance_nothing_is_added(glove, tmp_path):
    made = go(settings(glove, probability=0.0), tmp_path)["pair"]
    assert made.texts == PAIRS.texts
    assert made.labels.tolist() == [1, 0]


def test_every_copy_is_new_and_the_seed_decides(glove, tmp_path):
    made, again, other = (go(settings(glove), tmp_path / name, seed=seed)["pair"] for name, seed in
                          (("a", 0), ("b", 0), ("c", 1)))  # fmt: skip
    assert made.texts == again.texts
    assert made.texts != other.texts
    rows = list(zip(*made.texts, strict=True))
    assert len(set(rows)) == len(rows)


def test_is_read_back_while_texts_files_and_settings_are_the_same(glove, tmp_path, monkeypatch):
    first = go(settings(glove), tmp_path / "cache")["pair"]

    def fail(*given):
        raise AssertionError("made again")

    real = copies_module._make
    monkeypatch.setattr(copies_module, "_make", fail)
    assert go(settings(glove), tmp_path / "cache")["pair"].texts == first.texts
    for told, examples in (
        (settings(glove, probability=0.5), {"pair": PAIRS}),
        (settings(glove), {"pair": PAIRS.take([1, 0])}),
    ):
        with pytest.raises(AssertionError, match="made again"):
            go(told, tmp_path / "cache", examples)
    np.savez(glove, vectors=np.eye(7, dtype=np.float16), words="\n".join(GLOVE))
    with pytest.raises(AssertionError, match="made again"):
        go(settings(glove), tmp_path / "cache")
    monkeypatch.setattr(copies_module, "_make", real)


def test_a_cap_takes_from_the_largest():
    # 10 is little; 90 are left for two, 45 each.
    assert shares({"large": 500, "small": 10, "middle": 100}, 100) == {"small": 10, "middle": 45, "large": 45}
    assert shares({"large": 500, "small": 10}, 10**6) == {"large": 500, "small": 10}


def test_there_are_never_more_than_the_cap(glove, tmp_path):
    examples = {"a": PAIRS, "b": PAIRS.take([0, 0, 0])}
    made = go(settings(glove, most=7), tmp_path, examples)
    assert 0 < sum(len(made[name]) - len(examples[name]) for name in examples) <= 7


def test_synonyms_and_a_second_source_for_words_the_first_lacks(glove, tmp_path):
    path = tmp_path / "synonyms.tsv.gz"
    with gzip.open(path, "wt") as file:
        file.write("lemma\tpos\tsynonyms\nend\tnoun\tterminal|ending|END\nend\tverb\tstop\ngood\tadj\tgoodness\n")
    told = settings(glove, sources=(f"glove:{glove}", f"wordnet:{path}"), candidates=5, probability=1.0)
    texts = go(told, tmp_path, {"single": Examples((["the end", "good"],), np.array([0, 1]))})["single"].texts[0]
    assert set(texts[2:]) - {"movie", "picture", "film"} == {"the terminal", "the ending", "the stop", "fine", "nice"}


def test_copies_are_the_papers_unless_told():
    assert [AugmentSettings().copies_of(task) for task in ("cola", "sst2", "qqp", "own")] == [30, 20, 10, 20]
    told = AugmentSettings(copies=parse_copies("5,cola=7"))
    assert [told.copies_of(task) for task in ("cola", "sst2")] == [7, 5]
    with pytest.raises(ConfigError, match="no whole number"):
        parse_copies("cola=many")
    with pytest.raises(ConfigError, match="glove:FILE"):
        check_augment(AugmentSettings(sources=("thesaurus",)))

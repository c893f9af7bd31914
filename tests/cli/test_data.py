"""fedmtl data get: the files, and a config on stdout that a run takes as it is."""

import pytest


@pytest.fixture
def reviews(tmp_path, monkeypatch):
    """A folder that the hub's library loads as a dataset."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "hub" / "reviews").mkdir(parents=True)
    for split, count in (("train", 30), ("validation", 8), ("test", 8)):
        rows = [f"this one was {'fine' if n % 2 else 'dull'},{n % 2}" for n in range(count)]
        (tmp_path / "hub" / "reviews" / f"{split}.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    return tmp_path / "hub" / "reviews"


def test_what_is_printed_is_a_config(cli, reviews, tmp_path):
    got = cli("data", "get", str(reviews), "--out", "files")
    assert got.code == 0
    files, snippet = got.out.split("\n\n", 1)
    assert [line.removeprefix("files/reviews/") for line in files.splitlines()[:3]] == [
        "train.jsonl: 30 rows", "validation.jsonl: 8 rows", "test.jsonl: 8 rows",
    ]  # fmt: skip
    more = "model: {server_model: random-1x32}\ntraining: {num_rounds: 1}\ncompute: {workers: 0, device: cpu}\n"
    (tmp_path / "run.yaml").write_text(more + snippet)
    assert cli("run", "run.yaml", "--name", "first").code == 0
    scored = cli("evaluate", "first", "--task", "reviews", "--file", "files/reviews/test.jsonl")
    assert scored.code == 0
    assert "accuracy" in scored.out


def test_another_format_is_one_line(cli, tmp_path):
    got = cli("data", "get", "imdb", "--out", "files", "--format", "xml")
    assert (got.code, got.err) == (2, "error: --format: found xml; write jsonl or csv\n")
    assert not (tmp_path / "files").exists()

import json

import numpy as np


def test_a_students_answers_come_through_predict(cli, runs, tmp_path):
    words = ["great", "good", "bad", "awful", "film"]
    np.savez(tmp_path / "glove.npz", vectors=np.eye(5, 3, dtype=np.float16) + 1, words="\n".join(words))
    made = cli(
        "distill", "demo", "--student", "1x32", "--epochs-intermediate", "1", "--epochs-prediction", "1",
        "--augment", f"glove:{tmp_path / 'glove.npz'}", "--copies", "1", "--name", "small",
        "--set", f"data.cache={tmp_path / 'cache' / 'tokens'}",
    )  # fmt: skip
    assert made.code == 0, made.err
    assert "retention" in made.out
    assert "\nenergy: " in made.out
    assert (tmp_path / "cache" / "augmented").is_dir()
    answer = cli("predict", "small", "a great film", "--json")
    assert json.loads(answer.out)["predictions"][0]["task"] == "sentiment"
    assert "sentiment" in cli("evaluate", "small").out
    assert "distilled" in cli("compare", "demo", "small").out
    assert (runs / "small" / "report.html").exists()


def test_what_cannot_be_is_one_line(cli, runs):
    for arguments, words in (
        (("--student", "1x64", "--start", "teacher"), "write --start random"),
        (("--student", "3x32"), "give the student at most 1"),
        (("--student", "1x32", "--augment", "glove"), "glove:FILE"),
        (("--student", "1x32", "--set", "training.num_rounds=3"), "--set training.num_rounds: `fedmtl distill`"),
    ):
        refused = cli("distill", "demo", *arguments)
        assert refused.code == 2
        assert words in refused.error
    assert not list(runs.glob("demo-*"))


def test_every_command_refuses_a_setting_that_it_does_not_honour(cli, runs):
    for arguments, words in (
        (("run", "--set", "federation.join_timeout=5"), "only `fedmtl server` waits for sites; set it there"),
        (("run", "--engine", "flower", "--set", "compute.stack=2"), "write `--engine local`"),
        (("server", "--set", "compute.stack=2"), "sites train, each its client by itself; leave it out"),
        (
            ("prune", "demo", "--layers", "1", "--set", "training.num_rounds=2"),
            "write --epochs, of which each is a round",
        ),
        (("study", "wire", "--set", "wire.up=int8"), "write --codecs"),
        (("study", "scaling", "--quick", "--set", "federation.clients_per_task=2"), "write --clients"),
        (("study", "scaling", "--quick", "--set", "tasks.yelp.weight=2"), "its tasks are sentiment"),
    ):
        refused = cli(*arguments)
        assert refused.code == 2
        assert refused.error.startswith(f"--set {arguments[-1].partition('=')[0]}: `fedmtl {arguments[0]}")
        assert words in refused.error
    assert {path.name for path in runs.iterdir() if (path / "config.yaml").exists()} == {"demo", "central", "personal"}


def test_a_student_is_pruned_while_it_learns(cli, runs):
    passes = ("--student", "1x32", "--epochs-intermediate", "3", "--epochs-prediction", "1", "--name", "sparse")
    # More passes than the run had rounds: they are what counts here.
    made = cli("distill", "demo", *passes, "--set", "training.pruning={amount: 0.3, rounds: 4}")
    assert made.code == 0, made.err
    lines = (runs / "sparse" / "events.jsonl").read_text().splitlines()
    last = [event for event in map(json.loads, lines) if event["event"] == "pruning"][-1]
    assert round(last["linear"]["zeros"] / last["linear"]["weights"], 2) == 0.3
    refused = cli("distill", "demo", *passes[:-1], "other", "--set", "training.pruning={amount: 0.3, rounds: 5}")
    assert refused.code == 2
    assert "training.pruning.rounds: found 5" in refused.error
    assert not (runs / "other").exists()

"""A site's policy: strict where nothing is written, and every mistake in it is named with its key."""

from __future__ import annotations

import os

import pytest

from fedmtl.errors import ConfigError
from fedmtl.federation.policy import Policy, TaskPolicy, policy_text, read_policy, round_up


@pytest.fixture
def read(tmp_path):
    def of(text: str) -> Policy:
        (tmp_path / "policy.yaml").write_text(text)
        return read_policy(tmp_path / "policy.yaml")

    return of


def test_what_init_writes_is_the_default_with_a_sentence_for_each_line(read):
    text = policy_text()
    assert read(text) == Policy()
    lines = text.splitlines()
    keys = [number for number, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")]
    assert len(keys) > 15
    for number in keys:
        assert lines[number - 1].lstrip().startswith("# "), lines[number]


def test_the_default_is_strict():
    policy = Policy()
    assert policy.min_examples == 32
    assert not policy.send.prediction_pairs
    assert not policy.encoders
    assert not policy.hub_datasets
    assert policy.teacher is None
    assert "an example's label never does" in policy.words()


def test_losses_leave_unless_noise_is_required_of_what_leaves(read):
    required = "require: {example_privacy: {}}"
    sends = {"": True, "send: {losses: false}": False, required: False, f"{required}\nsend: {{losses: true}}": True}
    assert {text: read(text or "max_jobs: 7").sends_losses for text in sends} == sends
    assert "updates, losses, numbers" in read("max_jobs: 7").words()
    assert "updates, numbers" in read(required).words()


def test_a_policy_with_tasks_comes_back_from_its_text(read, tmp_path):
    notes = TaskPolicy(text=["message"], label="topic", labels=["keep", "drop"])
    policy = Policy(tasks={"notes": notes, "scores": TaskPolicy(score_range=(0, 5))}, max_jobs=7)
    assert read(policy_text(policy)) == policy


def test_paths_are_relative_to_the_policy(read, tmp_path):
    policy = read("tasks: {notes: {file: data/notes.tsv}}\nteacher: model")
    assert policy.tasks["notes"].file == str(tmp_path / "data/notes.tsv")
    assert policy.teacher == str(tmp_path / "model")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("min_exampels: 3", "min_exampels: unknown key; did you mean `min_examples`?"),
        ("send: {pairs: true}", "send.pairs: unknown key"),
        ("send: {label_counts: {round: 5}}", "send.label_counts.round: unknown key; did you mean `round_to`?"),
        ("tasks: {notes: {lable: x}}", "tasks.notes.lable: unknown key; did you mean `label`?"),
        ("min_examples: 0", "min_examples: found 0"),
        ("min_examples: many", "min_examples: found 'many'"),
        ("send: {token_rows: perhaps}", "send.token_rows: found 'perhaps'"),
        ("require: {noise: {epsilon: 1}}", "require.noise: .*write .example_privacy: {max_epsilon: 8}"),
        ("require: {masking: true}", "require.masking: .*write .secure_aggregation: true"),
        ("require: {secure_aggregation: {min_clients: 1}}", "require.secure_aggregation.min_clients: found 1"),
        ("require: {secure_aggregation: {peers: {a: xyz}}}", "require.secure_aggregation.peers.a: found 'xyz'"),
        ("require: {secure_aggregation: {peer: {}}}", "require.secure_aggregation.peer: unknown key"),
        ("tasks: {a/b: {}}", "'a/b' is no name of a task"),
        ("tasks: {sst2: {file: ~nosuchuser/x}}", "tasks.sst2.file: found '~nosuchuser/x', that user has no home"),
        ("teacher: ~nosuchuser/x", "policy.yaml: teacher: found '~nosuchuser/x', that user has no home"),
        ("max_configs: -1", "max_configs: found -1"),
        ("- a", "a policy is sections of `key: value` lines"),
        ("a: [", "line 1: "),
    ],
)
def test_a_mistake_is_one_line_with_its_key(read, text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        read(text)
    assert "\n" not in str(caught.value)


def test_a_policy_that_is_not_there_or_no_text_is_one_line(read, tmp_path):
    with pytest.raises(ConfigError, match="fedmtl policy init"):
        read_policy(tmp_path / "away.yaml")
    (tmp_path / "policy.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read_policy(tmp_path / "policy.yaml")
    (tmp_path / "policy.yaml").write_bytes(b"#" * (1 << 21))
    with pytest.raises(ConfigError, match="is longer than"):
        read_policy(tmp_path / "policy.yaml")


def test_a_pipe_is_no_policy(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(ConfigError, match="is no file; write one with"):
            read_policy(tmp_path / name)


def test_counts_are_rounded_up():
    assert [round_up(count, 10) for count in (0, 1, 10, 11)] == [0, 10, 10, 20]
    assert round_up(17, 1) == 17

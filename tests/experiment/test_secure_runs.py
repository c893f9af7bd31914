"""Whole runs whose updates are summed under masks: their weights, what they write down, how they end and go on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedmtl.config.auto import chosen_line
from fedmtl.config.file import explained_config, load_config
from fedmtl.errors import ConfigError
from fedmtl.experiment.prepare import open_engine, prepare
from fedmtl.experiment.run import resume_run, start_run
from fedmtl.federation.checkpoint import load_checkpoint
from fedmtl.federation.messages import Failure
from fedmtl.federation.server import RoundFailed
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events
from fedmtl.runs.summary import protection
from raw_events import raw_events
from small_config import SMALL

MASKED = ("privacy.secure_aggregation={}", "federation.vocabulary_slices=false", "federation.clients_per_task=4")
ONE_TASK = ("tasks.paraphrase=null", "tasks.similarity=null")


def of_kind(run: RunFolder, kind: str) -> list[dict]:
    return [event for event in raw_events(run) if event["event"] == kind]


def digest(run: RunFolder) -> str:
    return of_kind(run, "end")[0]["weights_sha256"]


def weights(run: RunFolder):
    return load_checkpoint(run.checkpoints).weights


def largest_difference(first: RunFolder, second: RunFolder) -> float:
    one, two = weights(first), weights(second)
    assert one.keys() == two.keys()
    return max(float((one[key] - two[key]).abs().max()) for key in one)


def test_a_run_has_the_weights_of_a_plain_one_but_for_rounding_whatever_its_workers(make_config, run_once):
    plain = run_once(*MASKED[1:], "federation.average=tasks")
    masked = run_once(*MASKED, "federation.average=tasks")
    events = of_kind(masked, "secure_aggregation")
    assert [event["opened"]["all"] for event in events] == [12, 12]
    # Two rounds of an AdamW that starts from weights a rounding apart; a client's steps are of 1e-3.
    assert 0 < largest_difference(plain, masked) < 1e-4
    assert digest(start_run(make_config(*MASKED, "federation.average=tasks", "compute.workers=2"), "two")) == digest(
        masked
    )
    for one, two in zip(of_kind(plain, "round"), of_kind(masked, "round"), strict=True):
        assert two["losses"] == pytest.approx(one["losses"], abs=1e-4)
        assert (two["seen"], two["samples"], two["clients"]) == (one["seen"], one["samples"], one["clients"])


def test_nothing_of_a_single_client_is_written_down(run_once):
    masked = run_once(*MASKED, "federation.average=tasks")
    updates = of_kind(masked, "update")
    assert len(updates) == 24
    assert all(event["tasks"] == {} and event.get("shares") is None for event in updates)
    (words,) = protection(read_events(masked))
    assert words.startswith(
        "secure aggregation: in 2 rounds the server opened sums over 4 clients or more and no single"
    )
    assert words in masked.report.read_text()
    assert "sums of clients alone" in masked.report.read_text()


def test_scores_at_clients_are_sums_too(run_once):
    plain = run_once(*MASKED[1:], "evaluation.where=clients")
    masked = run_once(*MASKED, "evaluation.where=clients")
    in_order = [sorted(of_kind(run, "evaluation"), key=lambda event: (event["round"], event["task"]))
                for run in (plain, masked)]  # fmt: skip
    for one, two in zip(*in_order, strict=True):
        assert two["task"] == one["task"]
        assert two["examples"] == one["examples"]
        assert two["loss"] == pytest.approx(one["loss"], abs=1e-3)
        assert not two.get("clients")
        assert one["clients"]
        if one["round"] == 0:
            assert two.get("confusion") == one.get("confusion")


class Killed(BaseException):
    pass


class Interrupted:
    """An engine that ends in the middle of its call number `at`, or loses clients."""

    def __init__(self, engine, at: int = -1, loses=lambda job: False) -> None:
        self._engine, self._at, self._loses, self._calls = engine, at, loses, 0

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    def run(self, jobs, deadline):
        self._calls += 1
        ends = self._calls == self._at
        kept, lost = [], []
        for job in jobs:
            (lost if self._loses(job) else kept).append(job)
        for number, answer in enumerate(self._engine.run(kept, deadline)):
            if ends and number == 2:
                raise Killed
            yield answer
        yield from (Failure(job.round, job.client, "lost") for job in lost)


# Of each round: advertise, share, train, unmask.
@pytest.mark.slow
@pytest.mark.parametrize("at", [5, 6, 7, 8])
def test_killed_at_any_exchange_it_resumes_to_the_same_weights(make_config, run_once, at):
    overrides = (*MASKED, "training.keep_optimizer=true", "federation.server_optimizer.kind=fedavgm")
    config, whole = make_config(*overrides), run_once(*overrides)
    with pytest.raises(Killed):
        start_run(config, "killed", make_engine=lambda *given: Interrupted(open_engine(*given), at))
    killed = RunFolder(Path(config.output) / "killed")
    assert digest(resume_run(killed)) == digest(whole)
    assert len(of_kind(killed, "secure_aggregation")) == 2


def test_a_round_below_the_threshold_ends_the_run_and_a_resume_goes_on(make_config, run_once):
    config, whole = make_config(*MASKED), run_once(*MASKED)

    def loses(job) -> bool:
        return job.round == 2 and job.kind == "train" and not job.client.startswith("sentiment")

    with pytest.raises(RoundFailed, match=r"round 2: 4 clients returned their part, and 8 are needed"):
        start_run(config, "few", make_engine=lambda *given: Interrupted(open_engine(*given), loses=loses))
    few = RunFolder(Path(config.output) / "few")
    assert of_kind(few, "end")[0]["status"] == "failed"
    resumed = resume_run(few)
    assert of_kind(resumed, "end")[-1]["weights_sha256"] == digest(whole)


def test_a_head_with_too_few_clients_in_a_round_does_not_move(make_config):
    def loses(job) -> bool:
        return job.kind == "train" and job.client in ("similarity_client_1", "similarity_client_2")

    config = make_config(*MASKED, "training.num_rounds=1")
    run = start_run(config, "run", make_engine=lambda *given: Interrupted(open_engine(*given), loses=loses))
    (event,) = of_kind(run, "secure_aggregation")
    assert event["closed"] == {"task:similarity": 2, "counts:similarity": 2}
    before, after = prepare(config).state.weights, weights(run)
    moved = {key.scope for key in before if not torch.equal(before[key], after[key])}
    assert moved == {"all", "task:sentiment", "task:paraphrase"}
    (done,) = [each for each in of_kind(run, "round") if each["round"] == 1]
    assert set(done["losses"]) == {"sentiment", "paraphrase"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("model.lora.rank=2", "model.pair=cross"),
        ('sharing.rules=[{"heads.*": client}, {"*": all}]', "federation.average=uniform"),
        ("wire.down=fp16", "training.loss_weighting=uncertainty", "training.task_schedule=joint"),
        (
            "privacy.secure_aggregation={bits: 64}",
            "training.pruning={amount: 0.5, rounds: 1}",
            "training.logit_adjustment=1",
        ),
        ("federation.task_weighting.kind=progress", "federation.max_update_norm=100", "tasks.sentiment.patience=1"),
        ("federation.clients_per_round=8",),
        ("mode=federated_single_task",),
        ("model.adapters={size: 8, heads: 2}", "training.proximal=0.1"),
        (
            "sharing.groups={pairs: [paraphrase, similarity]}",
            'sharing.rules=[{"heads.*": task}, {"encoder.*": group}, {"*": all}]',
            "training.smart={weight: 1}",
        ),
    ],
    ids=lambda overrides: overrides[0].split("=")[0],
)
def test_it_goes_together_with(make_config, overrides):
    run = start_run(make_config(*MASKED, "training.num_rounds=1", *overrides), "run")
    assert of_kind(run, "end")[0]["status"] == "done"
    assert not of_kind(run, "failure")
    assert of_kind(run, "secure_aggregation")[-1]["opened"]


def test_in_stacks_it_gives_what_stacks_give(make_config):
    overrides = ("compute.stack=4", "training.num_rounds=1", "model.encoder_dropout=0.1")
    plain = start_run(make_config(*MASKED[1:], *overrides), "plain")
    masked = start_run(make_config(*MASKED, *overrides), "masked")
    assert 0 < largest_difference(plain, masked) < 1e-6
    assert of_kind(masked, "start")[0]["stack"] == 4


@pytest.mark.parametrize("mode", ["local", "centralized"])
def test_a_baseline_without_sums_over_clients_is_as_it_was(make_config, mode):
    run = start_run(make_config(*MASKED, "training.num_rounds=1", f"mode={mode}"), "run")
    assert not of_kind(run, "secure_aggregation")
    assert of_kind(run, "end")[0]["status"] == "done"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["federation.clients_per_task=2"], r"privacy.min_clients: found 3, and 2 clients have .* task:sentiment"),
        (["federation.vocabulary_slices=true"], "federation.vocabulary_slices: found true"),
        (["federation.aggregation=clipped_mean"], "federation.aggregation: found clipped_mean"),
        (["federation.max_share=0.5"], "federation.max_share: found"),
        (["wire.up=int8"], "wire.up: found int8"),
        (["evaluation.share_pairs=true"], "evaluation.share_pairs: found"),
        (["federation.clients_per_round=2"], "federation.clients_per_round: found 2"),
        (["methods.scaffold={}"], "methods.scaffold: found"),
        (["sharing.adaptive={}"], "sharing.adaptive: found"),
        (["training.gradients=pcgrad", "training.task_schedule=joint"], "training.gradients: found"),
        (["privacy.client={noise_multiplier: 1}"], "privacy.client.noise_at: found server with privacy.secure_agg"),
        (["privacy.example={noise_multiplier: 1}"], "privacy.example.max_sampling_rate: found nothing, and under"),
        (["privacy.min_clients=1"], "privacy.min_clients: found 1"),
        (["privacy.secure_aggregation.threshold=0.5"], "privacy.secure_aggregation.threshold: found 0.5"),
    ],
    ids=lambda value: value[0].split("=")[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_what_does_not_go_together_is_refused_by_name_before_the_first_round(make_config, overrides, words):
    with pytest.raises(ConfigError, match=words):
        prepare(make_config(*MASKED, *overrides))


def test_a_task_whose_scores_cannot_be_opened_is_named_at_the_start(make_config):
    said = []
    rules = 'sharing.rules=[{"heads.*": client}, {"*": all}]'
    prepare(make_config(*MASKED, rules, "federation.clients_per_task=2"), said.append)
    assert any("its scores and losses are not opened" in line for event in said for line in event.lines())


def test_without_a_word_on_them_slices_are_off(tmp_path):
    given = [override for override in SMALL if override != "defaults=plain"]
    config = load_config(None, [*given, f"output={tmp_path}", "privacy.secure_aggregation={}"])
    assert config.federation.vocabulary_slices is False
    explained = explained_config(None, [*given, "privacy.secure_aggregation={}"])
    assert "vocabulary_slices False" in str(chosen_line(explained.choices))
    assert load_config(None, [*given, f"output={tmp_path}"]).federation.vocabulary_slices is True

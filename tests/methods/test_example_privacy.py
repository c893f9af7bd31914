"""DP-SGD at a client: what a step is, what it leaves in the ledgers, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
import torch

from fedmtl.capabilities import unprotected
from fedmtl.config import Config
from fedmtl.errors import ConfigError, FedmtlError, PolicyError
from fedmtl.experiment.prepare import prepare
from fedmtl.experiment.run import resume_run, start_run
from fedmtl.federation.messages import Update
from fedmtl.federation.policy import Policy
from fedmtl.methods.accounting import Releases, spent
from fedmtl.methods.example_account import LEDGER, most_steps
from fedmtl.methods.example_gradients import PrivateGradients
from fedmtl.methods.example_privacy import CAPABILITY, NAME, ExamplePrivacy
from fedmtl.methods.noise import KeyedNoise, derive_key
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.privacy import NOT_COVERED, privacy_lines
from fedmtl.sharing.plan import Extra, Key, Weights
from fedmtl.tasks.batches import collate
from fedmtl.training.local import Trained, to_tensors, train
from fedmtl.training.local_method import LocalMethods, Release
from raw_events import raw_events
from training.small_client import CPU, DUAL, SINGLE, bind, copied, make_settings, make_shard, make_task, small_model

OPTIONS = {
    "epsilon": None, "noise_multiplier": 0.5, "delta": 1e-5, "max_grad_norm": 0.3, "sampling": "poisson",
    "examples_at_once": None, "max_sampling_rate": None, "masked": False,
}  # fmt: skip
SECRET = bytes(range(32))
SGD = {"optimizer": "sgd", "momentum": 0.0, "learning_rate": 1.0, "weight_decay": 0.0, "schedule": "constant"}
PRIVATE = ("privacy.example.noise_multiplier=0.8", "training.local_epochs=1", "training.batch_size=4")


def run_step(
    folder: Path,
    task: Any = SINGLE,
    *,
    digest: str = "a",
    options: Any = None,
    counts_to: int = 1,
    jobs: int | None = None,
    **training: Any,
) -> tuple[Weights, Weights, Trained]:
    """The values before and after a client's round, in double precision."""
    model = small_model(task)
    bound = bind(model)
    before = copied(bound.weights())
    method = PrivateGradients({**OPTIONS, **(options or {})})
    release = Release(SECRET, digest, folder / "client", counts_to=counts_to)
    received = {} if jobs is None else {NAME: Extra({"jobs": {task.name: jobs}})}
    methods = LocalMethods([method], received, release=lambda: release)
    settings = make_settings(task, **{**SGD, "local_steps": 1, **training})
    shards = {task.name: make_shard(task, folder / "tokens")}
    trained = train(bound, shards, settings, round_number=1, seed=5, device=CPU, methods=methods)
    return before, copied(bound.weights()), trained


def test_a_step_is_the_sum_of_clipped_gradients_with_noise_over_the_expected_number(tmp_path: Path) -> None:
    before, after, _ = run_step(tmp_path)
    # Twelve examples, batches of five: each is drawn with chance 5/12, and the sum is divided by 5.
    draws = KeyedNoise(derive_key(SECRET, "a", NAME, "lots", "single"))
    drawn = draws.chosen(12, 5 / 12).numpy()
    assert len(drawn) not in (0, 5, 12)
    model = small_model(SINGLE)
    bound = bind(model)
    shard = make_shard(SINGLE, tmp_path / "tokens")
    total = {key: torch.zeros_like(value) for key, value in before.items()}
    clipped = 0
    model.adds_gradients = True
    for number in drawn:
        inputs, labels = to_tensors(collate(shard, shard.indices[[number]], model.pad_id, None), CPU)
        loss = SINGLE.kind_of.losses(SINGLE, model("single", inputs), labels).sum()
        keys = [key for key in total if bound.parameters[key].requires_grad]
        found = torch.autograd.grad(loss, [bound.parameters[key] for key in keys], allow_unused=True)
        gradients = {key: g for key, g in zip(keys, found, strict=True) if g is not None}
        norm = float(torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt())
        clipped += norm > 0.3
        for key, gradient in gradients.items():
            total[key] += gradient * min(1.0, 0.3 * (1 - 1e-5) / norm)
    assert clipped
    noise = KeyedNoise(derive_key(SECRET, "a", NAME, "noise", "single"))
    spans = bound.flat.spans
    flat = torch.zeros_like(bound.flat.values)
    noise.add_to(flat, 0.3 * 0.5 / 5)
    for key, value in before.items():
        expected = value - total[key] / 5 - flat[spans[key]].view(value.shape)
        torch.testing.assert_close(after[key], expected, rtol=1e-9, atol=1e-9)


def test_noise_is_normal_and_on_every_value_that_a_step_moves(tmp_path: Path) -> None:
    # A bound so small that gradients are nothing beside the noise of 1000 times the bound.
    options = {"max_grad_norm": 1e-6, "noise_multiplier": 1e3}
    before, after, _ = run_step(tmp_path, options=options)
    moved = {key: (after[key] - before[key]).reshape(-1) / (1e-3 / 5) for key in before}
    every = torch.cat(list(moved.values()))
    assert (every != 0).all()
    assert float(every.mean()) == pytest.approx(0.0, abs=4 / len(every) ** 0.5)
    assert float(every.var()) == pytest.approx(1.0, abs=4 * (2 / len(every)) ** 0.5)
    assert float(every.pow(3).mean()) == pytest.approx(0.0, abs=4 * (15 / len(every)) ** 0.5)
    assert float(every.pow(4).mean()) == pytest.approx(3.0, abs=4 * (96 / len(every)) ** 0.5)
    # No two values have the same noise, nor neighbours correlated noise.
    assert abs(float((every[1:] * every[:-1]).mean())) < 4 / len(every) ** 0.5
    table = moved[Key("all", "embeddings.word_embeddings.weight")].view(-1, 32)
    used = np.concatenate(make_shard(SINGLE, tmp_path / "tokens").used_ids())
    assert len(table) > len(set(used.tolist()))
    assert table.std(1).min() > 0.5


def test_what_is_fixed_has_no_noise(tmp_path: Path) -> None:
    from fedmtl.sharing.plan import SharingPlan

    model = small_model(SINGLE)
    plan = SharingPlan((("embeddings.word*", "fixed"), ("heads.*", "task"), ("*", "all")))
    bound = bind(model, plan=plan)
    before = copied(bound.weights())
    methods = LocalMethods([PrivateGradients(OPTIONS)], release=lambda: Release(SECRET, "a", tmp_path))
    settings = make_settings(SINGLE, **SGD, local_steps=1)
    train(
        bound, {"single": make_shard(SINGLE, tmp_path)}, settings, round_number=1, seed=1, device=CPU, methods=methods
    )
    moved = [key.name for key, value in bound.weights().items() if not torch.equal(value, before[key])]
    assert sorted(moved) == sorted(key.name for key in before if key.scope != "fixed")


@pytest.mark.parametrize("task", [SINGLE, DUAL])
def test_examples_may_be_computed_some_at_a_time(task: Any, tmp_path: Path) -> None:
    _, together, _ = run_step(tmp_path / "1", task, batch_size=11, local_steps=3)
    _, apart, _ = run_step(tmp_path / "2", task, batch_size=11, local_steps=3, options={"examples_at_once": 2})
    for key, value in together.items():
        torch.testing.assert_close(apart[key], value, rtol=1e-9, atol=1e-12)


def test_clipping_to_training_max_grad_norm_is_off(tmp_path: Path) -> None:
    _, free, _ = run_step(tmp_path / "1")
    _, bounded, _ = run_step(tmp_path / "2", max_grad_norm=1e-6)
    assert all(torch.equal(free[key], bounded[key]) for key in free)


@pytest.mark.parametrize("number", [0, 1])
def test_a_lot_may_be_empty_or_one_example(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeyedNoise, "chosen", lambda self, num, chance: torch.arange(number))
    before, after, trained = run_step(tmp_path, local_steps=2)
    assert all(bool(value.isfinite().all()) for value in after.values())
    assert all((after[key] != before[key]).any() for key in after)
    assert ("single" in trained.losses) is bool(number)
    # What was planned, the batches of five and of two that come first, whatever was drawn.
    assert trained.seen == {"single": 7}
    assert trained.sent[NAME].values["released"]["single"]["times"] == 2


def test_weights_of_classes_and_tasks_are_factors(tmp_path: Path) -> None:
    """Of classes before clipping, example by example; of the task afterwards, with the noise."""
    options = {"max_grad_norm": 1e6, "noise_multiplier": 1e-18}
    weighted = make_task("single", pool="pooler", class_weights=(2.0, 2.0))
    before, plain, _ = run_step(tmp_path / "1", options=options, learning_rate=1e-3)
    _, doubled, _ = run_step(tmp_path / "2", weighted, options=options, learning_rate=1e-3)
    for key, value in before.items():
        torch.testing.assert_close(doubled[key] - value, 2 * (plain[key] - value), rtol=1e-6, atol=1e-12)


def test_the_same_job_has_the_same_answer_and_any_other_noise_of_its_own(tmp_path: Path) -> None:
    _, first, _ = run_step(tmp_path)
    _, again, trained = run_step(tmp_path)
    assert all(torch.equal(first[key], again[key]) for key in first)
    release = {"chance": 5 / 12, "noise_multiplier": 0.5, "times": 1}
    assert trained.sent[NAME].values["spent"] == {"single": [release]}
    _, other, trained = run_step(tmp_path, digest="b")
    assert all((first[key] != other[key]).any() for key in first)
    assert trained.sent[NAME].values["spent"] == {"single": [{**release, "times": 2}]}
    assert len(json.loads((tmp_path / "client" / LEDGER).read_text())["single"]) == 2


def test_with_an_epsilon_a_client_makes_no_more_steps_than_its_noise_is_for(tmp_path: Path) -> None:
    # Two rounds of one step each.
    options = {"epsilon": 3.0, "noise_multiplier": None}
    run_step(tmp_path, digest="a", options=options)
    run_step(tmp_path, digest="b", options=options)
    run_step(tmp_path, digest="b", options=options)
    with pytest.raises(PolicyError, match="would make 3 steps in all, and the noise was found for 2") as caught:
        run_step(tmp_path, digest="c", options=options)
    assert (caught.value.code, caught.value.task) == ("privacy_spent", "single")


def test_jobs_of_other_settings_do_not_spend_more_than_epsilon_together(tmp_path: Path) -> None:
    """All of what was for two rounds is spent in two; noise for ten rounds would let eight more pass, to 4.0."""
    options, steps = {"epsilon": 3.0, "noise_multiplier": None}, {"local_steps": 5, "batch_size": 3}
    for digest in ("a", "b"):
        run_step(tmp_path, digest=digest, options=options, num_rounds=2, **steps)
    with pytest.raises(PolicyError, match=r"epsilon 3\.\d+ would be spent, and privacy.example.epsilon is 3") as caught:
        run_step(tmp_path, digest="c", options=options, num_rounds=10, **steps)
    assert caught.value.code == "privacy_spent"


def test_an_epsilon_that_no_noise_reaches_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^single: privacy\.example\.epsilon: found 1e-09, which no") as caught:
        run_step(tmp_path, options={"epsilon": 1e-9, "noise_multiplier": None})
    assert (caught.value.code, caught.value.task) == ("privacy_unreachable", "single")


def test_an_epsilon_that_no_client_of_a_task_reaches_is_refused_before_anything_starts(
    make_config: Callable[..., Config],
) -> None:
    words = (
        r"privacy\.example\.epsilon: found 0\.001, which no noise reaches .* at any client of sentiment: the largest"
    )
    with pytest.raises(ConfigError, match=words):
        prepare(make_config("privacy.example.epsilon=0.001"))


def test_an_epsilon_that_one_client_does_not_reach_is_refused_where_nobody_does() -> None:
    """Among sites, where counts are known when they have come: before the first round alone."""
    from fedmtl.config.privacy import ExamplePrivacyConfig
    from fedmtl.federation.messages import ClientInfo, State
    from fedmtl.methods.example_privacy import check_infos
    from fedmtl.sharing.plan import SharingPlan

    # With one of 10,000 examples in a step noise reaches .01, with all of them in each it does not.
    example = ExamplePrivacyConfig(epsilon=0.01)
    settings = make_settings(make_task("a"), batch_size=10, num_rounds=20, local_epochs=100)
    method = ExamplePrivacy(1e-5, 1.0, 20, partial(check_infos, example, settings))
    infos = {"small": ClientInfo({"a": 10}), "large": ClientInfo({"a": 100_000})}
    state = State(0, {}, SharingPlan(()))
    method.before_round(state, {"small": ("a",), "large": ("a",)}, infos)
    with pytest.raises(ConfigError, match="at any client of a: the largest has 10 examples, and makes 2000 steps"):
        method.before_round(state, {"small": ("a",)}, infos)


@pytest.mark.parametrize("counts_to", [1, 4, 5, 10])
def test_a_ledger_tells_of_the_examples_what_the_rounded_number_tells(tmp_path: Path, counts_to: int) -> None:
    """Twelve examples, declared as 12, 12, 15 and 20: the fewest they may be are 12, 9, 11 and 11, of batches of 5."""
    fewest, declared = {1: (12, 12), 4: (9, 12), 5: (11, 15), 10: (11, 20)}[counts_to]
    _, _, trained = run_step(tmp_path, counts_to=counts_to, local_steps=None, local_epochs=2)
    # Two epochs of three batches, or of the four that twenty examples would be.
    release = {"chance": 5 / fewest, "noise_multiplier": 0.5, "times": 2 * -(-declared // 5)}
    assert trained.sent[NAME].values["spent"] == {"single": [release]}


def test_noise_that_is_found_tells_no_more_than_the_rounded_number(tmp_path: Path) -> None:
    from fedmtl.methods.accounting import noise_for

    options = {"epsilon": 3.0, "noise_multiplier": None}
    _, _, trained = run_step(tmp_path, counts_to=10, options=options, local_steps=None, local_epochs=1)
    # Declared as 20: eleven at least, so a chance of 5/11, .455 with three digits; four steps in each of two rounds.
    assert trained.sent[NAME].values["released"]["single"] == {
        "chance": 5 / 11, "noise_multiplier": noise_for(3.0, 1e-5, 0.455, 8), "times": 4,
    }  # fmt: skip


# Under masks.


def test_under_masks_a_client_sends_no_ledger_and_keeps_it(tmp_path: Path) -> None:
    _, plain, _ = run_step(tmp_path / "1")
    _, masked, trained = run_step(tmp_path / "2", options={"masked": True, "max_sampling_rate": 0.5}, jobs=1)
    assert NAME not in trained.sent
    assert all(torch.equal(plain[key], masked[key]) for key in plain)
    assert len(json.loads((tmp_path / "2/client" / LEDGER).read_text())["single"]) == 1


def test_under_masks_a_client_answers_no_more_jobs_than_the_server_counts(tmp_path: Path) -> None:
    options = {"masked": True, "epsilon": 3.0, "noise_multiplier": None}
    run_step(tmp_path, options=options, jobs=1)
    run_step(tmp_path, options=options, jobs=1)
    with pytest.raises(PolicyError, match=r"answer 2 of this run, .* counts 1; start a new run") as caught:
        run_step(tmp_path, digest="b", options=options, jobs=1)
    assert caught.value.code == "privacy_spent"
    run_step(tmp_path, digest="b", options=options, jobs=2)


def test_under_masks_a_client_that_would_spend_more_than_is_stated_does_not_answer(tmp_path: Path) -> None:
    """An example is in a step with chance 5/12, .417, at this client."""
    run_step(tmp_path / "1", options={"masked": True, "max_sampling_rate": 0.42}, jobs=1)
    with pytest.raises(PolicyError, match=r"max_sampling_rate 0\.41; write a larger one") as caught:
        run_step(tmp_path / "2", options={"masked": True, "max_sampling_rate": 0.41}, jobs=1)
    assert caught.value.code == "privacy_beyond"


def test_a_site_spends_no_more_than_its_policy_allows_over_all_runs(tmp_path: Path) -> None:
    def answer(run: str, digest: str) -> None:
        model = small_model(SINGLE)
        required = {NAME: {"max_epsilon": 8.0, "max_delta": 1e-5}}
        release = Release(SECRET, digest, tmp_path / run / "client", required)
        methods = LocalMethods([PrivateGradients({**OPTIONS, "noise_multiplier": 1.0})], release=lambda: release)
        settings = make_settings(SINGLE, **SGD, local_steps=5)
        shards = {"single": make_shard(SINGLE, tmp_path / "tokens")}
        train(bind(model), shards, settings, round_number=1, seed=1, device=CPU, methods=methods)

    answer("first", "a")
    with pytest.raises(PolicyError, match="over all runs; the policy allows 8") as caught:
        answer("second", "b")
    assert caught.value.code == "privacy_spent"
    answer("first", "a")


def test_a_broken_ledger_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "client").mkdir(parents=True)
    (tmp_path / "client" / LEDGER).write_text('{"single": {"a": {"chance": 2}}}')
    with pytest.raises(FedmtlError, match="does not know what it has released"):
        run_step(tmp_path)


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        # 40 examples in batches of 8 are 5, 20 are 3; two rounds.
        ({"local_epochs": 2}, {"a": 20, "b": 12}),
        ({"local_epochs": 1, "task_schedule": "joint"}, {"a": 10, "b": 10}),
        ({"local_epochs": 1, "task_schedule": "round_robin"}, {"a": 8, "b": 8}),
        # 16 steps of 8 in a pass are twice the 5 and twice the 3, and at most one more each.
        ({"local_steps": 16}, {"a": 22, "b": 14}),
    ],
)
def test_the_steps_of_all_rounds_are_known_beforehand(training: dict[str, Any], expected: dict[str, int]) -> None:
    settings = make_settings(make_task("a"), make_task("b"), batch_size=8, num_rounds=2, **training)
    assert most_steps({"a": 40, "b": 20}, settings) == expected


# Runs.


def digest(run: RunFolder) -> str:
    return next(event["weights_sha256"] for event in reversed(raw_events(run)) if event["event"] == "end")


def ledgers(run: RunFolder) -> list[Any]:
    return [event for event in raw_events(run) if event["event"] == NAME]


def test_epsilon_is_what_googles_accountant_says_of_the_ledger(run_once: Callable[..., RunFolder]) -> None:
    run = run_once(*PRIVATE)
    last = ledgers(run)[-1]
    # Twenty examples a client, batches of 4: five steps a round, each example with chance .2, two rounds.
    for task in ("sentiment", "paraphrase", "similarity"):
        spent = last["tasks"][task]
        assert spent["releases"] == [{"chance": 0.2, "noise_multiplier": 0.8, "times": 10}]
        relation = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
        accountant = dp.pld.PLDAccountant(relation)
        accountant.compose(dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.2, dp.GaussianDpEvent(0.8)), 10))
        assert spent["epsilon"] == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)
        assert spent["accountant"] == "pld"
        assert spent["epsilon"] < spent["epsilon_rdp"]
        assert spent["scopes"] == ["all", f"task:{task}"]
    first = ledgers(run)[0]
    assert first["tasks"]["sentiment"]["accountant"] == "rdp"
    assert first["released"]["sentiment_client_1"]["sentiment"]["times"] == 5
    kept = [json.loads(path.read_text()) for path in sorted(run.clients.glob(f"*/{LEDGER}"))]
    assert [len(entries) for one in kept for entries in one.values()] == 6 * [2]


def test_a_run_says_what_was_spent(run_once: Callable[..., RunFolder]) -> None:
    from fedmtl.export.card import model_card
    from fedmtl.runs.log import read_events

    run = run_once(*PRIVATE)
    lines = privacy_lines(read_events(run))
    epsilon = ledgers(run)[-1]["tasks"]["sentiment"]["epsilon"]
    said, _, rest = lines[0].partition(": epsilon ")[2].partition(" at delta 1e-05 by ")
    assert 0 <= float(said) - epsilon < 0.01
    assert rest.startswith("privacy loss distributions (paraphrase, sentiment, similarity); for one example")
    assert lines[1] == NOT_COVERED
    page = run.report.read_text()
    assert "one example of one task at one client" in page
    assert "not covered: training losses" in page
    assert "one example of one task at one client" in model_card(run, "usage")


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_any_number_of_workers_gives_the_same_bits(
    workers: int, make_config: Callable[..., Config], run_once: Callable[..., RunFolder]
) -> None:
    run = start_run(make_config(*PRIVATE, f"compute.workers={workers}"), "workers")
    assert digest(run) == digest(run_once(*PRIVATE))
    assert ledgers(run)[-1]["tasks"] == ledgers(run_once(*PRIVATE))[-1]["tasks"]


@pytest.mark.parametrize(
    ("where", "at"),
    [
        ("fedmtl.engines.local.encode_update", 9),
        pytest.param("fedmtl.federation.checkpoint.write_atomic", 2, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_has_the_ledger_and_the_weights_of_the_undisturbed_one(
    where: str,
    at: int,
    make_config: Callable[..., Config],
    run_once: Callable[..., RunFolder],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sys

    class Killed(BaseException):
        pass

    module, attribute = where.rsplit(".", 1)
    original, calls = getattr(sys.modules[module], attribute), iter(range(100))

    def dying(*given: Any, **named: Any) -> Any:
        if next(calls) == at:
            raise Killed
        return original(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(where, dying)
        with pytest.raises(Killed):
            start_run(make_config(*PRIVATE), "killed")
    killed = RunFolder(Path(make_config().output) / "killed")
    resumed, whole = resume_run(killed), run_once(*PRIVATE)
    assert digest(resumed) == digest(whole)
    assert [event["tasks"] for event in ledgers(resumed)] == [event["tasks"] for event in ledgers(whole)]
    for path in whole.clients.glob(f"*/{LEDGER}"):
        assert (resumed.clients / path.parent.name / LEDGER).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    "overrides",
    [
        ("training.proximal=0.1",),
        ("methods.scaffold={}",),
        pytest.param(("training.pruning={amount: 0.5, rounds: 1}",), marks=pytest.mark.slow),
        pytest.param(("wire.up=int8",), marks=pytest.mark.slow),
        pytest.param(("federation.server_optimizer.kind=fedadam",), marks=pytest.mark.slow),
        pytest.param(("sharing.rules=[{'heads.*': client}, {'*': all}]",), marks=pytest.mark.slow),
        pytest.param(
            ("sharing.rules=[{'embeddings.*': fixed}, {'heads.*': task}, {'*': all}]",), marks=pytest.mark.slow
        ),
        pytest.param(("training.keep_optimizer=true",), marks=pytest.mark.slow),
        ("model.lora={rank: 2}",),
        ("training.optimizer=sgd", "federation.clients_per_round=3"),
        pytest.param(
            ("sharing.adaptive={warmup_rounds: 0, patience: 1}", "tasks.sentiment.patience=1"), marks=pytest.mark.slow
        ),
        ("federation.task_weighting.kind=progress", "federation.aggregation=clipped_mean", "wire.up=topk"),
        ("mode=centralized",),
        ("mode=centralized", "training.task_schedule=joint", "training.gradients=pcgrad"),
    ],
)
def test_it_goes_together_with(overrides: tuple[str, ...], make_config: Callable[..., Config]) -> None:
    run = start_run(make_config(*PRIVATE, "training.num_rounds=1", *overrides), "both")
    events = raw_events(run)
    assert events[-1]["status"] == "done"
    assert not any(event["event"] == "failure" for event in events)
    assert all(one["epsilon"] > 0 for one in ledgers(run)[-1]["tasks"].values())


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.windows={}", "model.windows"),
        ("training.smart={}", "training.smart"),
        ("training.loss_weighting=uncertainty", "training.loss_weighting"),
        ("training.logit_adjustment=1", "training.logit_adjustment"),
        ("training.task_schedule=random", "training.task_schedule"),
        ("federation.vocabulary_slices=true", "federation.vocabulary_slices"),
        ("tasks.sentiment.class_weights=balanced", "tasks.sentiment.class_weights"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(
    override: str, key: str, make_config: Callable[..., Config]
) -> None:
    with pytest.raises(ConfigError, match=f"{key}: found with privacy.example; .*(write|clipped|leave it)"):
        prepare(make_config(*PRIVATE, override))


def test_token_rows_are_not_told_unless_somebody_asks_for_it(make_config: Callable[..., Config]) -> None:
    assert make_config().federation.vocabulary_slices is True
    assert make_config(*PRIVATE).federation.vocabulary_slices is False


def test_a_policy_may_require_it(make_config: Callable[..., Config]) -> None:
    policy = Policy.model_validate({"require": {"example_privacy": {"max_epsilon": 3}}})
    assert "has none" in (unprotected(policy, make_config()) or "")
    assert unprotected(policy, make_config("privacy.example.epsilon=3")) is None
    assert "epsilon 4 and delta 1e-05" in (unprotected(policy, make_config("privacy.example.epsilon=4")) or "")
    loose = make_config("privacy.example.epsilon=3", "privacy.example.delta=1e-3")
    assert "allows 3 and 1e-05" in (unprotected(policy, loose) or "")
    assert unprotected(Policy(), make_config()) is None


# The server's half.

ONE = {"chance": 0.5, "noise_multiplier": 1.0, "times": 4}
SENT = {"spent": {"a": [ONE]}, "released": {"a": ONE}, "scopes": {"a": ["all"]}}


@pytest.mark.parametrize(
    "changes",
    [
        {"spent": {"a": [{**ONE, "chance": 0.0}]}},
        {"spent": {"a": [{**ONE, "times": 3}]}},
        {"spent": {"a": [{**ONE, "noise_multiplier": float("inf")}]}},
        {"spent": {"a": []}},
        {"released": {"a": {**ONE, "noise_multiplier": 2.0}}},
        {"released": {}},
        {"scopes": {"a": [3]}},
        {"more": {}},
    ],
)
def test_a_ledger_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    def reason(values: Any) -> str | None:
        try:
            return CAPABILITY.check_sent(Extra(values), ["a"], {"noise_multiplier": 1.0})
        except Exception as error:
            return type(error).__name__

    assert reason(SENT) is None
    assert reason({**SENT, **changes}) is not None


@pytest.mark.parametrize(
    "changes", [{"noise_multiplier": 1e-300}, {"noise_multiplier": 1e300}, {"chance": 5e-324}, {"times": 10**9}]
)
def test_a_ledger_that_no_accountant_takes_costs_its_client_alone(changes: dict[str, Any]) -> None:
    """The first two ended the server's round with a division by zero and an overflow, the last one took hours."""
    strange = {**ONE, **changes}
    sent = {**SENT, "spent": {"a": [strange]}, "released": {"a": strange}}
    with pytest.raises(ValueError, match=r"no client has such|not in the ledger"):
        CAPABILITY.check_sent(Extra(sent), ["a"], {"noise_multiplier": None})
    allowed = [
        Releases(1e-9, 1e-100, 10**7),
        Releases(1.0, 1e-100, 10**7),
        Releases(1e-9, 1e4, 1),
        Releases(0.9, 0.1, 1),
    ]
    assert all(0 <= spent([one], 1e-5).epsilon < float("inf") for one in allowed)


def test_a_job_without_an_accepted_update_counts_as_done() -> None:
    from fedmtl.federation.messages import State
    from fedmtl.sharing.plan import SharingPlan

    method = ExamplePrivacy(1e-5, 1.0, num_rounds=4)
    state = State(0, {}, SharingPlan(()))

    def play(round_number: int, *accepted: str) -> None:
        nonlocal state
        method.before_round(state, {"c": ("a",), "d": ("a",)}, {})
        for client in accepted:
            times = 4 * round_number
            sent = {**SENT, "spent": {"a": [{**ONE, "times": times}]}}
            method.add(Update(round_number, client, ("a",), {}, None, {"a": 1}, {}, extra={NAME: Extra(sent)}))
        state = method.after_aggregation(state, replace(state, round=round_number)).state
        method.check(state.extra[NAME])

    def spending() -> Any:
        return method.report(state)[0].tasks["a"]  # type: ignore[attr-defined]

    play(1, "c")
    assert (spending().client, spending().unconfirmed, spending().unknown) == ("c", 1, 1)
    play(2, "d")
    # c: four steps that it told of, and four more that it may have made. d tells of all eight.
    assert [one.times for one in spending().releases] == [8]
    assert (spending().unconfirmed, spending().unknown) == (1, 0)
    play(3, "c", "d")
    assert [one.times for one in spending().releases] == [12]
    assert spending().unconfirmed == 0

"""Client-level noise that clients add under masks: each part by hand, the sum's noise, the ledger, and whole runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmtl.config import Config
from fedmtl.config.privacy import ClientPrivacyConfig
from fedmtl.errors import ConfigError, PolicyError
from fedmtl.experiment.prepare import open_engine, prepare
from fedmtl.experiment.run import start_run
from fedmtl.federation.checkpoint import load_checkpoint
from fedmtl.federation.filters.protocol import FilterClient
from fedmtl.federation.messages import Failure, Job, State, Update
from fedmtl.methods.accounting import Releases, noise_for, spent
from fedmtl.methods.client_noise import (
    NAME,
    NoiseAtClients,
    NoisePart,
    OpenedSums,
    deviation_of,
    most_rounds,
)
from fedmtl.methods.masking import FixedPoint
from fedmtl.methods.secure_protocol import NAME as MASKS
from fedmtl.methods.secure_protocol import Advert, Options, SharedNoise, fewest, members, minimum
from fedmtl.runs.folder import RunFolder
from fedmtl.sharing.plan import NO_EXTRA, Extra, Key, SharingPlan
from fedmtl.training.local_method import Release
from masked_runs import digest, killed_and_resumed, of_kind

MASKED = (
    "privacy.secure_aggregation={}", "federation.vocabulary_slices=false", "federation.clients_per_task=4",
    "federation.average=uniform",
)  # fmt: skip
NOISE = "privacy.client={noise_multiplier: 0.7, max_norm: 0.5, noise_at: clients}"
ENCODER, HEAD = Key("all", "layer"), Key("task:a", "heads.a.w")
PLAN = SharingPlan((("heads.*", "task"), ("*", "all")))


def shared(**changes: Any) -> SharedNoise:
    plain = {"max_norm": 2.0, "bound": "together", "delta": 1e-5, "noise_multiplier": 0.5, **changes}
    return SharedNoise.model_validate(plain)


def part(
    folder: Path,
    given: SharedNoise,
    *,
    client: str = "a",
    multiplier: float = 0.5,
    session: str | None = None,
    required: dict[str, Any] | None = None,
) -> NoisePart:
    extra = {NAME: Extra({"noise_multiplier": multiplier})}
    job = Job("train", 1, client, ("a",), {}, PLAN, None, 0, 0, {}, extra=extra)
    release = Release(b"secret of " + client.encode(), f"digest of {client}", folder / client, required or {})
    return NoisePart(given, FilterClient(job, NO_EXTRA, "", folder / client, {}, lambda: release), session)


def update(*values: torch.Tensor) -> Update:
    return Update(1, "a", ("a",), dict(zip((ENCODER, HEAD), values, strict=False)), None, {"a": 1}, {})


# What a client adds --------------------------------------------------------------------------------------------------


def test_the_parts_of_the_fewest_clients_less_one_are_all_the_noise(tmp_path: Path) -> None:
    """Five parts for a bound of 2 and a multiplier of .5, of sums of six or more: five have a deviation of 1."""
    numbers = FixedPoint(64, 2.0, 8, headroom=8.0)
    total = np.zeros(200_000, np.uint64)
    for client in "abcde":
        part(tmp_path, shared(), client=client).add("all", 6, numbers, total)
    noise = total.view(np.int64) * numbers.step
    # Of so many numbers the deviation's standard error is 1/632, and the mean's 1/447.
    assert noise.std() == pytest.approx(1.0, abs=5 / 632)
    assert noise.mean() == pytest.approx(0.0, abs=5 / 447)
    assert deviation_of(shared(), 0.5, 6) == pytest.approx(1 / math.sqrt(5))


def test_noise_is_of_the_client_the_scope_and_the_session(tmp_path: Path) -> None:
    def drawn(client: str = "a", scope: str = "all", session: str | None = None) -> list[int]:
        into = np.zeros(50, np.uint64)
        part(tmp_path, shared(), client=client, session=session).add(scope, 3, FixedPoint(64, 2.0, 3, 8.0), into)
        return into.tolist()

    assert drawn() == drawn()
    kinds = [drawn(), drawn(client="b"), drawn(scope="task:a"), drawn(session="s1"), drawn(session="s2")]
    assert len({tuple(kind) for kind in kinds}) == 5


@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=40), st.integers(8, 20))
@settings(max_examples=80, deadline=None)
def test_the_norm_is_within_the_bound_after_rounding(entries: list[float], exponent: int) -> None:
    """A step of 2**-8 to 2**-20, which values of up to 2**22 leave, so that rounding is large enough to show."""
    numbers = FixedPoint(32, 2.0 ** (30 - exponent) / 3, 3)
    given_noise = shared(max_norm=2.0)
    values = torch.tensor(entries)
    folder = Path("/nowhere")
    if numbers.step / 2 * math.sqrt(len(entries)) > 0.02:
        with pytest.raises(PolicyError, match=r"write privacy.secure_aggregation.bits: 64"):
            part(folder, given_noise).clipped(update(values), numbers)
        return
    clipped = part(folder, given_noise).clipped(update(values), numbers)
    into = np.empty(len(entries), np.uint32)
    numbers.encode(clipped.delta[ENCODER].numpy(), 1.0, into)
    norm = np.linalg.norm(into.view(np.int32) * numbers.step)
    assert norm <= 2.0
    if float(values.norm()) > 2.0:
        assert norm >= 2.0 * 0.97


def test_noise_in_too_few_steps_is_refused(tmp_path: Path) -> None:
    # Parts of deviation 2 * .5 / sqrt(2) = .707; a step of a sixteenth of that is .044.
    into = np.zeros(3, np.uint32)
    part(tmp_path, shared()).add("all", 3, FixedPoint(32, 2.0**25, 1), into)
    with pytest.raises(PolicyError, match=r"too coarse; write privacy.secure_aggregation.bits: 64"):
        part(tmp_path, shared()).add("all", 3, FixedPoint(32, 2.0**28, 1), into)


def test_less_noise_than_the_config_says_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="the job's noise is not that of the config"):
        part(tmp_path, shared(), multiplier=0.49)
    with pytest.raises(PolicyError, match="the job's noise is not that of the config"):
        part(tmp_path, shared(), multiplier=0.0)


def test_a_client_spends_no_more_than_epsilon_and_counts_a_session_once(tmp_path: Path) -> None:
    noise = noise_for(3.0, 1e-5, 1.0, 2)
    given_noise = shared(epsilon=3.0, noise_multiplier=None)
    for session in ("s1", "s1", "s2"):
        part(tmp_path, given_noise, multiplier=noise, session=session).count()
    with pytest.raises(PolicyError, match=r"would have spent epsilon .*, and privacy.client.epsilon is 3"):
        part(tmp_path, given_noise, multiplier=noise, session="s3").count()


def test_a_policy_holds_over_all_runs_of_a_site(tmp_path: Path) -> None:
    """Two releases of one run and one of another: the policy allows three."""
    exact = [spent([Releases(1.0, 2.0, times)], 1e-5).epsilon for times in (3, 4)]
    required = {NAME: {"max_epsilon": sum(exact) / 2, "max_delta": 1e-5}}
    for run, context in (("one", "s1"), ("one", "s1"), ("one", "s2"), ("two", "s1")):
        part(tmp_path / run, shared(), multiplier=2.0, session=context, required=required).count()
    with pytest.raises(PolicyError, match=r"over all runs; the policy .* \(require.client_privacy.max_epsilon\)"):
        part(tmp_path / "three", shared(), multiplier=2.0, session="s1", required=required).count()
    part(tmp_path / "three", shared(), multiplier=2.0, session="s1").count()


def test_the_fewest_clients_of_a_sum_follow_from_the_threshold_and_who_has_it() -> None:
    options = Options.model_validate(
        {"bits": 32, "max_value": 1.0, "threshold": 2 / 3, "min_clients": 3, "average": "uniform", "max_norm": None}
    )

    def advert(*sums: str, least: int = 3) -> Advert:
        return Advert(cipher_key="0" * 64, mask_key="0" * 64, sums=sorted(sums), min_clients=least)

    # Twelve clients, of whom eight must stay: of everybody's sum eight, of one that ten have six, of four's three.
    roster = {
        f"c{number}": advert("all", *(["ten"] * (number < 10)), *(["four"] * (number < 4))) for number in range(12)
    }
    assert [fewest(name, roster, options) for name in ("all", "ten", "four")] == [8, 6, 3]
    roster["c0"] = advert("all", "ten", "four", least=4)
    assert fewest("four", roster, options) == 4


@given(st.lists(st.sets(st.sampled_from(["x", "y"])), min_size=3, max_size=9), st.data())
@settings(max_examples=100, deadline=None)
def test_no_sum_that_opens_is_of_fewer(kinds: list[set[str]], data: st.DataObject) -> None:
    """Whoever drops out: clients open a sum of `min_clients` members at least, when the threshold's number returned."""
    options = Options.model_validate(
        {"bits": 32, "max_value": 1.0, "threshold": 2 / 3, "min_clients": 2, "average": "uniform", "max_norm": None}
    )
    roster = {
        f"c{number}": Advert(cipher_key="0" * 64, mask_key="0" * 64, sums=sorted({"all", *sums}), min_clients=2)
        for number, sums in enumerate(kinds)
    }
    returned = data.draw(st.sets(st.sampled_from(sorted(roster)), min_size=options.needed(len(roster))))
    for name in ("all", "x", "y"):
        there = members(name, returned, roster)
        if len(there) >= minimum(name, roster, options.min_clients):
            assert len(there) >= fewest(name, roster, options)


def test_whole_numbers_of_all_clients_and_their_noise_do_not_wrap() -> None:
    options = Options.model_validate(
        {
            "bits": 32, "max_value": 1.0, "threshold": 2 / 3, "min_clients": 3, "average": "uniform", "max_norm": None,
            "noise": shared().model_dump(),
        }
    )  # fmt: skip
    numbers = options.numbers(10, 0.5)
    # An entry is 1 at most, a part of noise 6.7 deviations of 2 * .5 / sqrt(2) each.
    most = 10 * (1.0 + 6.7 * 2 * 0.5 / math.sqrt(2))
    assert most <= 2**31 * numbers.step < 4 * most


# The server's half ---------------------------------------------------------------------------------------------------


def test_the_mean_is_the_opened_sum_over_the_expected_number() -> None:
    combined = replace(
        update(torch.tensor([0.5]), torch.tensor([2.0])), extra={MASKS: Extra({"fewest": {"all": 8, "task:a": 3}})}
    )
    sums = OpenedSums({ENCODER: 10.0, HEAD: 5.0})
    # Means of twelve and of four clients: sums of 6 and 8.
    sums.add(combined, {"all": 12.0, "task:a": 4.0})
    found = sums.result()
    assert (float(found[ENCODER]), float(found[HEAD])) == (pytest.approx(0.6), pytest.approx(1.6))
    # Less one: 11 of 7 parts, and 3 of 2, which is less.
    assert sums.strength == pytest.approx(math.sqrt(3 / 2))


def test_the_ledger_has_the_rounds_whose_sums_were_opened_with_the_noise_that_was_in_them() -> None:
    given_settings = ClientPrivacyConfig(noise_multiplier=0.8, max_norm=1.0, noise_at="clients", sampling_rate=0.5)
    method = NoiseAtClients(given_settings, ("layer", "heads.a.w"), 3)
    state = method.start(State(0, {ENCODER: torch.zeros(1), HEAD: torch.zeros(1)}, PLAN)).state
    everybody = dict.fromkeys("abcdefgh", ("a",))

    def play(returned: str, *, of: int | None) -> None:
        nonlocal state
        method.sample(everybody, state.round + 1)
        method.before_round(state, dict.fromkeys(returned, ("a",)), {})
        extra = {MASKS: Extra({"fewest": {"all": 3}})}
        if of is not None:
            method._opened.add(replace(update(torch.ones(1)), extra=extra), {"all": float(of)})
        after = replace(state, round=state.round + 1)
        after = replace(after, accepted={**state.accepted, **dict.fromkeys(returned, after.round)})
        state = method.after_aggregation(state, after).state
        method.check(state.extra[NAME])

    play("abc", of=3)
    play("abcde", of=5)
    play("", of=None)
    (event,) = method.report(state)
    # a was in both: once with the noise of two others of the two that there must be, once of four: .8 and 1.131.
    done = [Releases(1.0, 0.8, 1), Releases(1.0, 1.13, 1)]
    assert event.releases == [one.to_dict() for one in done]  # type: ignore[attr-defined]
    assert event.epsilon == spent(done, 1e-5).epsilon  # type: ignore[attr-defined]
    assert event.details["clients"] == 5  # type: ignore[attr-defined]


def test_a_client_is_drawn_so_often_at_most() -> None:
    assert most_rounds(1.0, 30) == 30
    # Of 100 rounds with chance .1 ten are expected, with a deviation of 3: 26 are five of them more.
    found = most_rounds(0.1, 100)
    tail = sum(math.comb(100, number) * 0.1**number * 0.9 ** (100 - number) for number in range(found + 1, 101))
    assert tail <= 1e-6 < tail + math.comb(100, found) * 0.1**found * 0.9 ** (100 - found)


# Runs ----------------------------------------------------------------------------------------------------------------


def test_a_run_has_its_noise_and_says_for_whom(run_once: Callable[..., RunFolder]) -> None:
    run = run_once(*MASKED, NOISE)
    assert not of_kind(run, "failure")
    last = of_kind(run, "privacy")[-1]
    # A head's four clients, three of whom there must be: .7 * sqrt(3 / 2). The encoder's twelve, of eight, have more.
    assert last["releases"] == [{"chance": 1.0, "noise_multiplier": 0.857, "times": 2}]
    assert last["epsilon"] == pytest.approx(spent([Releases(1.0, 0.857, 2)], 1e-5).epsilon)
    assert "for the server, other clients one by one" in run.report.read_text()
    weights = load_checkpoint(run.checkpoints).weights
    before = prepare(load(run)).state.weights
    # Noise of .7 * .5 / sqrt(7) for each of twelve, over twelve, twice; clipped updates of .5 hardly count beside it.
    key = max((key for key in weights if key.scope == "all"), key=lambda key: weights[key].numel())
    moved = (weights[key] - before[key]).std()
    assert float(moved) == pytest.approx(0.35 / math.sqrt(7) / math.sqrt(12) * math.sqrt(2), rel=0.1)


def load(run: RunFolder) -> Config:
    from fedmtl.config.file import load_config

    return load_config(run.config)


@pytest.mark.slow
def test_any_number_of_workers_gives_the_same_bits(
    make_config: Callable[..., Config], run_once: Callable[..., RunFolder]
) -> None:
    run = start_run(make_config(*MASKED, NOISE, "compute.workers=2"), "two")
    assert digest(run) == digest(run_once(*MASKED, NOISE))


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_weights_and_ledger(
    make_config: Callable[..., Config], run_once: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed, whole = killed_and_resumed(make_config(*MASKED, NOISE), monkeypatch), run_once(*MASKED, NOISE)
    assert digest(resumed) == digest(whole)
    assert of_kind(resumed, "privacy")[-1]["releases"] == of_kind(whole, "privacy")[-1]["releases"]


class Losing:
    """An engine that loses the updates of some clients."""

    def __init__(self, engine: Any, lost: tuple[str, ...]) -> None:
        self._engine, self._lost = engine, lost

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run(self, jobs: Any, deadline: float) -> Any:
        kept, lost = [], []
        for job in jobs:
            (lost if job.kind == "train" and job.client in self._lost else kept).append(job)
        yield from self._engine.run(kept, deadline)
        yield from (Failure(job.round, job.client, "lost") for job in lost)


def test_where_clients_drop_out_the_noise_of_the_others_is_enough(make_config: Callable[..., Config]) -> None:
    lost = ("sentiment_client_1", "paraphrase_client_1", "similarity_client_1")
    config = make_config(*MASKED, NOISE, "training.num_rounds=1")
    run = start_run(config, "few", make_engine=lambda *given: Losing(open_engine(*given), lost))
    last = of_kind(run, "privacy")[-1]
    # Three of a head's clients are left, which is the fewest: all that the noise was made for, and no more.
    assert last["releases"] == [{"chance": 1.0, "noise_multiplier": 0.7, "times": 1}]
    assert last["details"]["clients"] == 9
    weights, before = load_checkpoint(run.checkpoints).weights, prepare(config).state.weights
    key = max((key for key in weights if key.scope == "all"), key=lambda key: weights[key].numel())
    # Nine parts of .35 / sqrt(7), over twelve.
    assert float((weights[key] - before[key]).std()) == pytest.approx(0.35 * 3 / math.sqrt(7) / 12, rel=0.1)


def test_a_sample_that_is_too_small_for_a_sum_is_sent_nothing(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = {1: ["sentiment_client_1", "sentiment_client_2", "similarity_client_1"], 2: ["similarity_client_2"]}
    draw = NoiseAtClients.sample

    def sample(self: NoiseAtClients, candidates: Any, number: int) -> list[str]:
        draw(self, candidates, number)
        return drawn[number]

    monkeypatch.setattr(NoiseAtClients, "sample", sample)
    run = start_run(make_config(*MASKED, NOISE), "small")
    assert of_kind(run, "end")[-1]["status"] == "done"
    (opened,) = of_kind(run, "secure_aggregation")
    assert opened["opened"] == {"all": 3}
    (remark,) = of_kind(run, "remark")
    assert remark["reason"].startswith("1 clients were drawn, of whom 1 share a value, and a sum is of 3 at least")
    # The round without a sum is no release.
    assert of_kind(run, "privacy")[-1]["releases"] == [{"chance": 1.0, "noise_multiplier": 0.7, "times": 1}]
    assert [event["clients"] for event in of_kind(run, "round")] == [0, 3, 0]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["privacy.client={noise_multiplier: 1}"], "privacy.client.noise_at: found server with privacy.secure_aggr"),
        (
            ["privacy.client={noise_multiplier: 1, noise_at: clients}", "privacy.secure_aggregation=null"],
            "privacy.client.noise_at: found with privacy.client clients, whose parts of the noise hide nothing",
        ),
        (
            ["privacy.client={noise_multiplier: 1, noise_at: clients, adaptive_clipping: {}}"],
            "privacy.client.adaptive_clipping: found with privacy.client and noise_at: clients",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(
    overrides: list[str], words: str, make_config: Callable[..., Config]
) -> None:
    with pytest.raises(ConfigError, match=words):
        prepare(make_config(*MASKED, *overrides))


def test_poisson_samples_epsilon_and_server_optimizers_go_on_to_work(make_config: Callable[..., Config]) -> None:
    config = make_config(
        *MASKED,
        "privacy.client={epsilon: 8, max_norm: 0.5, noise_at: clients, sampling_rate: 0.7, bound: by_scope}",
        "federation.server_optimizer.kind=fedavgm",
    )
    run = start_run(config, "poisson")
    assert not of_kind(run, "failure")
    last = of_kind(run, "privacy")[-1]
    assert 0 < last["epsilon"] <= 8
    assert all(one["chance"] == 1.0 for one in last["releases"])

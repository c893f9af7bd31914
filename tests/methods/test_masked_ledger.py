"""Noise on gradients under masks: the bound that is stated, who counts what, and whole runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmtl.config import Config
from fedmtl.config.privacy import ExamplePrivacyConfig
from fedmtl.errors import ConfigError
from fedmtl.experiment.run import start_run
from fedmtl.federation.messages import State
from fedmtl.methods.accounting import Releases, most_spent
from fedmtl.methods.masked_ledger import NAME, MaskedExamplePrivacy, agreed
from fedmtl.runs.events import ReleaseFacts
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events
from fedmtl.runs.privacy import privacy_lines
from fedmtl.sharing.plan import SharingPlan
from masked_runs import digest, killed_and_resumed, of_kind
from training.small_client import make_settings, make_task

MASKED = (
    "privacy.secure_aggregation={}", "federation.vocabulary_slices=false", "federation.clients_per_task=4",
    "training.local_epochs=1", "training.batch_size=4",
)  # fmt: skip
NOISE = "privacy.example={noise_multiplier: 0.8, max_sampling_rate: 0.4}"
PLAN = SharingPlan((("heads.*", "task"), ("*", "all")))


@given(st.floats(0.004, 1.0), st.floats(1.0, 50.0), st.integers(1, 3), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_no_client_of_a_smaller_chance_spends_more(rate: float, times_more: float, epochs: int, jobs: int) -> None:
    """Of a batch of 32: so many examples that the chance is `rate` at most, in epochs or in steps."""
    of_epochs = make_settings(make_task("a"), batch_size=32, local_epochs=epochs)
    number = math.ceil(32 / rate * times_more)
    client = Releases(min(1.0, 32 / number), 0.8, epochs * -(-number // 32) * jobs)
    assert most_spent([client], 1e-5) <= most_spent([agreed(rate, 0.8, of_epochs, jobs)], 1e-5) * (1 + 1e-9)
    of_steps = make_settings(make_task("a"), batch_size=32, local_steps=7)
    assert agreed(rate, 0.8, of_steps, jobs) == Releases(rate, 0.8, 7 * jobs)


def test_the_server_counts_jobs_and_answers_and_states_what_the_most_jobs_come_to() -> None:
    example = ExamplePrivacyConfig(noise_multiplier=0.8, max_sampling_rate=0.25)
    method = MaskedExamplePrivacy(example, make_settings(make_task("a"), local_epochs=1), ("layer", "heads.a.w"))
    state = State(0, {}, PLAN)
    sent = []

    def play(sampled: tuple[str, ...], *accepted: str) -> None:
        nonlocal state
        given = method.before_round(state, dict.fromkeys(sampled, ("a",)), {})
        sent.append(given.extra.values["jobs"])
        after = replace(state, round=state.round + 1)
        after = replace(after, accepted={**state.accepted, **dict.fromkeys(accepted, after.round)})
        state = method.after_aggregation(state, after).state
        method.check(state.extra[NAME])

    play(("c", "d"), "c", "d")
    play(("c",))
    play(("c", "d", "e"), "c", "d")
    # c was sent three jobs, d two, e one; no job says more than the most that its client may have had.
    assert sent == [{"a": 1}, {"a": 2}, {"a": 3}]
    # What is stated afterwards is never less than what its clients were let do.
    assert method.before_round(state, {"e": ("a",)}, {}).extra.values["jobs"] == {"a": 2}
    (event,) = method.report(state)
    found = event.tasks["a"]  # type: ignore[attr-defined]
    assert (found.jobs, found.unconfirmed, found.unknown, found.clients) == (3, 2, 1, 3)
    # Four batches an epoch and one for the last: five steps a job.
    bound = Releases(0.25, 0.8, 15)
    assert found.epsilon == most_spent([bound], 1e-5)
    assert found.releases == [ReleaseFacts(**bound.to_dict())]
    assert (found.client, found.accountant, found.scopes) == ("", "rdp", ["all", "task:a"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("privacy.example.noise_multiplier=1", "privacy.example.max_sampling_rate: found nothing, and under"),
        ("privacy.example={epsilon: 3, max_sampling_rate: 0.1}", "max_sampling_rate: found with epsilon"),
    ],
)
def test_what_cannot_be_stated_is_refused_by_name(
    override: str, words: str, make_config: Callable[..., Config]
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_config(*MASKED, override)


def test_without_masks_a_chance_is_counted_as_it_is(make_config: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match=r"max_sampling_rate: found 0.4 without privacy.secure_aggregation"):
        make_config(NOISE)


def test_a_run_has_noise_and_masks_and_names_no_client(run_once: Callable[..., RunFolder]) -> None:
    run = run_once(*MASKED, NOISE)
    assert not of_kind(run, "failure")
    last = of_kind(run, NAME)[-1]
    # Ten examples in batches of four: a chance of .4, three steps an epoch, and one more in the bound; two rounds.
    bound = {"chance": 0.4, "noise_multiplier": 0.8, "times": 8}
    assert {task: one["releases"] for task, one in last["tasks"].items()} == {task: [bound] for task in last["tasks"]}
    assert all(one["client"] == "" and one["jobs"] == 2 for one in last["tasks"].values())
    assert last["released"] == {}
    lines = privacy_lines(read_events(run))
    assert "each checked its own ledger before it answered one of at most 2 jobs" in " ".join(lines)
    assert "each checked its own ledger" in run.report.read_text()
    assert of_kind(run, "secure_aggregation")[-1]["opened"]["all"] == 12


def test_with_an_epsilon_that_is_what_is_stated(run_once: Callable[..., RunFolder]) -> None:
    run = run_once(*MASKED, "privacy.example.epsilon=6")
    assert not of_kind(run, "failure")
    last = of_kind(run, NAME)[-1]
    assert all(
        (one["epsilon"], one["accountant"], one["releases"]) == (6, "bound", []) for one in last["tasks"].values()
    )
    assert "at most epsilon 6 at delta 1e-05 by the config's bound" in privacy_lines(read_events(run))[0]


@pytest.mark.slow
def test_any_number_of_workers_gives_the_same_bits(
    make_config: Callable[..., Config], run_once: Callable[..., RunFolder]
) -> None:
    run = start_run(make_config(*MASKED, NOISE, "compute.workers=2"), "two")
    assert digest(run) == digest(run_once(*MASKED, NOISE))


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_weights_and_counts(
    make_config: Callable[..., Config], run_once: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed, whole = killed_and_resumed(make_config(*MASKED, NOISE), monkeypatch), run_once(*MASKED, NOISE)
    assert digest(resumed) == digest(whole)
    assert [event["tasks"] for event in of_kind(resumed, NAME)] == [event["tasks"] for event in of_kind(whole, NAME)]


def test_clients_that_would_spend_more_fail_alone_and_say_why(make_config: Callable[..., Config]) -> None:
    """Of sentiment a client has ten examples, in a step with chance .4; of the other tasks twenty, and .2."""
    config = make_config(
        *MASKED,
        "privacy.example={noise_multiplier: 0.8, max_sampling_rate: 0.2}",
        *(f"tasks.{task}.train_samples=80" for task in ("paraphrase", "similarity")),
        "training.num_rounds=1",
    )
    run = start_run(config, "small")
    failures = of_kind(run, "failure")
    assert {one["client"] for one in failures} == {f"sentiment_client_{number}" for number in range(1, 5)}
    assert all("sentiment: with this job, epsilon" in one["reason"] for one in failures)
    (event,) = of_kind(run, "secure_aggregation")
    assert event["returned"] == 8
    assert of_kind(run, NAME)[-1]["tasks"]["sentiment"]["unknown"] == 4


def test_clients_at_once_hold_their_ledgers_to_the_same_bound(make_config: Callable[..., Config]) -> None:
    run = start_run(make_config(*MASKED, NOISE, "training.num_rounds=1", "compute.stack=4"), "stacked")
    assert of_kind(run, "start")[0]["stack"] == 4
    assert not of_kind(run, "failure")
    assert {one["jobs"] for one in of_kind(run, NAME)[-1]["tasks"].values()} == {1}

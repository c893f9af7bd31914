"""Client-level differential privacy: the mechanism by hand, its sensitivity, its noise, its ledger, and whole runs."""

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import dp_accounting as dp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.fake_engine import ENCODER, PLAN, FakeEngine, head, make_server, scores, start, trained
from fedmtl.capabilities import Capability, find, register, unprotected
from fedmtl.config.file import explained_config, load_config
from fedmtl.config.privacy import AdaptiveClippingConfig, ClientPrivacyConfig
from fedmtl.errors import ConfigError, FedmtlError, PolicyError
from fedmtl.experiment import run as driver
from fedmtl.experiment.prepare import prepare
from fedmtl.experiment.run import resume_run, start_run
from fedmtl.export.card import model_card
from fedmtl.federation.checkpoint import load_checkpoint
from fedmtl.federation.filters.protocol import FilterClient
from fedmtl.federation.messages import ClientInfo, Failure, Job, Update
from fedmtl.federation.policy import Policy
from fedmtl.federation.server import RoundFailed, rounds
from fedmtl.methods.accounting import Releases, spent
from fedmtl.methods.client_privacy import (
    MAX_NORM,
    NAME,
    NOISE,
    RELEASES,
    ClientPrivacy,
    ClippedUpdate,
    Noise,
    NoisySum,
    clip_factors,
    expected_returns,
    scope_norms,
)
from fedmtl.methods.noise import KeyedNoise, derive_key
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events
from fedmtl.runs.summary import run_status
from fedmtl.runs.verdicts import verdicts
from fedmtl.sharing.plan import NO_EXTRA, Extra, Key, SharingPlan
from raw_events import raw_events

ON = (
    "federation.average=uniform",
    "federation.vocabulary_slices=false",
    "privacy.client={noise_multiplier: 0.7, max_norm: 0.5, sampling_rate: 0.6, delta: 1e-3}",
)
SST2 = head("sst2")
STSB = head("stsb")


def update(client="a", **delta):
    names = {"encoder": ENCODER, "sst2": SST2, "stsb": STSB}
    values = {names[name]: torch.tensor(value) for name, value in delta.items()}
    tasks = tuple(name for name in delta if name != "encoder")
    return Update(1, client, tasks, values, None, dict.fromkeys(tasks, 1), {})


def no_key(digest):
    return bytes(32)


def noise_free(updates, expected, max_norm, bound="together"):
    total = NoisySum(start_of(updates, expected), expected, Noise(max_norm, bound, 0.0), no_key)
    for one in updates:
        total.add(one, {})
    return total.result()


def start_of(updates, expected):
    shapes = {key: value for one in updates for key, value in one.delta.items()}
    return {key: torch.zeros_like(shapes.get(key, torch.zeros(1))) for key in expected}


# The mechanism -------------------------------------------------------------------------------------------------------


def test_the_mean_is_the_sum_of_clipped_updates_over_the_expected_number_of_clients():
    # a has norm 5 (3, 4) and is clipped to 1: (0.6, 0.8). b has norm 0.5 and stays. c trains another head.
    updates = [
        update("a", encoder=[3.0], sst2=[4.0]),
        update("b", encoder=[0.3], sst2=[0.4]),
        update("c", encoder=[0.0], stsb=[0.2]),
    ]
    # Of ten candidates eight have sst2 and two stsb, each drawn with chance a half: fixed, whoever answers.
    expected = expected_returns({("sst2",): 8, ("stsb",): 2}, 0.5, PLAN, ("layer", "heads.sst2.w", "heads.stsb.w"))
    assert expected == {ENCODER: 5.0, SST2: 4.0, STSB: 1.0}

    mean = noise_free(updates, expected, 1.0)

    assert float(mean[ENCODER]) == pytest.approx((0.6 + 0.3) / 5, rel=1e-5)
    assert float(mean[SST2]) == pytest.approx((0.8 + 0.4) / 4, rel=1e-5)
    assert float(mean[STSB]) == pytest.approx(0.2, rel=1e-5)


def test_by_scope_each_scope_has_its_part_of_the_bound():
    # Two scopes: 1 / sqrt(2) = 0.7071 for each. The head's 4 is clipped to that, the encoder's 0.3 is not touched.
    mean = noise_free([update(encoder=[0.3], sst2=[4.0])], {ENCODER: 1.0, SST2: 1.0}, 1.0, "by_scope")

    assert float(mean[ENCODER]) == pytest.approx(0.3)
    assert float(mean[SST2]) == pytest.approx(math.sqrt(0.5), rel=1e-5)


def test_a_stopped_task_and_what_stays_at_clients_are_not_released():
    plan = SharingPlan((("heads.stsb.*", "client"), ("heads.*", "task"), ("fix", "fixed"), ("*", "all")), (), ("sst2",))

    expected = expected_returns({("sst2", "stsb"): 4}, 1.0, plan, ("layer", "fix", "heads.sst2.w", "heads.stsb.w"))

    assert expected == {ENCODER: 4.0}


numbers = st.floats(-50, 50, width=32, allow_subnormal=False)
contributions = st.lists(
    st.fixed_dictionaries(
        {"encoder": st.lists(numbers, min_size=3, max_size=3)},
        optional={name: st.lists(numbers, min_size=2, max_size=2) for name in ("sst2", "stsb")},
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(contributions, st.floats(0.01, 20), st.sampled_from(["together", "by_scope"]), st.integers(0, 5))
def test_one_client_changes_the_vector_of_all_sums_by_max_norm_at_most(clients, max_norm, bound, removed):
    """The neighbouring relation is one client more or less, with the same denominators, here all 1."""
    updates = [update(str(number), **delta) for number, delta in enumerate(clients)]
    before = {ENCODER: torch.zeros(3), SST2: torch.zeros(2), STSB: torch.zeros(2)}

    def sums(some):
        # In 64 bits: what is tested is the mechanism, not the rounding of a sum.
        total = NoisySum(
            {key: value.double() for key, value in before.items()},
            dict.fromkeys(before, 1.0),
            Noise(max_norm, bound, 0.0),
            no_key,
        )
        for one in some:
            total.add(replace(one, delta={key: value.double() for key, value in one.delta.items()}), {})
        found = total.result()
        return torch.cat([found[key] for key in before])

    removed %= len(updates)
    others = [one for number, one in enumerate(updates) if number != removed]

    assert float((sums(updates) - sums(others)).norm()) <= max_norm * (1 + 1e-9)


def test_the_noise_of_every_scope_has_the_stated_deviation_whoever_returned():
    expected = {Key("all", "w"): 4.0, Key("task:a", "heads.a.w"): 0.5}
    before = {key: torch.zeros(200, 250) for key in expected}

    mean = NoisySum(before, expected, Noise(2.0, "together", 1.5), no_key).result()

    for key, number in expected.items():
        # z * C / denominator; of 50,000 entries the deviation is known to a third of a percent.
        assert float(mean[key].std()) == pytest.approx(1.5 * 2.0 / number, rel=0.02)
        assert abs(float(mean[key].mean())) < 5 * 3.0 / number / math.sqrt(50_000)
    one, other = (value.flatten() for value in mean.values())
    assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 0.03


def test_the_same_sums_have_the_same_noise_and_others_have_other_noise():
    def release(value):
        total = NoisySum(
            {ENCODER: torch.zeros(1)}, {ENCODER: 1.0}, Noise(1.0, "together", 1.0), partial(derive_key, b"secret")
        )
        total.add(update(encoder=[value]), {})
        return float(total.result()[ENCODER])

    assert release(0.25) == release(0.25)
    # Were the noise the same, the difference of the two would be that of the updates.
    assert release(0.25) - release(0.5) != pytest.approx(-0.25, abs=1e-3)


def test_a_client_clips_what_it_sends_and_the_server_what_it_adds():
    sent = update(encoder=[30.0], sst2=[40.0])
    job = replace_job({})
    clipped, _ = ClippedUpdate({"bound": "together", MAX_NORM: 1.0}).at_client(sent, FilterClient(job, Extra(), "t"))

    assert math.hypot(*scope_norms(clipped.delta).values()) == pytest.approx(1.0, rel=1e-5)
    assert math.hypot(*scope_norms(clipped.delta).values()) <= 1.0
    small = update(encoder=[0.3], sst2=[0.4])
    assert (
        ClippedUpdate({"bound": "together", MAX_NORM: 1.0}).at_client(small, FilterClient(job, Extra(), "t"))[0]
        is small
    )
    # One that does not clip gains nothing by it.
    honest, hostile = (noise_free([one], {ENCODER: 1.0, SST2: 1.0}, 1.0) for one in (clipped, sent))
    torch.testing.assert_close(honest[SST2], hostile[SST2], rtol=1e-5, atol=0)


def replace_job(values):
    from fedmtl.federation.messages import Job

    extra = {NAME: Extra(values)} if values else {}
    return Job("train", 1, "a", ("sst2",), {}, PLAN, None, 0, 0, {}, extra=extra)


def test_a_policy_may_require_it(make_config):
    def reason(policy, *overrides):
        required = Policy.model_validate({"require": {"client_privacy": policy}})
        return unprotected(required, make_config(*overrides)) or ""

    masked, at_server = "privacy.secure_aggregation={}", {"noise_at": "server"}
    assert "has none" in reason({})
    # Noise of the server counts where the policy takes its word, and noise of clients only under masks.
    assert "requires noise that sites add" in reason({}, "privacy.client={epsilon: 8}")
    assert reason(at_server, "privacy.client={epsilon: 8}") == ""
    assert reason(at_server, masked, "privacy.client={epsilon: 8, noise_at: clients}") == ""
    assert "masks none of it" in reason({}, "privacy.client={epsilon: 8, noise_at: clients}")
    assert "epsilon 9 and delta 1e-05; the policy allows 8" in reason(at_server, "privacy.client={epsilon: 9}")
    assert "delta 0.001; the policy allows 8 and 1e-05" in reason(at_server, "privacy.client={epsilon: 8, delta: 1e-3}")
    # Two rounds of everybody, with noise of half the bound.
    exact = spent([Releases(1.0, 0.5, 2)], 1e-5).epsilon
    assert f"epsilon {exact:.3g} and" in reason(at_server, "privacy.client={noise_multiplier: 0.5}")
    assert unprotected(Policy(), make_config()) is None


def test_a_site_that_takes_the_servers_word_counts_whole_runs(tmp_path):
    """Each run counts with its three rounds once it has an update, and the policy allows two such runs."""
    settings = ClientPrivacyConfig(noise_multiplier=4.0)
    given = {"bound": "together", "max_norm": 1.0, "planned": settings.model_dump(mode="json")}
    exact = [spent([Releases(1.0, 4.0, 3 * runs)], 1e-5).epsilon for runs in (1, 2, 3)]
    required = {"max_epsilon": (exact[1] + exact[2]) / 2, "max_delta": 1e-5, "noise_at": "server"}

    def answer(run, required=required):
        job = Job("train", 1, "a", ("x",), {}, PLAN, None, 0, 0, {"num_rounds": 3})
        client = FilterClient(job, NO_EXTRA, "", tmp_path / run / "a", required=required)
        return ClippedUpdate(given).at_client(update(encoder=[1.0]), client)

    for run in ("one", "one", "two", "one"):
        answer(run)
    with pytest.raises(PolicyError, match=r"epsilon .* would be spent .* over all runs; the policy allows") as caught:
        answer("three")
    assert caught.value.code == "client_privacy_spent"
    answer("three", required={})


def test_a_run_that_goes_on_with_other_noise_counts_with_both(tmp_path):
    """A plan of one round with half the noise that another one of one round has: what was told stays told."""
    exact = spent([Releases(1.0, 2.0, 1), Releases(1.0, 4.0, 1)], 1e-5).epsilon
    job = Job("train", 1, "a", ("x",), {}, PLAN, None, 0, 0, {"num_rounds": 1})

    def answer(noise, most):
        settings = ClientPrivacyConfig(noise_multiplier=noise).model_dump(mode="json")
        required = {"max_epsilon": most, "max_delta": 1e-5, "noise_at": "server"}
        client = FilterClient(job, NO_EXTRA, "", tmp_path / "run" / "a", required=required)
        filtered = ClippedUpdate({"bound": "together", "max_norm": 1.0, "planned": settings})
        return filtered.at_client(update(encoder=[1.0]), client)

    answer(2.0, exact * 0.99)
    answer(2.0, exact * 0.99)
    with pytest.raises(PolicyError, match="would be spent"):
        answer(4.0, exact * 0.99)
    answer(4.0, exact * 1.01)


def test_an_adaptive_bound_comes_with_the_job():
    filtered = ClippedUpdate({"bound": "together", MAX_NORM: 1.0})
    client = FilterClient(replace_job({MAX_NORM: 0.1}), Extra(), "t")

    assert scope_norms(filtered.at_client(update(encoder=[5.0]), client)[0].delta)["all"] == pytest.approx(
        0.1, rel=1e-5
    )


def test_a_site_refuses_a_bound_that_its_config_does_not_send():
    check = find(NAME).check_received
    adaptive, fixed = {"adaptive": True, "shared": False}, {"adaptive": False, "shared": False}

    assert check(Extra({MAX_NORM: 0.5}), {}, adaptive) is None
    for extra, options in (
        (Extra({MAX_NORM: 0.5}), fixed),
        (Extra({MAX_NORM: math.inf}), adaptive),
        (Extra({MAX_NORM: "0.5"}), adaptive),
        (Extra({MAX_NORM: 0.5, "more": 1}), adaptive),
    ):
        assert check(extra, {}, options) == "the job's bound of updates is none"
    shared = {"adaptive": False, "shared": True}
    assert check(Extra({NOISE: 0.5}), {}, shared) is None
    for extra in (Extra({NOISE: 0.0}), Extra({NOISE: 1}), Extra({NOISE: 0.5, MAX_NORM: 0.5}), Extra({MAX_NORM: 0.5})):
        assert check(extra, {}, shared) == "the job's noise is none"


# Who takes part -----------------------------------------------------------------------------------------------------


def make_method(rounds=3, secret=None, seed=0, **options):
    names = ("layer", "heads.sst2.w", "heads.stsb.w")
    config = ClientPrivacyConfig.model_validate({"noise_multiplier": 0.5, "delta": 1e-3, **options})
    return ClientPrivacy(config, names, rounds, secret=secret, seed=seed)


def test_every_client_is_drawn_by_itself_with_the_stated_chance():
    method = make_method(sampling_rate=0.3)
    candidates = {f"client{number:03d}": ("sst2",) for number in range(200)}
    samples = [set(method.sample(candidates, number)) for number in range(1, 201)]

    sizes = [len(sample) for sample in samples]
    # 200 draws of 200: a binomial of mean 60 and variance 42; their mean is known to 0.46, a fixed size has variance 0.
    assert sum(sizes) / 200 == pytest.approx(60, abs=2.3)
    variance = sum((size - 60) ** 2 for size in sizes) / 200
    assert 26 < variance < 62
    drawn = Counter(client for sample in samples for client in sample)
    # Each about 60 times, deviation 6.5; that two are drawn together has chance 0.09, here of 40,000 rounds and pairs.
    assert 60 - 5 * 6.5 < min(drawn.values()) <= max(drawn.values()) < 60 + 5 * 6.5
    pairs = sum(len({a, b} & sample) == 2 for sample in samples for a, b in pairwise(candidates))
    assert pairs / (200 * 199) == pytest.approx(0.09, abs=0.01)


def test_a_sample_is_of_the_secret_and_of_the_round():
    candidates = {f"client{number}": ("sst2",) for number in range(40)}

    def drawn(number=1, **options):
        return make_method(sampling_rate=0.5, **options).sample(candidates, number)

    assert drawn() == drawn()
    assert drawn() != drawn(2)
    assert drawn() != drawn(seed=1)
    assert drawn(secret=b"one") == drawn(secret=b"one", seed=1)
    assert drawn(secret=b"one") != drawn(secret=b"other")
    assert make_method(sampling_rate=1.0).sample(candidates, 1) is None


def dp_server(method):
    server = make_server(methods=[method], average="uniform")
    return replace(server, settings=replace(server.settings, methods={NAME: {"bound": "together", MAX_NORM: 1.0}}))


def run_rounds(method, engine=None, number=3, state=None):
    server = dp_server(method)
    server = replace(server, settings=replace(server.settings, num_rounds=number))
    found = []
    for one in rounds(state or start(), server, engine or FakeEngine(), lambda _: scores(sst2=0.5, stsb=0.5)):
        found.append(one)
    return found


class Nobody(ClientPrivacy):
    """Draws nobody in round 2."""

    def sample(self, candidates, round_number):
        chosen = super().sample(candidates, round_number)
        return [] if round_number == 2 else chosen


def test_a_round_of_nobody_releases_noise_and_does_not_end_the_run():
    method = make_method()
    method.__class__ = Nobody

    done = run_rounds(method)

    assert [len(one.updates) for one in done] == [0, 3, 0, 3]
    before, after = done[1].state.weights, done[2].state.weights
    assert all(float(after[key]) != float(before[key]) for key in (ENCODER, SST2, STSB))
    assert done[-1].state.extra[NAME].values[RELEASES][0]["times"] == 3


def test_a_round_in_which_all_fail_ends_the_run_as_before():
    engine = FakeEngine(lambda job: Failure(job.round, job.client, "is away"))
    with pytest.raises(RoundFailed, match="is away"):
        run_rounds(make_method(sampling_rate=0.9), engine)


def test_who_drops_out_changes_neither_the_denominator_nor_the_noise():
    def only(*clients):
        return FakeEngine(lambda job: trained(job, 0.1) if job.client in clients else None)

    everybody, two = (
        run_rounds(make_method(noise_multiplier=1e-9), engine, 1)[-1].state
        for engine in (only("a", "b", "c"), only("a", "c"))
    )

    # Three candidates, of which two train sst2: 0.3 / 3 and 0.2 / 3, 0.2 / 2 and 0.1 / 2.
    for state, answered in ((everybody, 3), (two, 2)):
        assert float(state.weights[ENCODER]) == pytest.approx(0.1 * answered / 3, abs=1e-6)
        assert float(state.weights[SST2]) == pytest.approx(0.1 * (answered - 1) / 2, abs=1e-6)
    assert everybody.extra[NAME] == two.extra[NAME]


# The ledger ---------------------------------------------------------------------------------------------------------


def by_hand(*releases, delta):
    accountant = dp.pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    for chance, noise, times in releases:
        event = dp.GaussianDpEvent(noise)
        accountant.compose(dp.PoissonSampledDpEvent(chance, event) if chance < 1 else event, times)
    return accountant.get_epsilon(delta)


def privacy_events(done):
    return [event for one in done for event in one.events if event.kind == "privacy"]


def test_what_is_said_is_what_googles_accountant_says_of_the_rounds_that_were():
    *_, early, last = privacy_events(run_rounds(make_method(sampling_rate=0.4, noise_multiplier=1.3)))

    assert last.releases == [{"chance": 0.4, "noise_multiplier": 1.3, "times": 3}]
    assert (last.round, last.unit, last.accountant) == (3, "client", "pld")
    assert last.epsilon == pytest.approx(by_hand((0.4, 1.3, 3), delta=1e-3), rel=1e-9)
    # Until then a quick bound above it stands.
    assert (early.accountant, early.releases[0]["times"]) == ("rdp", 2)
    assert early.epsilon >= by_hand((0.4, 1.3, 2), delta=1e-3)
    assert f"epsilon {last.epsilon:.3g} at delta 0.001 for one client" in last.words


def test_without_a_sample_nothing_is_gained_by_it():
    last = privacy_events(run_rounds(make_method(noise_multiplier=2.0)))[-1]

    assert last.releases == [{"chance": 1.0, "noise_multiplier": 2.0, "times": 3}]
    assert last.epsilon == pytest.approx(by_hand((1.0, 2.0, 3), delta=1e-3), rel=1e-9)


def test_the_noise_is_found_for_an_epsilon_and_all_rounds_keep_to_it():
    method = make_method(noise_multiplier=None, epsilon=1.0, sampling_rate=0.5)
    last = privacy_events(run_rounds(method))[-1]

    assert 0.98 < last.epsilon <= 1.0


@pytest.mark.slow
def test_a_deployed_server_that_goes_on_counts_the_round_that_was_cut_off():
    # Three rounds spend what may be spent, and the first is over.
    epsilon = by_hand((0.5, 3.0, 3), delta=1e-3) * 1.001
    done = [{"chance": 0.5, "noise_multiplier": 3.0, "times": 1}]
    state = replace(start(), round=1, extra={NAME: Extra({RELEASES: done, NOISE: 3.0, MAX_NORM: 1.0})})

    def go_on(secret):
        method = make_method(secret=secret, noise_multiplier=None, epsilon=epsilon, sampling_rate=0.5)
        return privacy_events(run_rounds(method, state=state))

    deployed, simulated = go_on(bytes(32)), go_on(None)

    # Round 1, the one that was cut off, and rounds 2 and 3 with more noise, so that all keep to the epsilon.
    assert [[one["times"] for one in event.releases] for event in deployed] == [[2, 1], [2, 2]]
    assert deployed[-1].details[NOISE] > 3.0
    assert 0.9 * epsilon < deployed[-1].epsilon <= epsilon
    # A simulation repeats a round bit for bit, and pays once.
    assert simulated[-1].releases == [{"chance": 0.5, "noise_multiplier": 3.0, "times": 3}]


def test_a_state_that_is_none_is_refused():
    method = make_method()
    good = {RELEASES: [{"chance": 0.5, "noise_multiplier": 1.0, "times": 2}], NOISE: 1.0, MAX_NORM: 0.5}
    method.check(Extra(good))
    for change in ({NOISE: 0.0}, {MAX_NORM: -1.0}, {RELEASES: [{"chance": 2.0}]}, {"more": 1}):
        with pytest.raises((ValueError, KeyError)):
            method.check(Extra({**good, **change}))


# Adaptive clipping --------------------------------------------------------------------------------------------------


class Spread(FakeEngine):
    """A hundred clients whose updates have the norms 0.01, 0.02, ... 1, as far as the bound lets them."""

    def __init__(self):
        super().__init__(self._train)

    def clients(self):
        return {f"c{number:03d}": ClientInfo({"sst2": 1}) for number in range(1, 101)}

    def _train(self, job):
        norm = int(job.client[1:]) / 100
        delta = {ENCODER: torch.tensor([0.6 * norm]), SST2: torch.tensor([0.8 * norm])}
        sent = Update(job.round, job.client, ("sst2",), delta, None, {"sst2": 1}, {})
        options = {"bound": "together", MAX_NORM: 99.0}
        return ClippedUpdate(options).at_client(sent, FilterClient(job, Extra(), "t"))[0]


class Silent(ClientPrivacy):
    """Accounts for nothing, which takes longer than these rounds."""

    def report(self, state):
        return ()


@pytest.mark.parametrize("first", [0.05, 5.0])
def test_an_adaptive_bound_finds_the_quantile_of_the_norms(first):
    method = make_method(
        40, max_norm=first, noise_multiplier=1.0, adaptive_clipping={"quantile": 0.7, "learning_rate": 0.5}
    )
    method.__class__ = Silent
    server = replace(dp_server(method), active_tasks=lambda client, number: ("sst2",))
    server = replace(server, settings=replace(server.settings, num_rounds=40))
    bounds = [
        one.state.extra[NAME].values[MAX_NORM]
        for one in rounds(start(), server, Spread(), lambda _: scores(sst2=0.5, stsb=0.5))
    ]

    # The count's noise is a twentieth of the hundred clients.
    assert sum(bounds[-10:]) / 10 == pytest.approx(0.7, abs=0.08)


def test_the_count_is_paid_for_by_more_noise_on_the_updates():
    method = make_method(adaptive_clipping={"count_noise": 1.0}, noise_multiplier=1.2, max_norm=2.0)
    state = method.start(start()).state
    method.sample({"a": ("sst2",)}, 1)
    found = method.before_round(state, {"a": ("sst2",)}, {})

    # Andrew et al. 2021: (1.2^-2 - 2^-2)^(-1/2) = (0.69444 - 0.25)^(-1/2) = 1.5.
    assert found.aggregator._noise.multiplier == pytest.approx(1.5)
    assert found.extra == Extra({MAX_NORM: 2.0})
    # Two Gaussian releases at once, of 1.5 and of 2 times what one client changes, are one of 1.2.
    assert pytest.approx(1 / 1.5**2 + 1 / 2.0**2) == 1 / 1.2**2
    found.aggregator.add(update(encoder=[0.1], sst2=[0.1]), {})
    found.aggregator.result()
    assert method.after_aggregation(state, state).state.extra[NAME].values[RELEASES] == [
        {"chance": 1.0, "noise_multiplier": 1.2, "times": 1}
    ]


def test_noise_on_the_count_that_spends_all_by_itself_is_refused():
    with pytest.raises(ConfigError, match=r"adaptive_clipping.count_noise: found 0.4, .* write more than 0.5"):
        make_method(adaptive_clipping=AdaptiveClippingConfig(count_noise=0.4), noise_multiplier=1.0).start(start())


def test_below_is_what_was_clipped_nowhere():
    assert clip_factors({"all": 3.0, "task:a": 4.0}, 5.1, "together") == ({"all": 1.0, "task:a": 1.0}, True)
    assert clip_factors({"all": 0.1, "task:a": 4.0}, 5.0, "by_scope")[1] is False
    # An update that its client has clipped is as long as the bound.
    assert clip_factors({"all": 5.0 * (1 - 1e-6)}, 5.0, "together")[1] is False


# Whole runs ---------------------------------------------------------------------------------------------------------


def weights(run):
    state = load_checkpoint(run.checkpoints)
    assert state is not None
    return state


def same(one, other):
    a, b = weights(one), weights(other)
    assert a.weights.keys() == b.weights.keys()
    return (a.extra[NAME] == b.extra[NAME]) and all(torch.equal(a.weights[key], b.weights[key]) for key in a.weights)


def test_any_number_of_workers_gives_the_same_weights_and_ledger(make_config, run_once):
    assert same(run_once(*ON), start_run(make_config(*ON, "compute.workers=2"), "workers"))


@pytest.mark.slow
def test_a_run_that_was_killed_has_the_weights_and_the_ledger_of_one_that_was_not(make_config, run_once, monkeypatch):
    long = (*ON, "training.num_rounds=3", "federation.server_optimizer.kind=fedadam",
            "privacy.client.adaptive_clipping={}")  # fmt: skip
    config, whole = make_config(*long), run_once(*long)

    class Killed(BaseException):
        pass

    original = driver._record

    def dying(round_, *rest):
        if round_.number == 2:
            raise Killed
        return original(round_, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(driver, "_record", dying)
        with pytest.raises(Killed):
            start_run(config, "killed")
    killed = resume_run(RunFolder(Path(config.output) / "killed"))

    assert same(whole, killed)
    one, other = ([e for e in raw_events(run) if e["event"] == "privacy"] for run in (whole, killed))
    assert one == other
    assert [event["round"] for event in one] == [1, 2, 3]


def test_clients_that_train_at_once_are_clipped_and_counted_alike(make_config, run_once):
    alone, stacked = run_once(*ON), start_run(make_config(*ON, "compute.stack=3"), "stacked")
    # Their dropout is drawn otherwise, which is far less than the noise.
    for key, value in weights(alone).weights.items():
        torch.testing.assert_close(weights(stacked).weights[key], value, atol=0.02, rtol=0)
    assert weights(alone).extra == weights(stacked).extra


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["training.pruning={amount: 0.5, rounds: 2}", "training.proximal=0.1", "privacy.client.bound=by_scope"],
        ["training.task_weight_in=loss", "tasks.sentiment.weight=2", "federation.task_weighting.kind=progress",
         "tasks.sentiment.patience=1", "training.loss_weighting=fixed", "federation.max_update_norm=0.5"],
        ['sharing.rules=[{"heads.similarity.*": client}, {"heads.*": task}, {"*": all}]',
         "training.keep_optimizer=true", "wire.up=topk", "wire.topk_share=0.1", "wire.down=fp16"],
        ["mode=federated_single_task", "model.lora={rank: 2}"],
        ["clients={a: {tasks: [sentiment, similarity]}, b: {tasks: [similarity, paraphrase]},"
         " c: {tasks: [paraphrase]}}",
         "training.task_schedule=joint", "training.gradients=pcgrad", "training.loss_weighting=uncertainty",
         "federation.server_optimizer.kind=fedavgm", "training.keep=best"],
        ["training.smart={weight: 0.1}", "training.distillation={teacher: TEACHER}"],
        ["training.distillation={teacher: TEACHER, where: server, texts: [TEXTS], tasks: [sentiment], steps: 2}"],
    ],
    ids=["pruning", "weights", "personal and codecs", "single", "joint", "smart and distillation", "at the server"],
)  # fmt: skip
def test_it_goes_together_with(make_config, run_once, tmp_path, overrides):
    teacher, texts = str(run_once().path) if "TEACHER" in overrides[-1] else "", tmp_path / "texts.txt"
    texts.write_text("a fine film\na dull film\n" * 20)
    options = (each.replace("TEACHER", teacher).replace("TEXTS", str(texts)) for each in overrides)
    run = start_run(make_config(*ON, *options), "together")

    last = [event for event in raw_events(run) if event["event"] == "privacy"][-1]
    assert last["releases"] == [{"chance": 0.6, "noise_multiplier": 0.7, "times": 2}]
    assert not [event for event in raw_events(run) if event["event"] == "failure"]


REFUSED = {
    "mode=local": "mode: found with privacy.client",
    "federation.average=weighted": "federation.average: found with privacy.client weighted",
    "federation.average=tasks": "federation.average: ",
    "federation.aggregation=clipped_mean": "federation.aggregation: ",
    "federation.max_share=0.5": "federation.max_share: ",
    "federation.clients_per_round=3": "federation.clients_per_round: .* write privacy.client.sampling_rate",
    "federation.min_clients_per_task=1": "federation.min_clients_per_task: ",
    "federation.vocabulary_slices=true": "federation.vocabulary_slices: .* write `false`",
    "federation.task_weighting.kind=progress": "federation.task_weighting: ",
    "tasks.sentiment.weight=2": "tasks.sentiment.weight: .* write `training.task_weight_in: loss`",
    "training.logit_adjustment=1": "training.logit_adjustment: ",
    "sharing.adaptive={}": "sharing.adaptive: ",
    "methods.scaffold={}": "methods.scaffold: ",
    "privacy.secure_aggregation={}": "privacy.client.noise_at: found server with privacy.secure_aggregation",
    "privacy.client.noise_at=clients": "privacy.client.noise_at: ",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_it_does_not_go_together_with_is_refused_before_round_1(make_config, override):
    with pytest.raises(ConfigError, match=REFUSED[override]):
        prepare(make_config(*ON, override))


@pytest.mark.parametrize(
    "override",
    ["tasks.sentiment.patience=2", "training.keep=best",
     "federation.task_weighting.kind=progress"],
)  # fmt: skip
def test_scores_made_at_clients_must_not_decide_what_is_released(make_config, override):
    with pytest.raises(ConfigError, match="and scores made at clients, which have no noise"):
        prepare(make_config(*ON, "training.task_weight_in=loss", "evaluation.where=clients", override))


def test_adaptive_clipping_wants_exact_updates(make_config):
    with pytest.raises(ConfigError, match=r"adaptive_clipping: .* write `wire.up: fp32`"):
        prepare(make_config(*ON, "privacy.client.adaptive_clipping={}", "wire.up=int8"))


def test_a_capability_of_another_package_is_refused_by_name(make_config):
    from pydantic import BaseModel

    class Options(BaseModel):
        pass

    register(Capability("test_privacy_stranger", server=lambda setup: None, options=Options))
    with pytest.raises(ConfigError, match=r"methods.test_privacy_stranger: .* of another package"):
        prepare(make_config(*ON, "methods.test_privacy_stranger={}"))


def test_what_it_needs_is_chosen_where_it_is_not_given():
    found = explained_config(
        None, ["privacy.client={epsilon: 8}", "model.server_model=random-1x32", "tasks.sentiment={}"]
    )

    assert (found.config.federation.average, found.config.federation.vocabulary_slices) == ("uniform", False)
    assert "average: uniform  # rule client-privacy" in found.commented()
    other = load_config(None, ["privacy.client={epsilon: 8}", "federation.average=weighted", "tasks.sentiment={}"])
    assert other.federation.average == "weighted"


def test_a_run_says_what_was_spent_and_what_is_not_covered(run_once):
    run = run_once(*ON)
    events = read_events(run)
    last = [event for event in events if event.kind == "privacy"][-1]
    epsilon = by_hand((0.6, 0.7, 2), delta=1e-3)

    assert last.epsilon == pytest.approx(epsilon, rel=1e-9)
    for part in (
        f"epsilon {epsilon:.3g} at delta 0.001",
        "one client more or less",
        "Not covered: numbers of examples",
    ):
        assert part in last.words
        assert part in run.report.read_text()
        assert part in model_card(run, "usage")
    assert last.words in [verdict.words for verdict in verdicts(events)]
    assert last.words in run_status(events, "once").privacy
    assert "No noise was added" not in model_card(run, "usage")


def test_values_that_drown_in_noise_are_named_at_the_start(make_config):
    seen = []
    start_run(make_config(*ON, "training.num_rounds=1"), "drowned", seen.append)

    (words,) = [event.words for event in seen if event.kind == "warning" and "noise moves" in event.words]
    # 1.2 clients of each task are expected, 3.6 in all.
    assert "the head of sentiment (66 values, 1.2 expected clients: 4.7 times)" in words
    assert "all (" in words
    kinds = [event.kind for event in seen]
    assert kinds.index("warning") < kinds.index("update")


def test_it_is_an_error_to_give_both_an_epsilon_and_a_noise_or_none(make_config):
    for options in ("{epsilon: 1, noise_multiplier: 1}", "{}"):
        with pytest.raises(FedmtlError, match="write one of them"):
            make_config(f"privacy.client={options}")


def test_the_stream_of_a_sample_is_not_that_of_the_noise():
    secret = bytes(32)
    sample, noise = (KeyedNoise(derive_key(secret, NAME, purpose, 1)) for purpose in ("sample", "noise"))
    assert not torch.equal(sample._bits(16), noise._bits(16))

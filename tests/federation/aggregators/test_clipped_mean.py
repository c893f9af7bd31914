import pytest
import torch

from fedmtl.federation.aggregators import clipped_mean
from fedmtl.federation.aggregators.clipped_mean import ClippedMean
from fedmtl.federation.messages import Round, Update
from fedmtl.federation.server import rounds
from fedmtl.sharing.plan import Extra, Key

from ..fake_engine import ENCODER, FakeEngine, head, make_server, scores, start, trained


def run(engine=None, **federation) -> list[Round]:
    server = make_server(**federation)
    return list(rounds(start(), server, engine or FakeEngine(), lambda state: scores(sst2=0.5, stsb=0.5)))


def bounds(turn: Round) -> dict[str, float]:
    return turn.state.extra["clipped_mean"].values["norms"]


def test_norms_are_clipped_to_the_median_of_the_round_before():
    # The encoder's norms are 1, 2 and 30; of round 1's own the median is 2: (1*1 + 3*2 + 1*2) / 5.
    steps = {1: {"a": 1.0, "b": 2.0, "c": -30.0}, 2: {"a": 1.0, "b": 1.0, "c": -30.0}}
    engine = FakeEngine(lambda job: trained(job, steps.get(job.round, steps[1])[job.client]))
    turns = run(engine, aggregation="clipped_mean")
    assert turns[1].state.weights[ENCODER].item() == pytest.approx((1 + 3 * 2 - 2) / 5)
    assert bounds(turns[1]) == {"all": 2.0, "task:sst2": 1.0, "task:stsb": 30.0}
    # Round 2 is clipped to 2, and its own median is 1; the head of sst2 to 1.
    moved = turns[2].state.weights[ENCODER].item() - turns[1].state.weights[ENCODER].item()
    assert moved == pytest.approx((1 + 3 * 1 - 2) / 5)
    assert bounds(turns[2])["all"] == 1.0


def test_of_two_clients_the_smaller_norm_bounds_both():
    engine = FakeEngine(lambda job: trained(job, {"a": 1.0, "b": -10.0, "c": 1.0}[job.client]))
    first = run(engine, aggregation="clipped_mean")[1].state.weights
    # a counts 1, b 3: (1 - 3) / 4
    assert first[head("sst2")].item() == pytest.approx(-0.5)


def test_a_round_without_a_bound_is_the_same_whoever_answers_first():
    def ordered(job):
        return trained(job, {"a": 1.0, "b": 3.0, "c": 7.0}[job.client])

    class Backwards(FakeEngine):
        def run(self, jobs, deadline):
            yield from reversed(list(super().run(jobs, deadline)))

    one, other = (run(engine, aggregation="clipped_mean") for engine in (FakeEngine(ordered), Backwards(ordered)))
    assert one[-1].state.weights == other[-1].state.weights


def test_off_it_changes_nothing():
    assert "clipped_mean" not in run()[-1].state.extra


def test_updates_wait_for_a_first_median_and_not_for_ever(monkeypatch):
    monkeypatch.setattr(clipped_mean, "MOST_WAITING", 2)
    mean = ClippedMean({ENCODER: torch.zeros(1)})
    # The first two bound each other to 1; the third comes after, and is clipped to that.
    for client, step in (("a", 1.0), ("b", 5.0), ("c", 9.0)):
        update = Update(1, client, ("sst2",), {ENCODER: torch.tensor([step])}, None, {"sst2": 1}, {})
        mean.add(update, {"all": 1.0})
    assert mean.result()[ENCODER].item() == 1.0
    # Of 1, 5 and 9 the median is 5.
    assert mean.remember().values == {"norms": {"all": 5.0}, "sizes": {"all": 1}}


def test_a_scope_that_nobody_moved_has_the_bound_it_had():
    mean = ClippedMean({ENCODER: torch.zeros(1)}, Extra({"norms": {"all": 2.0, "task:sst2": 3.0}}))
    mean.add(Update(1, "a", ("sst2",), {ENCODER: torch.tensor([8.0])}, None, {"sst2": 1}, {}), {"all": 1.0})
    assert mean.result()[ENCODER].item() == 2.0
    assert mean.remember().values["norms"] == {"all": 8.0, "task:sst2": 3.0}


def test_a_scope_with_other_values_than_in_the_last_round_waits_for_a_median_anew():
    # The bound was of a scope of two entries; a layer has moved since, and one is left.
    mean = ClippedMean({ENCODER: torch.zeros(1)}, Extra({"norms": {"all": 2.0}, "sizes": {"all": 2}}))
    for client, step in (("a", 8.0), ("b", 6.0), ("c", 7.0)):
        update = Update(1, client, ("sst2",), {ENCODER: torch.tensor([step])}, None, {"sst2": 1}, {})
        mean.add(update, {"all": 1.0})
    # Of 8, 6 and 7 the median is 7: (7 + 6 + 7) / 3.
    assert mean.result()[ENCODER].item() == pytest.approx(20 / 3)
    assert mean.remember().values == {"norms": {"all": 7.0}, "sizes": {"all": 1}}


@pytest.mark.parametrize(
    "extra",
    [
        Extra({"norms": {"all": 0.0}}),
        Extra({"norms": {"all": float("nan")}}),
        Extra({"norms": {"all": "1"}}),
        Extra({"norms": [1.0]}),
        Extra({"other": 1.0}),
        Extra({"norms": {"all": 1.0}, "sizes": {"all": -1}}),
        Extra(tensors={"norms": {Key("all", "layer"): torch.ones(1)}}),
    ],
)
def test_a_checkpoint_with_what_are_no_bounds_is_refused(extra):
    ClippedMean.check(Extra({"norms": {"all": 1.0}}))
    with pytest.raises(ValueError):
        ClippedMean.check(extra)

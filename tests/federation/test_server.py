import weakref
from dataclasses import replace

import pytest
import torch

from fedmtl.capabilities import _REGISTERED, Capability, register
from fedmtl.config import EvaluationConfig
from fedmtl.federation.dispatch import sample_clients
from fedmtl.federation.messages import ClientInfo, Failure, Job, Update
from fedmtl.federation.server import RoundFailed, rounds
from fedmtl.federation.server_method import ServerMethod, Step
from fedmtl.runs.event_lines import OtherEvent, to_json
from fedmtl.sharing.plan import Extra, Key

from .fake_engine import ENCODER, PLAN, FakeEngine, head, make_server, scores, start, trained


def flat(state):
    return scores(sst2=0.5, stsb=0.5)


def run(engine=None, evaluate=flat, state=None, **federation):
    return list(rounds(state or start(), make_server(**federation), engine or FakeEngine(), evaluate))


def test_round_0_is_the_start_and_row_n_the_model_after_round_n():
    turns = run()
    assert [turn.number for turn in turns] == [0, 1, 2, 3]
    assert [turn.state.weights[ENCODER].item() for turn in turns] == [0.0, 1.0, 2.0, 3.0]
    assert turns[0].updates == ()


class Recording(ServerMethod):
    """Notes its hooks, and multiplies the encoder after each."""

    def __init__(self, name, phase, factor, calls):
        self.name, self.phase, self._factor, self._calls = name, phase, factor, calls

    def _step(self, hook, state):
        self._calls.append((hook, self.name, state.round))
        weights = {**state.weights, ENCODER: state.weights[ENCODER] * self._factor}
        return Step(replace(state, weights=weights), (OtherEvent(name=self.name, unknown={"round": state.round}),))

    def start(self, state):
        return self._step("start", state)

    def after_aggregation(self, before, after):
        assert after.round == before.round + 1
        return self._step("aggregated", after)

    def after_evaluation(self, state, evaluation):
        self._calls.append(("evaluated", self.name, state.round))
        assert state.progress["sst2"].scores[-1] == (state.round, 0.5)
        return Step(state)

    def report(self, state):
        return (OtherEvent(name=f"{self.name} reports", unknown={"round": state.round}),)


def test_what_methods_make_of_a_round_comes_before_its_evaluation_and_the_next_round():
    # Each round adds 1, and a method makes ten times that of it: 10, then 110, then 1110.
    calls, seen = [], []

    def evaluate(state):
        seen.append(state.weights[ENCODER].item())
        return flat(state)

    server = make_server(methods=[Recording("ten", "weights", 10, calls)])
    turns = list(rounds(start(), server, FakeEngine(), evaluate))
    assert seen == [0.0, 10.0, 110.0, 1110.0]
    assert turns[-1].state.weights[ENCODER].item() == 1110.0
    assert [event.kind for event in turns[1].events] == ["ten", "ten reports"]


def test_methods_go_phase_by_phase_and_in_their_order_within_one():
    calls = []
    phases = ["constraint", "weights", "plan", "weights"]
    methods = [Recording(f"{phase} {number}", phase, 1, calls) for number, phase in enumerate(phases)]
    turns = list(rounds(start(), make_server(methods=methods), FakeEngine(), flat))
    order = ["plan 2", "weights 1", "weights 3", "constraint 0"]
    assert calls[:8] == [(hook, name, 0) for hook in ("start", "evaluated") for name in order]
    assert calls[8:16] == [(hook, name, 1) for hook in ("aggregated", "evaluated") for name in order]
    assert [event.kind for event in turns[1].events][:4] == order


def test_a_round_that_is_not_evaluated_is_reported_all_the_same():
    server = make_server(methods=[Recording("one", "weights", 1, [])])
    server = replace(server, evaluation=EvaluationConfig(every=2))
    turns = list(rounds(start(), server, FakeEngine(), flat))
    assert [turn.evaluation is None for turn in turns] == [False, True, False, False]
    assert all(to_json(turn.events[-1]) == {"event": "one reports", "round": turn.number} for turn in turns)


def test_a_head_moves_only_when_a_client_of_its_task_returned():
    def answer(job: Job):
        return Failure(job.round, job.client, "away") if job.client == "c" else trained(job)

    last = run(FakeEngine(answer))[-1].state
    assert last.weights[head("sst2")].item() == 3.0
    assert last.weights[head("stsb")].item() == 0.0
    assert last.weights[ENCODER].item() == 3.0


def bad_shape(job):
    return replace(trained(job), delta={ENCODER: torch.ones(2)})


def not_a_number(job):
    return replace(trained(job), delta={ENCODER: torch.tensor([float("nan")])})


def another_head(job):
    return replace(trained(job), delta={head("stsb"): torch.ones(1)})


def old_round(job):
    return replace(trained(job), round=job.round - 1)


def crashed(job):
    return Failure(job.round, job.client, "its process ended with code -9")


def silent(job):
    return Failure(job.round, job.client, "no answer within 5 s")


@pytest.mark.parametrize("bad", [bad_shape, not_a_number, another_head, old_round, crashed, silent])
def test_one_bad_client_costs_its_own_contribution_and_nothing_else(bad):
    def answer(job):
        return bad(job) if job.client == "a" else trained(job, 2.0)

    turns = run(FakeEngine(answer))
    last = turns[-1]
    # b and c agree on a step of 2 in each of three rounds
    assert {key: value.item() for key, value in last.state.weights.items()} == {
        ENCODER: 6.0,
        head("sst2"): 6.0,
        head("stsb"): 6.0,
    }
    assert [failure.client for failure in last.failures] == ["a"]
    assert last.failures[0].reason
    assert last.state.accepted == {"b": 3, "c": 3}


def test_tasks_alike_count_by_the_examples_of_the_clients_that_were_asked():
    steps = {"a": 1.0, "b": 5.0, "c": 10.0}
    server = make_server(average="tasks")
    engine = FakeEngine(lambda job: trained(job, steps[job.client]))
    first = list(rounds(start(), server, engine, flat))[1].state.weights
    # sst2: (1*1 + 3*5) / 4 = 4; both tasks alike: (4 + 10) / 2
    assert (first[head("sst2")].item(), first[ENCODER].item()) == (4.0, 7.0)
    without_a = replace(server, active_tasks=lambda client, number: {"b": ("sst2",), "c": ("stsb",)}.get(client, ()))
    first = list(rounds(start(), without_a, engine, flat))[1].state.weights
    # b is all of sst2 now, not three quarters
    assert first[ENCODER].item() == 7.5


def test_a_second_answer_of_one_client_does_not_count():
    class Twice(FakeEngine):
        def run(self, jobs, deadline):
            for answer in super().run(jobs, deadline):
                yield answer
                if answer.client == "a":
                    yield trained(
                        Job("train", answer.round, "a", ("sst2",), {ENCODER: torch.zeros(1)}, PLAN, None, 0, 0, {}),
                        99.0,
                    )  # type: ignore[arg-type]

    turn = run(Twice())[1]
    assert turn.state.weights[ENCODER].item() == 1.0
    assert [failure.reason for failure in turn.failures] == ["answered twice"]


def test_an_answer_nobody_asked_for_does_not_count():
    class Stranger(FakeEngine):
        def run(self, jobs, deadline):
            yield from super().run(jobs, deadline)
            yield Update(1, "mallory", ("sst2",), {ENCODER: torch.full((1,), 99.0)}, None, {"sst2": 1}, {})

    turn = run(Stranger())[1]
    assert turn.state.weights[ENCODER].item() == 1.0
    assert turn.failures[0].client == "mallory"


def test_too_few_updates_end_the_run_with_their_reasons():
    engine = FakeEngine(lambda job: crashed(job) if job.client != "c" else trained(job))
    with pytest.raises(
        RoundFailed,
        match=r"round 1 got 1 updates, federation.min_clients is 2; 2 failed, the first was a: its process ended",
    ) as caught:
        run(engine, min_clients=2)
    assert caught.value.exit_code == 3
    assert [failure.client for failure in caught.value.failures] == ["a", "b"]


def test_jobs_name_the_last_round_the_server_accepted_from_that_client():
    def answer(job):
        return crashed(job) if (job.client, job.round) == ("a", 2) else trained(job)

    engine = FakeEngine(answer)
    run(engine)
    assert [(job.round, job.state_round) for job in engine.jobs if job.client == "a"] == [(1, 0), (2, 1), (3, 1)]


def test_seeds_depend_on_round_and_client_only():
    first, second = FakeEngine(), FakeEngine(lambda job: crashed(job) if job.client == "b" else trained(job))
    run(first)
    run(second)
    seeds = {(job.round, job.client): job.seed for job in first.jobs}
    assert {(job.round, job.client): job.seed for job in second.jobs} == seeds
    assert len(set(seeds.values())) == 9


def test_a_resumed_state_goes_on_to_the_same_end():
    turns = run()
    again = run(state=turns[1].state)
    assert [turn.number for turn in again] == [2, 3]
    assert torch.equal(again[-1].state.weights[ENCODER], turns[-1].state.weights[ENCODER])


def test_sampling_takes_that_many_clients_by_seed():
    engine = FakeEngine()
    run(engine, clients_per_round=2)
    chosen = [{job.client for job in engine.jobs if job.round == number} for number in (1, 2, 3)]
    assert all(len(clients) == 2 for clients in chosen)
    other = FakeEngine()
    run(other, clients_per_round=2)
    assert [job.client for job in other.jobs] == [job.client for job in engine.jobs]


def test_a_fixed_value_travels_once_and_again_to_a_client_that_failed():
    server = make_server()
    state = start()
    fixed = Key("fixed", "layer")
    plan = state.plan.with_rule("layer", "fixed")
    state = replace(
        state, plan=plan, weights={fixed: torch.zeros(1), head("sst2"): torch.zeros(1), head("stsb"): torch.zeros(1)}
    )
    engine = FakeEngine(lambda job: crashed(job) if (job.client, job.round) == ("a", 2) else trained(job))
    list(rounds(state, server, engine, flat))
    carried = {(job.client, job.round): fixed in job.weights for job in engine.jobs}
    assert carried[("b", 1)]
    assert not carried[("b", 2)]
    assert not carried[("b", 3)]
    assert (carried[("a", 1)], carried[("a", 2)], carried[("a", 3)]) == (True, False, True)
    assert all("layer" in job.fixed for job in engine.jobs)


class Late(FakeEngine):
    """Answers only once all jobs are out, in the order given by `arrange`."""

    def __init__(self, arrange):
        super().__init__(lambda job: trained(job, 0.1 + 0.3 * len(self.jobs)))
        self.arrange = arrange

    def run(self, jobs, deadline):
        yield from self.arrange(list(super().run(jobs, deadline)))


def test_the_order_of_arrival_does_not_change_a_bit():
    values = {str(run(Late(arrange))[-1].state.weights) for arrange in (list, reversed, lambda a: [a[1], a[2], a[0]])}
    assert len(values) == 1


def test_an_update_is_let_go_as_soon_as_it_is_in_the_mean():
    kept = []

    class Watching(FakeEngine):
        def run(self, jobs, deadline):
            for answer in super().run(jobs, deadline):
                kept.append(weakref.ref(answer.delta[ENCODER]))
                # The server still has the last one in hand when it asks for this one.
                assert all(before() is None for before in kept[:-2])
                yield answer

    turns = run(Watching())
    assert len(kept) == 9
    # Which values an update had is still known; what they were is not.
    assert {value.device.type for turn in turns[1:] for update in turn.updates for value in update.delta.values()} == {
        "meta"
    }


def test_what_a_method_sent_is_let_go_as_soon_as_it_is_added():
    name, kept, added = "test_server_sender", [], []
    register(Capability(name, check_sent=lambda extra, tasks, options: None))

    class Watching(FakeEngine):
        def run(self, jobs, deadline):
            for answer in super().run(jobs, deadline):
                sent = torch.ones(1)
                kept.append(weakref.ref(sent))
                extra = {name: Extra({"number": len(kept)}, {"slot": {ENCODER: sent}})}
                del sent
                assert all(before() is None for before in kept[:-2])
                yield replace(answer, extra=extra)
                del extra

    class Adding(ServerMethod):
        name = "test_server_sender"

        def add(self, update):
            added.append((update.client, update.extra[self.name].slot("slot")[ENCODER].item()))

    try:
        server = make_server(methods=[Adding()])
        server = replace(server, settings=replace(server.settings, methods={name: {}}))
        turns = list(rounds(start(), server, Watching(), flat))
    finally:
        _REGISTERED.pop(name)
    assert added == [("b", 1.0), ("a", 1.0), ("c", 1.0)] * 3
    # Its values are in the round's record, its tensors are not.
    assert [update.extra[name].values for update in turns[1].updates] == [{"number": n} for n in (2, 1, 3)]


def test_the_longest_to_train_come_first():
    infos = {
        "a": ClientInfo({"sst2": 9}, num_tokens={"sst2": 100}),
        "b": ClientInfo({"sst2": 5}, num_tokens={"sst2": 300}),
        "c": ClientInfo({"stsb": 7}, num_tokens={"stsb": 200}),
    }
    assert list(sample_clients(make_server(), infos, 1)) == ["b", "c", "a"]
    without = {client: ClientInfo(info.num_examples) for client, info in infos.items()}
    assert list(sample_clients(make_server(), without, 1)) == ["a", "c", "b"]


def remark_then_update(job):
    """What a late site's remark of an earlier round once was: a failure first, and the update after it."""
    return [Failure(job.round, job.client, "answered twice, or what is no longer asked"), trained(job, 2.0)]


def test_an_update_that_is_recorded_as_accepted_is_in_the_mean():
    class Remarked(FakeEngine):
        def run(self, jobs, deadline):
            for job in jobs:
                yield from remark_then_update(job) if job.client == "c" else [trained(job, 2.0)]

    turn = run(Remarked())[1]
    assert [update.client for update in turn.updates] == ["a", "b", "c"]
    # All three moved by 2, and c alone has a head of stsb.
    assert {key: value.item() for key, value in turn.state.weights.items()} == {
        ENCODER: 2.0,
        head("sst2"): 2.0,
        head("stsb"): 2.0,
    }


def test_a_claim_of_a_million_examples_counts_for_no_more_than_was_declared():
    steps = {"a": 1.0, "b": 5.0, "c": 10.0}

    def claims(job):
        update = trained(job, steps[job.client])
        return replace(update, num_examples={"sst2": 10**6}) if job.client == "b" else update

    first, honest = (run(FakeEngine(answer))[1] for answer in (claims, lambda job: trained(job, steps[job.client])))
    assert first.state.weights == honest.state.weights
    # a has 1 example, b 3 and c 1: (1 + 15 + 10) / 5
    assert first.state.weights[ENCODER].item() == pytest.approx(5.2)
    assert {update.client: dict(update.num_examples) for update in first.updates}["b"] == {"sst2": 3}


def test_no_client_has_more_than_its_share_of_a_scope():
    steps = {"a": 1.0, "b": 5.0, "c": 10.0}
    engine = FakeEngine(lambda job: trained(job, steps[job.client]))
    first = run(engine, max_share=0.5)[1].state.weights
    # b has 3 of 5 and is cut to 2 of 4: (1 + 2*5 + 10) / 4; of two clients neither has more than half of the head.
    assert first[ENCODER].item() == pytest.approx(5.25)
    assert first[head("sst2")].item() == pytest.approx(3.0)
    assert first[head("stsb")].item() == 10.0


def test_a_state_that_is_not_finite_ends_the_run_before_it_is_kept():
    class Enormous(FakeEngine):
        def clients(self):
            return {
                name: replace(info, num_examples={"sst2": 1, "stsb": 1}) for name, info in super().clients().items()
            }

    # Finite deltas; with the weights they are added to they are not.
    state = replace(start(), weights={key: torch.full((1,), 3.4e38) for key in start().weights})
    engine = Enormous(lambda job: trained(job, 1e9))
    optimizer = {"kind": "none", "learning_rate": 1e30}
    with pytest.raises(RoundFailed, match=r"would no longer be finite, so that the state of round 0 stays"):
        run(engine, state=state, server_optimizer=optimizer)


def test_whatever_is_wrong_with_an_answer_costs_its_client_alone():
    class Unreadable(dict):
        def items(self):
            raise IndexError("not what was checked")

    def answer(job):
        update = trained(job)
        return replace(update, delta=Unreadable(update.delta)) if job.client == "a" else update

    turn = run(FakeEngine(answer))[1]
    assert [(failure.client, failure.reason) for failure in turn.failures] == [
        ("a", "its update cannot be checked: IndexError")
    ]


def test_an_empty_update_does_not_count_for_min_clients():
    def answer(job):
        return replace(trained(job), delta={}) if job.client != "c" else trained(job)

    with pytest.raises(RoundFailed, match=r"round 1 got 1 updates, federation.min_clients is 2"):
        run(FakeEngine(answer), min_clients=2)

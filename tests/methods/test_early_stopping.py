from dataclasses import replace

import torch

from federation.fake_engine import ENCODER, FakeEngine, head, make_server, scores, start
from fedmtl.federation.server import rounds
from fedmtl.runs.event_lines import to_json
from fedmtl.sharing.plan import Extra, Key


def test_early_stopping_fixes_the_head_at_its_best_round_and_the_encoder_goes_on():
    by_round = {0: 0.1, 1: 0.9, 2: 0.5, 3: 0.6}
    engine = FakeEngine()
    server = make_server(patience=1)
    turns = list(rounds(start(), server, engine, lambda state: scores(sst2=by_round[state.round], stsb=0.5)))
    event = {"event": "early_stop", "round": 2, "task": "sst2", "best_round": 1, "score": 0.9}
    assert [tuple(map(to_json, turn.events)) for turn in turns] == [(), (), (event,), ()]
    last = turns[-1].state
    fixed = Key("fixed", "heads.sst2.w")
    # best in round 1, when the head was 1; it was 2 when the task was stopped
    assert last.weights[fixed].item() == 1.0
    assert head("sst2") not in last.weights
    assert last.weights[ENCODER].item() == 3.0
    third = next(job for job in engine.jobs if job.round == 3 and job.client == "a")
    assert third.weights[fixed].item() == 1.0
    assert last.progress["sst2"].best_round == 1


def test_an_undefined_score_is_not_better_and_uses_up_patience():
    server = make_server(patience=2)
    by_round = {0: None, 1: 0.4, 2: None, 3: None}
    turns = list(rounds(start(), server, FakeEngine(), lambda state: scores(sst2=by_round[state.round], stsb=0.5)))
    assert [event.task for event in turns[-1].events] == ["sst2"]
    assert turns[-1].state.progress["sst2"].best_round == 1


def test_what_methods_know_of_a_fixed_head_is_dropped():
    by_round = {0: 0.1, 1: 0.9, 2: 0.5, 3: 0.6}
    tensors = {"slot": {key: torch.ones(1) for key in (ENCODER, head("sst2"), head("stsb"))}}
    state = replace(start(), extra={"other": Extra({"kept": 1}, tensors)})
    server = make_server(patience=1, server_optimizer={"kind": "fedavgm"})
    turns = list(rounds(state, server, FakeEngine(), lambda state: scores(sst2=by_round[state.round], stsb=0.5)))
    assert set(turns[1].state.extra["server_optimizer"].slot("momentum")) == {ENCODER, head("sst2"), head("stsb")}
    last = turns[-1].state.extra
    assert set(last["server_optimizer"].slot("momentum")) == {ENCODER, head("stsb")}
    assert set(last["other"].slot("slot")) == {ENCODER, head("stsb")}
    assert last["other"].values == {"kept": 1}

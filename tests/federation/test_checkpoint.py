import json
from dataclasses import replace

import pytest
import torch

from fedmtl.errors import FedmtlError
from fedmtl.federation.checkpoint import load_checkpoint, save_checkpoint
from fedmtl.federation.messages import LayerTrack, Progress, State
from fedmtl.model.keys import Key
from fedmtl.model.plan import SharingPlan

ENCODER, HEAD = Key("all", "w"), Key("task:sst2", "heads.sst2.weight")
PLAN = SharingPlan((("heads.*", "task"), ("*", "all")), ({"qqp": "pair"},))


def state(number: int, best: tuple[int, float] | None = None) -> State:
    return State(
        number,
        {ENCODER: torch.randn(3), HEAD: torch.randn(2)},
        PLAN,
        {"momentum": {ENCODER: torch.randn(3)}},
        {"sst2": Progress(((0, None), (1, 0.5)), 1, 0.5, {HEAD: torch.randn(2)}, None)},
        {"c1": number},
        best,
    )


def test_a_state_comes_back_whole(tmp_path):
    saved = state(7, (3, 0.9))
    save_checkpoint(tmp_path, saved)
    back = load_checkpoint(tmp_path)
    assert back is not None
    assert torch.equal(back.weights[ENCODER], saved.weights[ENCODER])
    assert torch.equal(back.weights[HEAD], saved.weights[HEAD])
    assert torch.equal(back.server_optimizer["momentum"][ENCODER], saved.server_optimizer["momentum"][ENCODER])
    progress = back.progress["sst2"]
    assert torch.equal(progress.best_head[HEAD], saved.progress["sst2"].best_head[HEAD])
    assert replace(progress, best_head={}) == replace(saved.progress["sst2"], best_head={})
    assert (back.round, back.plan, back.accepted, back.best_overall) == (7, PLAN, {"c1": 7}, (3, 0.9))


def test_what_is_known_of_the_layers_comes_back_and_older_checkpoints_have_none(tmp_path):
    track = LayerTrack({"sst2/stsb": -0.1234567890123}, low=2)
    save_checkpoint(tmp_path, replace(state(3), sharing={"layer.1": track}))
    back = load_checkpoint(tmp_path)
    assert back is not None
    assert back.sharing == {"layer.1": track}
    path = tmp_path / "round-0003.json"
    record = json.loads(path.read_text())
    del record["sharing"]
    path.write_text(json.dumps(record))
    older = load_checkpoint(tmp_path)
    assert older is not None
    assert older.sharing == {}
    assert torch.equal(older.weights[ENCODER], back.weights[ENCODER])


def test_the_last_the_best_and_every_nth_are_kept(tmp_path):
    for number in range(8):
        save_checkpoint(tmp_path, state(number, (min(number, 2), 0.5)), keep_every=3)
    # 7 is the last, 2 the best, 0, 3 and 6 are multiples of 3
    assert sorted(p.name for p in tmp_path.glob("*.json")) == [f"round-000{n}.json" for n in (0, 2, 3, 6, 7)]
    assert len(list(tmp_path.glob("*.safetensors"))) == 5


def test_an_interrupted_last_checkpoint_gives_way_to_the_one_before(tmp_path):
    save_checkpoint(tmp_path, state(1), keep_every=1)
    save_checkpoint(tmp_path, state(2), keep_every=1)
    tensors = tmp_path / "round-0002.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-5])
    back = load_checkpoint(tmp_path)
    assert back is not None
    assert back.round == 1


def test_no_checkpoint_is_none_and_a_named_one_that_is_missing_an_error(tmp_path):
    assert load_checkpoint(tmp_path) is None
    save_checkpoint(tmp_path, state(4))
    with pytest.raises(FedmtlError, match="no checkpoint of round 3; kept: 4"):
        load_checkpoint(tmp_path, 3)

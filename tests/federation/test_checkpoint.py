import json
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
import torch

from fedmtl.config import AdaptiveSharingConfig, ServerOptimizerConfig
from fedmtl.errors import FedmtlError
from fedmtl.federation.checkpoint import check_state, last_whole_checkpoint, load_checkpoint, save_checkpoint
from fedmtl.federation.messages import Progress, State
from fedmtl.methods.adaptive_sharing import AdaptiveSharing, LayerTrack, layer_tracks
from fedmtl.methods.server_optimizers import ServerOptimizer
from fedmtl.model.tensor_files import load_tensors, save_tensors
from fedmtl.sharing.plan import Extra, Key, SharingPlan

ENCODER, HEAD = Key("all", "w"), Key("task:sst2", "heads.sst2.weight")
PLAN = SharingPlan((("heads.*", "task"), ("*", "all")), ({"qqp": "pair"},))


def state(number: int, best: tuple[int, float] | None = None) -> State:
    return State(
        number,
        {ENCODER: torch.randn(3), HEAD: torch.randn(2)},
        PLAN,
        {"sst2": Progress(((0, None), (1, 0.5)), 1, 0.5, None)},
        {"c1": number},
        best,
        {"server_optimizer": Extra(tensors={"momentum": {ENCODER: torch.randn(3)}})},
    )


def with_momentum(momentum: torch.Tensor) -> State:
    return replace(state(7), extra={"server_optimizer": Extra(tensors={"momentum": {ENCODER: momentum}})})


def test_a_state_comes_back_whole(tmp_path):
    saved = state(7, (3, 0.9))
    save_checkpoint(tmp_path, saved)
    back = load_checkpoint(tmp_path)
    assert back is not None
    assert torch.equal(back.weights[ENCODER], saved.weights[ENCODER])
    assert torch.equal(back.weights[HEAD], saved.weights[HEAD])
    momentum, again = (one.extra["server_optimizer"].slot("momentum") for one in (saved, back))
    assert torch.equal(again[ENCODER], momentum[ENCODER])
    assert back.progress == saved.progress
    assert (back.round, back.plan, back.accepted, back.best_overall) == (7, PLAN, {"c1": 7}, (3, 0.9))


def test_what_methods_know_comes_back_and_one_that_knows_nothing_has_no_part(tmp_path):
    extra = {
        "values": Extra({"a": [1, 2.5, None, "x"], "b": {"c": {"d": 0.1}}}),
        "tensors": Extra({"step": 3}, {"first": {ENCODER: torch.randn(3)}, "second": {HEAD: torch.randn(2)}}),
        "masks": Extra(tensors={"mask": {ENCODER: torch.tensor([True, False, True])}}),
    }
    save_checkpoint(tmp_path, replace(state(3), extra=extra))
    back = load_checkpoint(tmp_path)
    assert back is not None
    assert list(back.extra) == list(extra)
    for name, one in extra.items():
        assert back.extra[name].values == one.values
        assert back.extra[name].tensors.keys() == one.tensors.keys()
        for slot, values in one.tensors.items():
            found = back.extra[name].slot(slot)
            assert found.keys() == values.keys()
            assert all(
                torch.equal(found[key], value) and found[key].dtype == value.dtype for key, value in values.items()
            )
    save_checkpoint(tmp_path, replace(state(4), extra={}))
    later = load_checkpoint(tmp_path)
    assert later is not None
    assert later.extra == {}


def test_what_is_known_of_the_layers_comes_back(tmp_path):
    track = LayerTrack({"sst2/stsb": -0.1234567890123}, low=2)
    layers = {"layer.1": {"agreement": dict(track.agreement), "low": track.low, "high": track.high}}
    save_checkpoint(tmp_path, replace(state(3), extra={"adaptive_sharing": Extra({"layers": layers})}))
    back = load_checkpoint(tmp_path)
    assert back is not None
    assert layer_tracks(back) == {"layer.1": track}


def test_the_last_the_best_and_every_nth_are_kept(tmp_path):
    for number in range(8):
        save_checkpoint(tmp_path, state(number, (min(number, 2), 0.5)), keep_every=3)
    # 7 is the last, 2 the best, 0, 3 and 6 are multiples of 3
    assert sorted(p.name for p in tmp_path.glob("*.json")) == [f"round-000{n}.json" for n in (0, 2, 3, 6, 7)]
    assert len(list(tmp_path.glob("*.safetensors"))) == 5


def test_a_broken_last_checkpoint_is_named_and_the_one_before_is_what_a_resume_goes_on_from(tmp_path):
    save_checkpoint(tmp_path, state(1))
    save_checkpoint(tmp_path, state(2))
    tensors = tmp_path / "round-0002.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-5])
    with pytest.raises(FedmtlError, match=r"round-0002\.safetensors: is broken, its sha256"):
        load_checkpoint(tmp_path)
    found = last_whole_checkpoint(tmp_path)
    assert found.state is not None
    assert found.state.round == 1
    assert len(found.broken) == 1
    assert "round-0002.safetensors: is broken" in found.broken[0]


def test_where_every_checkpoint_is_broken_nothing_begins_anew_in_silence(tmp_path):
    save_checkpoint(tmp_path, state(1))
    (tmp_path / "round-0001.json").write_text('{"round": 1')
    with pytest.raises(FedmtlError, match=r"round-0001\.json: bad JSON .*no other checkpoint is whole"):
        last_whole_checkpoint(tmp_path)


def test_a_checkpoint_of_an_earlier_version_is_refused(tmp_path):
    # Its tasks kept their best heads otherwise: a resume would go on without them.
    save_checkpoint(tmp_path, state(2))
    tensors, record = tmp_path / "round-0002.safetensors", tmp_path / "round-0002.json"
    digest = save_tensors(tensors, {**load_tensors(tensors), "best_head.sst2": {HEAD: torch.randn(2)}})
    written = json.loads(record.read_text())
    del written["digest"]
    record.write_text(json.dumps({**written, "sha256": digest}))
    with pytest.raises(
        FedmtlError, match="is of an earlier version, whose tasks stopped early otherwise; run it again"
    ):
        load_checkpoint(tmp_path)


def test_no_checkpoint_is_none_and_a_named_one_that_is_missing_an_error(tmp_path):
    assert load_checkpoint(tmp_path) is None
    save_checkpoint(tmp_path, state(4))
    with pytest.raises(FedmtlError, match="no checkpoint of round 3; saved: 4"):
        load_checkpoint(tmp_path, 3)


def rewritten(path, **changes):
    """The JSON with other values, and a digest that fits them: what somebody would write who knows how."""
    record = json.loads(path.read_text())
    del record["digest"]
    record |= changes
    path.write_text(json.dumps(record))


@pytest.mark.parametrize(
    "changes",
    [
        {"round": 6},
        {"round": True},
        {"round": "7"},
        {"accepted": {"c1": 8}},
        {"accepted": {"c1": -1}},
        {"accepted": []},
        {"plan": {"rules": [["*", "everybody"]], "groups": []}},
        {"plan": {"rules": [["*"]], "groups": []}},
        {"plan": {"rules": []}},
        {"plan": {"rules": [["*", "group.2"]], "groups": [{"qqp": "pair"}]}},
        {"progress": {"sst2": {"scores": [[9, 0.5]], "best_round": 1, "best_score": 0.5, "stopped_round": None}}},
        {"progress": {"sst2": {"scores": [[1, "x"]], "best_round": 1, "best_score": 0.5, "stopped_round": None}}},
        {"progress": {"sst2": {}}},
        {"best_overall": [7]},
        {"best_overall": [70, 0.5]},
        {"sha256": "x"},
        {"extra": []},
        {"extra": {"pruning": 5}},
        {"extra": {"pruning": [["mask", 1]]}},
        {"surprise": 1},
    ],
    ids=lambda changes: json.dumps(changes)[:40],
)
def test_a_record_that_is_not_ours_is_one_line(tmp_path, changes):
    save_checkpoint(tmp_path, state(7))
    rewritten(tmp_path / "round-0007.json", **changes)
    with pytest.raises(FedmtlError, match=r"round-0007\.json: ") as caught:
        load_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 5000, "null", '{"round": ' + "9" * 5000 + "}", "\udcff", '{"round": NaN}']
)
def test_a_record_that_is_no_json_is_one_line(tmp_path, text):
    save_checkpoint(tmp_path, state(7))
    (tmp_path / "round-0007.json").write_text(text, errors="surrogateescape")
    with pytest.raises(FedmtlError, match=r"round-0007\.json: "):
        load_checkpoint(tmp_path)


def test_a_record_that_was_changed_and_still_reads_well_is_noticed(tmp_path):
    save_checkpoint(tmp_path, state(7, (3, 0.9)))
    path = tmp_path / "round-0007.json"
    path.write_text(path.read_text().replace("0.9", "0.8"))
    with pytest.raises(FedmtlError, match="its digest does not fit"):
        load_checkpoint(tmp_path)


def mutations(data: bytes, count: int) -> Iterator[bytes]:
    random = Random(7)
    for _ in range(count):
        changed = bytearray(data)
        for _ in range(random.choice((1, 1, 2, 8))):
            place = random.randrange(len(changed) + 1)
            how = random.randrange(4)
            if how == 0:
                changed[place : place + 1] = bytes([random.randrange(256)])
            elif how == 1:
                del changed[place : place + random.choice((1, 5, 50))]
            elif how == 2:
                changed[place:place] = random.choice([b"[" * 99, b"9" * 40, b"null", b"-1", b'"', b"{}", bytes(8)])
            else:
                del changed[place + 1 :]
        yield bytes(changed)


def test_mutated_records_without_a_digest_and_tensor_files_are_read_or_refused_in_one_line(tmp_path):
    saved = state(7, (3, 0.9))
    save_checkpoint(tmp_path, saved)
    record, tensors = tmp_path / "round-0007.json", tmp_path / "round-0007.safetensors"
    rewritten(record)
    whole = record.read_bytes(), tensors.read_bytes()
    refused: list[str] = []
    for path, data in zip((record, tensors), whole, strict=True):
        for changed in mutations(data, 1500):
            path.write_bytes(changed)
            try:
                load_checkpoint(tmp_path) if path is record else load_tensors(tensors)
            except FedmtlError as error:
                refused.append(str(error))
        path.write_bytes(data)
    assert len(refused) > 2000
    assert not any("\n" in message for message in refused)


SHAPES = {"w": torch.zeros(3), "heads.sst2.weight": torch.zeros(2)}


def test_a_state_of_the_model_passes(tmp_path):
    check_state(state(7), SHAPES, ["sst2"], tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (replace(state(7), weights={ENCODER: torch.zeros(3)}), "it lacks heads.sst2.weight"),
        (replace(state(7), weights={**state(7).weights, Key("all", "v"): torch.zeros(1)}), "it has v of scope all"),
        (replace(state(7), weights={ENCODER: torch.zeros(4), HEAD: torch.zeros(2)}), "w has shape"),
        (replace(state(7), weights={ENCODER: torch.zeros(3).double(), HEAD: torch.zeros(2)}), "w has shape"),
        (replace(state(7), weights={ENCODER: torch.full((3,), torch.nan), HEAD: torch.zeros(2)}), "not finite"),
        (with_momentum(torch.zeros(2)), "momentum: w has shape"),
        (with_momentum(torch.zeros(3).double()), "momentum: w has shape"),
        (with_momentum(torch.full((3,), torch.inf)), "momentum: w has a value that is not finite"),
        (replace(state(7), progress={"qqp": Progress()}), "it has a task qqp"),
        (replace(state(7), plan=replace(PLAN, stopped=("qqp",))), "it has a task qqp"),
        (
            replace(state(7), extra={"pruning": Extra(tensors={"mask": {Key("task:sst2", "w"): torch.ones(3) > 0}})}),
            "pruning.mask: w",
        ),
        (
            replace(state(7), extra={"pruning": Extra(tensors={"mask": {ENCODER: torch.ones(2) > 0}})}),
            "pruning.mask: w",
        ),
        (
            replace(state(7), extra={"pruning": Extra(tensors={"mask": {Key("all", "v"): torch.ones(3)}})}),
            "pruning.mask: v",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_state_of_another_model_is_refused_before_it_is_used(tmp_path, changed, message):
    with pytest.raises(FedmtlError, match=r"of another model or config") as caught:
        check_state(changed, SHAPES, ["sst2"], tmp_path)
    assert message in str(caught.value)


def checks_of(*methods):
    return {method.name: method.check for method in methods}


ADAPTIVE = AdaptiveSharing(AdaptiveSharingConfig(), {"layer.1": ("w",)}, ["sst2"], "weighted")
MOMENTUM = ServerOptimizer(ServerOptimizerConfig(kind="fedavgm"))


def test_a_state_of_the_methods_that_are_switched_on_passes(tmp_path):
    layers = {"layer.1": {"agreement": {"sst2/stsb": 0.5}, "low": 0, "high": 1}}
    known = replace(state(7), extra={**state(7).extra, "adaptive_sharing": Extra({"layers": layers})})
    check_state(known, SHAPES, ["sst2"], tmp_path, checks_of(ADAPTIVE, MOMENTUM))


@pytest.mark.parametrize(
    ("extra", "methods", "message"),
    [
        (state(7).extra, [ADAPTIVE], "it has a state of server_optimizer, which is not switched on"),
        ({"nobody": Extra({"a": 1})}, [ADAPTIVE, MOMENTUM], "it has a state of nobody, which is not switched on"),
        ({"clipped_mean": Extra({"norms": {"all": 1.0}})}, [MOMENTUM], "it has a state of clipped_mean"),
        (
            state(7).extra,
            [ServerOptimizer(ServerOptimizerConfig(kind="none"))],
            "server_optimizer: none has other moments",
        ),
        (
            {"server_optimizer": Extra(tensors={"second_moment": {ENCODER: torch.zeros(3)}})},
            [MOMENTUM],
            "server_optimizer: fedavgm has other moments",
        ),
        ({"server_optimizer": Extra({"more": 1})}, [MOMENTUM], "server_optimizer: "),
        (
            {"adaptive_sharing": Extra({"layers": {"layer.1": {"agreement": {}, "low": -1, "high": 0}}})},
            [ADAPTIVE],
            "adaptive_sharing: layer.1 is no layer that moves",
        ),
        (
            {"adaptive_sharing": Extra({"layers": {"layer.2": {"agreement": {}, "low": 0, "high": 0}}})},
            [ADAPTIVE],
            "adaptive_sharing: layer.2 is no layer that moves",
        ),
        (
            {"adaptive_sharing": Extra({"layers": {"layer.1": {"agreement": {"a/b": float("nan")}}}})},
            [ADAPTIVE],
            "adaptive_sharing: the agreement of layer.1 is no number",
        ),
        ({"adaptive_sharing": Extra({"layers": {"layer.1": {"low": "x"}}})}, [ADAPTIVE], "adaptive_sharing: "),
        ({"adaptive_sharing": Extra({"layers": [1]})}, [ADAPTIVE], "adaptive_sharing: "),
        ({"adaptive_sharing": Extra({"more": 1})}, [ADAPTIVE], "adaptive_sharing: "),
    ],
)
def test_what_a_method_that_is_on_could_not_have_written_is_refused(tmp_path, extra, methods, message):
    with pytest.raises(FedmtlError, match=r"of another model or config") as caught:
        check_state(replace(state(7), extra=extra), SHAPES, ["sst2"], tmp_path, checks_of(*methods))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)

import pytest
import torch

from fedmtl.errors import FedmtlError
from fedmtl.federation.client import InitialValues, extra_slots, fixed_digest, load_state, remember_fixed, save_state
from fedmtl.sharing.plan import Extra, Key, from_slots

OWN = Key("client:c1", "heads.sst2.weight")
FROZEN = Key("fixed", "layer")


def values(number: float) -> dict:
    return {"values": {OWN: torch.tensor([number])}}


def test_a_client_one_round_ahead_steps_back(tmp_path):
    save_state(tmp_path, 1, values(1.0), before=0)
    save_state(tmp_path, 2, values(2.0), before=1)
    # the server was killed before it accepted round 2: it names round 1 again
    assert load_state(tmp_path, 1)["values"][OWN].item() == 1.0
    assert load_state(tmp_path, 2)["values"][OWN].item() == 2.0


def test_only_this_round_and_the_last_accepted_one_are_kept(tmp_path):
    for number in range(1, 6):
        save_state(tmp_path, number, values(float(number)), before=number - 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["round-0004.safetensors", "round-0005.safetensors"]


def test_round_zero_is_a_fresh_start_whatever_lies_there(tmp_path):
    save_state(tmp_path, 1, values(1.0), before=0)
    assert load_state(tmp_path, 0) == {}


def test_a_client_without_anything_of_its_own_writes_nothing(tmp_path):
    save_state(tmp_path / "c", 1, {"values": {}}, before=0)
    assert not (tmp_path / "c").exists()


def test_a_fixed_value_is_kept_by_its_digest(tmp_path):
    value = torch.tensor([3.0])
    digest = {"layer": fixed_digest(FROZEN, value)}
    nothing = InitialValues({})
    remember_fixed(tmp_path, {FROZEN: value}, digest, nothing)
    assert remember_fixed(tmp_path, {}, digest, nothing)[FROZEN].item() == 3.0
    with pytest.raises(KeyError, match="layer"):
        remember_fixed(tmp_path, {}, {"layer": fixed_digest(FROZEN, torch.tensor([4.0]))}, nothing)


def test_a_fixed_value_that_the_model_starts_with_is_not_stored(tmp_path):
    value = torch.tensor([3.0])
    digest = {"layer": fixed_digest(FROZEN, value)}
    initial = InitialValues({Key("", "layer"): value})
    assert remember_fixed(tmp_path, {}, digest, initial)[FROZEN] is value
    remember_fixed(tmp_path, {FROZEN: value.clone()}, digest, initial)
    assert not list(tmp_path.iterdir())


def test_a_state_that_is_gone_is_not_taken_for_one_that_never_was(tmp_path):
    for number in (4, 5):
        save_state(tmp_path, number, values(float(number)), before=number - 1)
    with pytest.raises(FedmtlError, match="keeps its state of rounds 4 and 5, and the server goes on after round 2"):
        load_state(tmp_path, 2)


def test_a_client_that_had_nothing_to_keep_before_steps_back_to_nothing(tmp_path):
    save_state(tmp_path, 1, {"values": {}}, before=0)
    save_state(tmp_path, 2, values(2.0), before=1)
    assert load_state(tmp_path, 1) == {}
    assert load_state(tmp_path, 2)["values"][OWN].item() == 2.0


@pytest.mark.parametrize("data", [b"", b"x", b"\0" * 64, b"\x08" + b"\0" * 7 + b"[" * 8])
def test_a_broken_state_is_one_line(tmp_path, data):
    (tmp_path / "round-0001.safetensors").write_bytes(data)
    with pytest.raises(FedmtlError, match=r"round-0001\.safetensors.*put back a whole copy"):
        load_state(tmp_path, 1)


def test_what_methods_store_comes_back_beside_the_rest(tmp_path):
    stored = {
        "one": Extra(tensors={"slot": {OWN: torch.tensor([1.5])}, "other": {FROZEN: torch.tensor([True, False])}}),
        "two": Extra(tensors={"slot": {OWN: torch.tensor([2.5])}}),
    }
    save_state(tmp_path, 1, {**values(1.0), **extra_slots(stored)}, before=0)
    back = from_slots(load_state(tmp_path, 1))
    assert set(back) == {"one", "two"}
    assert back["one"].slot("slot")[OWN].tolist() == [1.5]
    assert back["one"].slot("other")[FROZEN].tolist() == [True, False]
    assert back["two"].slot("slot")[OWN].tolist() == [2.5]
    assert from_slots(values(1.0)) == {}


def test_a_method_that_would_store_plain_values_is_told_so():
    with pytest.raises(TypeError, match="one stores plain values at a client"):
        extra_slots({"one": Extra({"step": 1})})

import pytest
import torch

from fedmtl.federation.agreement import TaskUpdates
from fedmtl.federation.messages import Update
from fedmtl.sharing.keys import Key
from fedmtl.sharing.plan import SharingPlan

SHARED = SharingPlan((("heads.*", "task"), ("*", "all")))
SPLIT = SHARED.with_rule("enc.0.*", "task")
LAYERS = {"enc.0": ("enc.0.w", "enc.0.b")}
TASKS = ["sst2", "stsb"]


def update(client: str, examples: dict[str, int], delta: dict[str, tuple[float, float]], **more: object) -> Update:
    """A delta per scope: a weight of one number and a bias of one."""
    tensors = {
        Key(scope, f"enc.0.{leaf}"): torch.tensor([value])
        for scope, pair in delta.items()
        for leaf, value in zip("wb", pair, strict=True)
    }
    return Update(1, client, tuple(examples), tensors, None, examples, {}, **more)


SINGLES = [
    update("a", {"sst2": 1}, {"all": (1.0, 0.0)}),
    update("b", {"sst2": 3}, {"all": (1.0, 4.0)}),
    update("c", {"stsb": 2}, {"all": (3.0, -1.0)}),
    update("d", {"stsb": 2}, {"all": (1.0, 1.0)}),
]


def measured(updates, plan=SHARED, average="weighted"):
    before = {
        Key(scope, name): torch.zeros(1) for scope in ("all", "task:sst2", "task:stsb") for name in LAYERS["enc.0"]
    }
    sums = TaskUpdates(LAYERS, TASKS, before, plan, average)
    for each in updates:
        sums.add(each)
    return sums.measure()["enc.0"]


def test_agreement_is_the_cosine_of_the_tasks_mean_deltas():
    # sst2: (1*(1,0) + 3*(1,4)) / 4 = (1,3); stsb: (2*(3,-1) + 2*(1,1)) / 4 = (2,0); 2 / (sqrt(10) * 2) = .316228
    assert measured(SINGLES) == {"sst2/stsb": 0.316228}


def test_in_a_uniform_mean_all_clients_count_the_same():
    # sst2: (1,2), stsb: (2,0): 2 / (sqrt(5) * 2) = .447214
    assert measured(SINGLES, average="uniform") == {"sst2/stsb": 0.447214}


def test_a_client_with_both_tasks_tells_its_own_cosine_which_counts_by_its_examples():
    both = update(
        "e", {"stsb": 5, "sst2": 7}, {"all": (9.0, 9.0)}, inner_products={"enc.0": [[4.0, -3.0], [-3.0, 9.0]]}
    )
    # -3 / sqrt(4 * 9) = -.5 for 12 examples, .316228 for 8: (-6 + 2.529822) / 20 = -.173509
    assert measured([*SINGLES, both]) == {"sst2/stsb": -0.173509}
    assert measured([both]) == {"sst2/stsb": -0.5}
    # two of its tasks are two clients' worth, and there are four others: (2 * -.5 + 4 * .447214) / 6
    assert measured([*SINGLES, both], average="uniform")["sst2/stsb"] == pytest.approx(0.131476, abs=1e-6)


def test_a_split_layer_of_such_a_client_is_told_apart_by_its_deltas():
    both = update(
        "e",
        {"sst2": 1, "stsb": 1},
        {"task:sst2": (1.0, 0.0), "task:stsb": (3.0, 4.0)},
        inner_products={"enc.0": [[1.0, -1.0], [-1.0, 1.0]]},
    )
    # (1,0) and (3,4): 3 / 5
    assert measured([both], SPLIT) == {"sst2/stsb": 0.6}


def test_what_cannot_be_known_is_left_out():
    silent = update("e", {"sst2": 1, "stsb": 1}, {"all": (1.0, 1.0)})
    still = update("f", {"stsb": 1}, {"all": (0.0, 0.0)})
    assert measured([silent]) == {}
    assert measured([SINGLES[0], still]) == {}
    assert measured(SINGLES[:2]) == {}

import torch

from fedmtl.federation.aggregator import aggregate_mtl_updates
from fedmtl.federation.messages import Update
from fedmtl.model.keys import Key
from fedmtl.model.plan import SharingPlan


def test_the_guides_aggregator_splits_the_mean_into_shared_and_heads():
    plan = SharingPlan((("heads.*", "task"), ("*", "all")))
    encoder, head = Key("all", "layer"), Key("task:sst2", "heads.sst2.weight")
    before = {
        encoder: torch.tensor([10.0]),
        head: torch.tensor([0.0]),
        Key("task:qqp", "heads.qqp.weight"): torch.ones(1),
    }
    updates = [
        Update(1, "a", ("sst2",), {encoder: torch.tensor([1.0]), head: torch.tensor([2.0])}, None, {"sst2": 1}, {}),
        Update(1, "b", ("sst2",), {encoder: torch.tensor([5.0]), head: torch.tensor([6.0])}, None, {"sst2": 3}, {}),
    ]
    result = aggregate_mtl_updates(updates, before, plan)
    # encoder: 10 + (1*1 + 3*5)/4 = 14; head: (1*2 + 3*6)/4 = 5; nobody returned qqp's head
    assert {name: value.item() for name, value in result["shared"].items()} == {"layer": 14.0}
    assert list(result["task_heads"]) == ["sst2"]
    assert result["task_heads"]["sst2"]["heads.sst2.weight"].item() == 5.0

import pytest
import torch

from fedmtl.errors import ModelError
from fedmtl.model.server_model import MTLServerModel
from fedmtl.sharing.keys import Key
from fedmtl.sharing.plan import SharingPlan
from fedmtl.sharing.weights import initial_weights

from .tiny import load, make_task

PLAN = SharingPlan(
    (("heads.*", "task"), ("encoder.layer.1.*", "group"), ("encoder.layer.0.*", "fixed"), ("*", "all")),
    ({"qqp": "pair", "stsb": "pair"},),
)


@pytest.fixture
def server(folders):
    tasks = [make_task("sst2", pool="cls"), make_task("qqp", pool="cls"), make_task("stsb", pool="cls")]
    return MTLServerModel(load(folders["bert"], tasks)[1], PLAN)


def test_shared_parameters_are_those_of_every_client(server):
    shared = server.get_shared_parameters()
    assert shared
    assert all(name.startswith("embeddings.") for name in shared)


def test_a_slice_holds_what_the_plan_gives_the_task(server):
    late = "encoder.layer.1.output.dense.bias"
    server.weights[Key("group:pair", late)] += 1.0
    server.weights[Key("task:sst2", late)] += 2.0
    slices = {task: server.get_model_slice_for_task(task) for task in ("sst2", "qqp", "stsb")}
    assert slices["qqp"][late] is slices["stsb"][late]
    torch.testing.assert_close(slices["sst2"][late] - slices["qqp"][late], torch.ones(32))
    for task, part in slices.items():
        assert [name for name in part if name.startswith("heads.")] == [f"heads.{task}.weight", f"heads.{task}.bias"]
        assert set(server.get_shared_parameters()) <= set(part)
        assert any(name.startswith("encoder.layer.0.") for name in part)
    # One name, one value: the slice has as many tensors as the encoder and one head.
    assert len(slices["qqp"]) == len(server.get_shared_parameters()) + 2 * 16 + 2


def test_what_was_set_is_what_one_gets_and_the_rest_stays(server):
    before = server.get_model_slice_for_task("qqp")
    name = "embeddings.LayerNorm.bias"
    given = torch.full((32,), 5.0)
    server.set_shared_parameters({name: given})
    server.set_task_head_parameters("sst2", {"heads.sst2.bias": torch.tensor([1.0, 2.0])})
    given.zero_()
    assert server.get_shared_parameters()[name].tolist() == [5.0] * 32
    assert server.get_task_head_parameters("sst2")["heads.sst2.bias"].tolist() == [1.0, 2.0]
    after = server.get_model_slice_for_task("qqp")
    assert {key for key in after if not torch.equal(after[key], before[key])} == {name}
    assert list(server.get_task_head_parameters("qqp")) == ["heads.qqp.weight", "heads.qqp.bias"]


def test_given_weights_are_the_ones_read_and_written(folders):
    _, model = load(folders["bert"], [make_task("sst2", pool="cls")])
    plan = SharingPlan((("heads.*", "task"), ("*", "all")))
    weights = initial_weights(model, plan)
    server = MTLServerModel(model, plan, weights)
    server.set_task_head_parameters("sst2", {"heads.sst2.bias": torch.tensor([4.0, 5.0])})
    assert weights[Key("task:sst2", "heads.sst2.bias")].tolist() == [4.0, 5.0]


def test_a_head_that_stays_at_its_clients_is_not_the_servers(folders):
    _, model = load(folders["bert"], [make_task("sst2", pool="cls")])
    server = MTLServerModel(model, SharingPlan((("heads.*", "client"), ("*", "all"))))
    assert server.get_task_head_parameters("sst2") == {}
    assert server.get_model_slice_for_task("sst2").keys() == server.get_shared_parameters().keys()


def test_unknown_names_and_wrong_shapes_change_nothing(server):
    good = {"embeddings.LayerNorm.bias": torch.full((32,), 9.0)}
    for params, reason in (
        ({"encoder.layer.1.output.dense.bias": torch.ones(32)}, "is no parameter shared by all"),
        ({"embeddings.LayerNorm.weight": torch.ones(31)}, r"has shape \(31,\), the model's is \(32,\)"),
    ):
        with pytest.raises(ModelError, match=reason):
            server.set_shared_parameters({**good, **params})
    with pytest.raises(ModelError, match=r"`heads.qqp.bias` is no parameter in the head of sst2"):
        server.set_task_head_parameters("sst2", {"heads.qqp.bias": torch.ones(2)})
    with pytest.raises(ModelError, match="no task mnli; the model has sst2, qqp, stsb"):
        server.get_model_slice_for_task("mnli")
    assert server.get_shared_parameters()["embeddings.LayerNorm.bias"].max() < 9.0

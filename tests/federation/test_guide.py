"""The guide's two classes, by their names in the guide."""

import json

import numpy as np
import pytest
import torch

from fedmtl.errors import ModelError
from fedmtl.experiment.prepare import prepare
from fedmtl.federation.guide import MTLAggregator, MTLServerModel
from fedmtl.federation.messages import Update
from fedmtl.sharing.plan import Key, SharingPlan
from fedmtl.sharing.weights import initial_weights
from model.tiny import load, make_task, write_encoder

BIAS = "embeddings.LayerNorm.bias"
ENCODER, HEAD = Key("all", BIAS), Key("task:sst2", "heads.sst2.bias")
PLAN = SharingPlan(
    (("heads.*", "task"), ("encoder.layer.1.*", "group"), ("encoder.layer.0.*", "fixed"), ("*", "all")),
    ({"qqp": "pair", "stsb": "pair"},),
)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return write_encoder("bert", tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def server(bert):
    tasks = [make_task("sst2", pool="cls"), make_task("qqp", pool="cls"), make_task("stsb", pool="cls")]
    return MTLServerModel(load(bert, tasks)[1], PLAN)


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


def test_given_weights_are_the_ones_read_and_written(bert):
    _, model = load(bert, [make_task("sst2", pool="cls")])
    plan = SharingPlan((("heads.*", "task"), ("*", "all")))
    weights = initial_weights(model, plan)
    server = MTLServerModel(model, plan, weights)
    server.set_task_head_parameters("sst2", {"heads.sst2.bias": torch.tensor([4.0, 5.0])})
    assert weights[Key("task:sst2", "heads.sst2.bias")].tolist() == [4.0, 5.0]


def test_a_head_that_stays_at_its_clients_is_not_the_servers(bert):
    _, model = load(bert, [make_task("sst2", pool="cls")])
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


def plain_config(bert, **sections):
    tasks = {"sst2": {}, "qqp": {}, "stsb": {}}
    model = {"server_model": str(bert), "max_length": 16, "pool": "cls"}
    return {"model": model, "tasks": tasks, **sections}


def test_a_config_gives_the_model_that_its_run_starts_with(make_config):
    for overrides in (
        ["seed=3"],
        ["mode=federated_single_task"],
        ["training.loss_weighting=uncertainty", "sharing.groups={pair: [paraphrase, similarity]}"],
    ):
        config = make_config(*overrides)
        expected = prepare(config).state
        server = MTLServerModel.from_config(config)
        assert server.plan == expected.plan
        assert server.weights.keys() == expected.weights.keys()
        assert all(torch.equal(server.weights[key], value) for key, value in expected.weights.items())


def test_the_guides_config_needs_no_data(bert, tmp_path):
    mapping = plain_config(bert, data={"root": str(tmp_path / "nothing there")})
    server = MTLServerModel.from_config(mapping)
    assert server.tasks == ("sst2", "qqp", "stsb")
    heads = {task: server.get_task_head_parameters(task) for task in server.tasks}
    assert [tuple(head[f"heads.{task}.weight"].shape) for task, head in heads.items()] == [(2, 32), (2, 32), (1, 32)]


def test_labels_that_only_the_data_has_are_read_from_it(bert, tmp_path):
    rows = "".join(f"words {n}\t{label}\n" for n, label in enumerate("abcabcabc"))
    (tmp_path / "train.tsv").write_text(f"message\tcategory\n{rows}")
    own = {"kind": "classification", "source": {"train": "train.tsv"}, "text": "message", "label": "category"}
    path = tmp_path / "own.yaml"
    path.write_text(json.dumps(plain_config(bert) | {"tasks": {"tickets": own}}))
    server = MTLServerModel.from_config(path)
    assert server.get_task_head_parameters("tickets")["heads.tickets.weight"].shape == (3, 32)


def make_update(client: str, examples: int, encoder: float, head: float) -> Update:
    delta = {ENCODER: torch.full((32,), encoder), HEAD: torch.full((2,), head)}
    return Update(1, client, ("sst2",), delta, None, {"sst2": examples}, {})


def test_the_mean_is_split_into_shared_and_heads(server):
    server.set_shared_parameters({BIAS: torch.full((32,), 10.0)})
    before = server.get_task_head_parameters("sst2")[HEAD.name].clone()
    updates = [make_update("a", 1, 1.0, 2.0), make_update("b", 3, 5.0, 6.0)]
    result = MTLAggregator(server).aggregate_mtl_updates(updates)
    # encoder: 10 + (1*1 + 3*5)/4 = 14; head: its start + (1*2 + 3*6)/4 = + 5; nobody returned the other heads
    assert {name: value.unique().tolist() for name, value in result["shared"].items()} == {BIAS: [14.0]}
    assert list(result["task_heads"]) == ["sst2"]
    torch.testing.assert_close(result["task_heads"]["sst2"][HEAD.name] - before, torch.full((2,), 5.0))

    assert server.get_shared_parameters()[BIAS].unique().tolist() == [10.0]
    server.set_shared_parameters(result["shared"])
    for task, head in result["task_heads"].items():
        server.set_task_head_parameters(task, head)
    assert server.get_shared_parameters()[BIAS].unique().tolist() == [14.0]
    torch.testing.assert_close(server.get_model_slice_for_task("sst2")[HEAD.name] - before, torch.full((2,), 5.0))


def test_plain_updates_are_values_after_training(server):
    slices = {task: server.get_model_slice_for_task(task) for task in ("sst2", "qqp")}

    def trained(task: str, encoder: float, head: float) -> dict[str, torch.Tensor]:
        changed = {BIAS: torch.full((32,), encoder), f"heads.{task}.bias": torch.full((2,), head)}
        return {name: value.clone() for name, value in (slices[task] | changed).items()}

    updates = [
        {"task": "sst2", "parameters": trained("sst2", 2.0, 1.0), "metrics": {"loss": 0.5}, "client_id": "b"},
        {"task": "sst2", "parameters": trained("sst2", 4.0, 3.0), "metrics": {"loss": 0.4}, "client_id": "a"},
        {"task": "qqp", "parameters": trained("qqp", 9.0, 7.0), "metrics": {"loss": 0.7}, "client_id": "c"},
    ]
    result = MTLAggregator(server).aggregate_mtl_updates(updates)
    # The encoder is the mean of all three, (2 + 4 + 9) / 3; a head that of its task's clients.
    torch.testing.assert_close(result["shared"][BIAS], torch.full((32,), 5.0))
    torch.testing.assert_close(result["task_heads"]["sst2"]["heads.sst2.bias"], torch.full((2,), 2.0))
    torch.testing.assert_close(result["task_heads"]["qqp"]["heads.qqp.bias"], torch.full((2,), 7.0))
    assert result["shared"].keys() == server.get_shared_parameters().keys()
    assert result["task_heads"].keys() == {"sst2", "qqp"}

    counted = [{**update, "num_examples": count} for update, count in zip(updates, (1, 2, 3), strict=True)]
    result = MTLAggregator(server).aggregate_mtl_updates(counted)
    # (1*2 + 2*4 + 3*9) / 6 and (1*1 + 2*3) / 3
    torch.testing.assert_close(result["shared"][BIAS], torch.full((32,), 37 / 6))
    torch.testing.assert_close(result["task_heads"]["sst2"]["heads.sst2.bias"], torch.full((2,), 7 / 3))
    result = MTLAggregator(server, {"qqp": 2.0}).aggregate_mtl_updates(counted)
    # A task that weighs two counts as twice its examples: (1*2 + 2*4 + 6*9) / 9
    torch.testing.assert_close(result["shared"][BIAS], torch.full((32,), 64 / 9))


def test_plain_updates_and_our_own_give_the_same_mean(server):
    start = server.get_shared_parameters()[BIAS]
    ours = make_update("b", 3, 5.0, 0.0)
    plain = {"task": "sst2", "parameters": {BIAS: (start + 1.0).numpy()}, "num_examples": 1, "client_id": "a"}
    result = MTLAggregator(server).aggregate_mtl_updates([ours, plain])
    torch.testing.assert_close(result["shared"][BIAS] - start, torch.full((32,), 4.0))


def test_values_that_never_move_may_come_back_and_do_not_move(server):
    fixed = "encoder.layer.0.output.dense.bias"
    update = {"task": "sst2", "parameters": {BIAS: torch.ones(32), fixed: torch.full((32,), 9.0)}}
    result = MTLAggregator(server).aggregate_mtl_updates([update])
    assert list(result["shared"]) == [BIAS]
    assert result["task_heads"] == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"params": {}}, "update 2: unknown key 'params'; did you mean `parameters`?"),
        ({"task": "sst3"}, "update 2: `task` is 'sst3'; the model has sst2, qqp, stsb"),
        ({"task": None}, "update 2: `task` is nothing; the model has sst2, qqp, stsb"),
        ({"parameters": {}}, "update 2: `parameters` is {}; write the client's values by name"),
        ({"num_examples": 0}, "update 2: `num_examples` is 0; write a whole number of 1 or more"),
        (
            {"parameters": {"heads.qqp.bias": torch.ones(2)}},
            "`heads.qqp.bias` is no parameter of sst2's slice (update 2)",
        ),
        ({"parameters": {BIAS: torch.ones(31)}}, f"`{BIAS}`: has shape (31,), the model's is (32,)"),
        ({"parameters": {BIAS: torch.full((32,), np.nan)}}, f"update 2: `{BIAS}` has values that are not finite"),
        ({"parameters": {BIAS: "many"}}, f"update 2: `{BIAS}` is 'many'; write a tensor or an array of numbers"),
    ],
)
def test_a_wrong_plain_update_is_one_line(server, change, message):
    good = {"task": "sst2", "parameters": {BIAS: torch.ones(32)}, "num_examples": 4}
    with pytest.raises(ModelError) as caught:
        MTLAggregator(server).aggregate_mtl_updates([good, {**good, **change}])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_counts_are_given_for_all_updates_or_for_none(server):
    counted = {"task": "sst2", "parameters": {BIAS: torch.ones(32)}, "num_examples": 4}
    plain = {"task": "sst2", "parameters": {BIAS: torch.ones(32)}}
    with pytest.raises(ModelError, match="update 2: has no `num_examples`, others have; give it for all, or for none"):
        MTLAggregator(server).aggregate_mtl_updates([counted, plain])
    with pytest.raises(ModelError, match="update 1: has no `num_examples`"):
        MTLAggregator(server).aggregate_mtl_updates([plain, make_update("a", 1, 1.0, 1.0)])

import torch

from fedmtl import MTLAggregator, MTLServerModel
from fedmtl.experiment.prepare import prepare
from fedmtl.federation.messages import Update
from fedmtl.sharing.keys import Key

ENCODER, HEAD = Key("all", "embeddings.LayerNorm.bias"), Key("task:sentiment", "heads.sentiment.bias")


def test_the_guides_aggregator_splits_the_mean_into_shared_and_heads(make_config):
    prepared = prepare(make_config())
    server = MTLServerModel(prepared.model, prepared.state.plan, dict(prepared.state.weights))
    server.set_shared_parameters({ENCODER.name: torch.full((32,), 10.0)})

    def update(client: str, examples: int, encoder: float, head: float) -> Update:
        delta = {ENCODER: torch.full((32,), encoder), HEAD: torch.full((2,), head)}
        return Update(1, client, ("sentiment",), delta, None, {"sentiment": examples}, {})

    result = MTLAggregator(server).aggregate_mtl_updates([update("a", 1, 1.0, 2.0), update("b", 3, 5.0, 6.0)])
    # encoder: 10 + (1*1 + 3*5)/4 = 14; head: 0 + (1*2 + 3*6)/4 = 5; nobody returned the other heads
    assert {name: value.unique().tolist() for name, value in result["shared"].items()} == {ENCODER.name: [14.0]}
    assert list(result["task_heads"]) == ["sentiment"]
    assert result["task_heads"]["sentiment"][HEAD.name].tolist() == [5.0, 5.0]

    server.set_shared_parameters(result["shared"])
    for task, head in result["task_heads"].items():
        server.set_task_head_parameters(task, head)
    assert server.get_shared_parameters()[ENCODER.name].unique().tolist() == [14.0]
    assert server.get_model_slice_for_task("sentiment")[HEAD.name].tolist() == [5.0, 5.0]

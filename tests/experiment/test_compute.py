import pytest
import torch

from fedmtl.errors import ConfigError
from fedmtl.experiment.prepare import Compute, prepare
from fedmtl.training.stacked.shape import MOST, client_bytes, clients_at_once


def test_a_cpu_trains_one_by_one_unless_told(make_config):
    assert prepare(make_config()).compute == Compute("cpu", 0, 0, "fp32")
    assert prepare(make_config("compute.stack=4")).compute == Compute("cpu", 0, 4, "fp32")


def test_a_stack_is_no_larger_than_the_population(make_config):
    assert prepare(make_config("compute.stack=50")).compute.stack == 6


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("compute.stack=2", "compute.workers=2"), "compute.stack: 2 clients at once train in one process; write `wor"),
        (("compute.stack=2", "compute.encoder=plain"), "compute.stack: only plain encoders laid out as BERT can be"),
        (("compute.precision=bf16",), "compute.precision: bf16 is for clients that train at once; write `stack: 1`"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(settings, said, make_config):
    with pytest.raises(ConfigError, match=said[:60]):
        prepare(make_config(*settings))


def test_as_many_as_fit_into_the_memory_left(make_config):
    model = prepare(make_config()).model
    one = client_bytes(model, 32, 128, torch.bfloat16)
    parameters = sum(getattr(module, leaf).numel() for module, leaf in model.canonical().values())
    # Values, their start, gradients and two means in fp32, a copy in bf16.
    assert one > parameters * 22
    assert clients_at_once(model, 32, 128, 10 * one, torch.bfloat16) == 6
    assert clients_at_once(model, 32, 128, one // 2, torch.bfloat16) == 1
    assert clients_at_once(model, 32, 128, 10_000 * one, torch.bfloat16) == MOST
    model.layout = None
    assert clients_at_once(model, 32, 128, 10 * one, torch.bfloat16) == 0

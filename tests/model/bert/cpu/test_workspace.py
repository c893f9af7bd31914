import torch

from fedmtl.model.bert.cpu.encoder_pass import Workspace


def test_a_name_gives_the_same_memory_until_more_is_asked_for():
    space = Workspace()
    first = space.take("a", torch.float32, 4, 4)
    # 16 values and an eighth more: 18 fit, 19 do not.
    assert space.take("a", torch.float32, 18).data_ptr() == first.data_ptr()
    assert space.take("b", torch.float32, 4, 4).data_ptr() != first.data_ptr()
    assert space.take("a", torch.float32, 19).data_ptr() != first.data_ptr()
    assert space.take("a", torch.float64, 2).dtype == torch.float64


def test_memory_that_scoring_made_serves_training():
    space = Workspace()
    with torch.inference_mode():
        made = space.take("a", torch.float32, 3)
    assert not made.is_inference()

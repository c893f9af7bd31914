import torch

from fedmtl.model.bert.layout import mean_pool


def test_a_mean_leaves_padding_out():
    hidden = torch.tensor([[[1.0], [3.0], [100.0]], [[5.0], [100.0], [100.0]]])
    assert mean_pool(hidden, torch.tensor([[True, True, False], [True, False, False]])).tolist() == [[2.0], [5.0]]

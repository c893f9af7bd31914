import torch
from torch.nn import functional as F

from fedmtl.model.bert.autograd import attend, head_slots
from fedmtl.model.bert.layout import pack

MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])


def test_values_and_gradients_are_those_of_padded_attention():
    torch.manual_seed(0)
    batch = pack(MASK, MASK, MASK)
    at = head_slots(batch, 2, torch.float64)
    tokens = [torch.randn(9, 6, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    dropped = torch.randint(0, 2, (6, 4, 4)).double() * 2

    ours = attend(*tokens, at, dropped)

    def padded(part):
        return batch.pad(part).view(3, 4, 2, 3).transpose(1, 2)

    q, k, v = map(padded, tokens)
    scores = (q @ k.transpose(2, 3) / 3**0.5).masked_fill(MASK[:, None, None] == 0, -torch.inf)
    mixed = (scores.softmax(-1) * dropped.view(3, 2, 4, 4)) @ v
    plain = mixed.transpose(1, 2).reshape(12, 6)[batch.slots]
    torch.testing.assert_close(ours, plain, atol=1e-14, rtol=0)

    weights = torch.randn_like(ours)
    for a, b in zip(*(torch.autograd.grad((out * weights).sum(), tokens) for out in (ours, plain)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-14, rtol=0)


def test_without_a_mask_it_is_torchs_own_attention():
    batch = pack(MASK[2:], MASK[2:], MASK[2:])
    q, k, v = (torch.randn(4, 6, dtype=torch.float64) for _ in range(3))
    ours = attend(q, k, v, head_slots(batch, 2, torch.float64), None)
    plain = F.scaled_dot_product_attention(*(part.view(4, 2, 3).transpose(0, 1) for part in (q, k, v)))
    torch.testing.assert_close(ours, plain.transpose(0, 1).reshape(4, 6), atol=1e-14, rtol=0)

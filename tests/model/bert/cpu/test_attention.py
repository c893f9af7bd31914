import pytest
import torch

from fedmtl.model.bert.cpu.encoder import attend, attend_backward, attention_slots, padded_width
from fedmtl.model.bert.layout import pack

MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])


@pytest.mark.parametrize(("width", "padded"), [(3, 16), (16, 16), (17, 17), (28, 28), (29, 32), (32, 32), (45, 48)])
def test_widths_are_filled_up_where_little_is_missing(width, padded):
    assert padded_width(width) == padded


@pytest.mark.parametrize("is_dropped", [True, False])
def test_values_and_gradients_are_those_of_padded_attention(is_dropped):
    torch.manual_seed(0)
    batch = pack(MASK, MASK, MASK)
    at = attention_slots(batch, 2, torch.float64)
    joint = torch.randn(9, 18, dtype=torch.float64, requires_grad=True)
    dropped = torch.randint(0, 2, (6, 16, 16)).double() * 2 if is_dropped else None

    def take(name, *shape):
        return torch.full(shape, torch.nan, dtype=torch.float64)

    ours, saved = attend(joint.detach(), at, dropped, take, take)

    q, k, v = (batch.pad(part).view(3, 4, 2, 3).transpose(1, 2) for part in joint.chunk(3, 1))
    scores = (q @ k.transpose(2, 3) / 3**0.5).masked_fill(MASK[:, None, None] == 0, -torch.inf)
    shares = scores.softmax(-1) * (1 if dropped is None else dropped.view(3, 2, 16, 16)[..., :4, :4])
    plain = (shares @ v).transpose(1, 2).reshape(12, 6)[batch.slots]
    torch.testing.assert_close(ours, plain, atol=1e-14, rtol=0)

    weights = torch.randn_like(ours)
    [expected] = torch.autograd.grad((plain * weights).sum(), joint)
    given = attend_backward(saved, torch.cat([weights, torch.zeros(1, 6)]), at, take)
    torch.testing.assert_close(given, expected, atol=1e-14, rtol=0)

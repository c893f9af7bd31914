import torch

from fedmtl.model.bert.cpu.encoder_pass import Gradients


def test_a_gradient_goes_where_it_is_kept_and_otherwise_into_a_fresh_tensor():
    kept = torch.full((2,), 9.0)
    gradients = Gradients({"a.x": torch.zeros(2), "b.y": torch.zeros(1, 2)}, {"a.x": kept, "c.z": kept})
    gradients.put("a.x", torch.tensor([1.0, 2.0]))
    gradients.put("b.y", torch.tensor([3.0, 4.0]))
    gradients.put("c.z", torch.tensor([5.0, 6.0]))
    gradients.put("a.x", None)
    assert kept.tolist() == [1, 2]
    assert {name: value.tolist() for name, value in gradients.fresh.items()} == {"b.y": [[3, 4]]}
    assert [value.tolist() for value in gradients.fresh_in_order()] == [[[3, 4]]]
    assert [gradients.wants_any(prefix) for prefix in ("a.", "c.")] == [True, False]

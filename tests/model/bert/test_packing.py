import torch

from fedmtl.model.bert.layout import pack

IDS = torch.tensor([[5, 6, 7, 0], [8, 9, 0, 0], [1, 2, 3, 4]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])


def test_real_tokens_come_end_to_end_with_their_positions():
    batch = pack(IDS, MASK, MASK)
    assert batch.ids.tolist() == [5, 6, 7, 8, 9, 1, 2, 3, 4]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert batch.firsts.tolist() == [0, 3, 5]
    assert (batch.num_rows, batch.width) == (3, 4)


def test_padding_holds_the_rows_first_token():
    padded = pack(IDS, MASK, MASK).pad(torch.arange(9.0)[:, None])
    assert padded.squeeze(-1).tolist() == [[0, 1, 2, 0], [3, 4, 3, 3], [5, 6, 7, 8]]


def test_each_token_is_found_at_its_place():
    batch = pack(IDS, MASK, MASK)
    assert torch.equal(IDS.reshape(-1)[batch.slots], batch.ids)
    assert torch.equal(batch.pad(batch.ids[:, None]).reshape(-1)[batch.slots], batch.ids)

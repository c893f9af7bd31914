import torch

from fedmtl.model.packing import pack

IDS = torch.tensor([[5, 6, 7, 0], [8, 9, 0, 0], [1, 2, 3, 4]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])


def test_real_tokens_come_end_to_end_with_their_positions():
    batch = pack(IDS, MASK, MASK)
    assert batch.ids.tolist() == [5, 6, 7, 8, 9, 1, 2, 3, 4]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert batch.firsts.tolist() == [0, 3, 5]
    assert (batch.num_rows, batch.width) == (3, 4)


def test_padding_and_unpadding_are_inverse_and_padding_holds_the_rows_first_token():
    batch = pack(IDS, MASK, MASK)
    tokens = torch.arange(9.0)[:, None]
    padded = batch.pad(tokens)
    assert padded.squeeze(-1).tolist() == [[0, 1, 2, 0], [3, 4, 3, 3], [5, 6, 7, 8]]
    assert torch.equal(batch.unpad(padded), tokens)

import numpy as np
import pytest
import torch

from fedmtl.errors import WireError
from fedmtl.federation.messages import Codecs
from fedmtl.sharing.plan import NO_EXTRA, Extra, Key

from .leaving import leave

W, TABLE = Key("all", "w"), Key("all", "table")


def total(codecs: Codecs, delta: list[float], rounds: int) -> list[float]:
    """What the server has after some rounds in which a client sends the same delta."""
    stored = NO_EXTRA
    arrived = torch.zeros(1, len(delta))
    for _ in range(rounds):
        sent, stored = leave({W: torch.tensor([delta])}, codecs, stored)
        arrived += sent[W]
    return arrived[0].tolist()


def test_int8_with_error_feedback_arrives_and_without_it_does_not():
    # The scale is 127 / 127 = 1, so 0.4 is rounded to 0 each time.
    assert total(Codecs(up="int8", error_feedback=False), [127.0, 0.4], 5) == [635.0, 0.0]
    # 0.4 -> 0, keeps 0.4; 0.8 -> 1, keeps -0.2; 0.2 -> 0; 0.6 -> 1, keeps -0.4; 0.0 -> 0: two in all, 5 * 0.4.
    assert total(Codecs(up="int8"), [127.0, 0.4], 5) == [635.0, 2.0]


def test_topk_with_error_feedback_arrives_and_without_it_does_not():
    half = {"up": "topk", "topk_share": 0.5}
    assert total(Codecs(**half, error_feedback=False), [1.0, 0.625], 4) == [4.0, 0.0]
    # (1, .625) sends 1; (1, 1.25) sends 1.25; (2, .625) sends 2; (1, 1.25) sends 1.25
    assert total(Codecs(**half), [1.0, 0.625], 4) == [3.0, 2.5]


@pytest.mark.parametrize("codec", ["fp16", "int8", "topk"])
def test_what_arrived_and_what_is_kept_are_all_there_was(codec):
    generator = torch.Generator().manual_seed(0)
    stored = NO_EXTRA
    given, arrived = torch.zeros(6, 50), torch.zeros(6, 50)
    for _ in range(20):
        delta = torch.randn(6, 50, generator=generator) * 1e-3
        sent, stored = leave({W: delta}, Codecs(up=codec, topk_share=0.1), stored)
        given += delta
        arrived += sent[W]
    torch.testing.assert_close(arrived + stored.slot("residual")[W], given, atol=1e-7, rtol=0)


def test_gradient_descent_with_int8_ends_nearer_with_error_feedback():
    # f(x) = |x - target|^2 / 2 with one steep direction that sets the scale, and 39 that are 1000 times flatter.
    curvature = torch.tensor([[1.0] + [1e-3] * 39])
    target = torch.linspace(-1, 1, 40).view(1, 40)

    def distance(codecs: Codecs) -> float:
        x, stored = torch.zeros(1, 40), NO_EXTRA
        for step in range(400):
            # the steep direction never settles: as with batches, its gradient changes sign
            gradient = curvature * (x - target)
            gradient[0, 0] = 1.0 if step % 2 else -1.0
            sent, stored = leave({W: -gradient}, codecs, stored)
            x = x + sent[W]
        return float((x - target)[0, 1:].norm())

    exact = distance(Codecs())
    assert distance(Codecs(up="int8")) < exact + 0.05
    # Steps of less than half a 127th are all rounded to zero: it never leaves the start, |target| = 3.55.
    assert distance(Codecs(up="int8", error_feedback=False)) == pytest.approx(float(target[0, 1:].norm()))
    assert exact < 2.5


def test_residuals_belong_to_rows_of_the_whole_table():
    codecs = Codecs(up="topk", topk_share=0.1)
    delta = {TABLE: torch.tensor([[9.0, 1.0], [2.0, 0.0], [3.0, 0.0]])}
    # one entry of six is sent: 9. Rows 4, 7 and 8 keep the rest.
    sent, stored = leave(delta, codecs, rows=np.array([4, 7, 8]))
    assert sent[TABLE].tolist() == [[9.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    # Now the client has rows 2, 7 and 8: 7 sends its old 2 on top of 5. Row 4 waits.
    delta = {TABLE: torch.tensor([[1.0, 0.0], [5.0, 0.0], [0.0, 0.0]])}
    sent, stored = leave(delta, codecs, stored, np.array([2, 7, 8]))
    assert sent[TABLE].tolist() == [[0.0, 0.0], [7.0, 0.0], [0.0, 0.0]]
    assert stored.slot("residual_rows")[TABLE].tolist() == [2, 4, 7, 8]
    assert stored.slot("residual")[TABLE].tolist() == [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [3.0, 0.0]]
    # Row 4 is back: its 1 comes with it.
    sent, stored = leave({TABLE: torch.tensor([[0.0, 5.0]])}, codecs, stored, np.array([4]))
    assert sent[TABLE].tolist() == [[0.0, 6.0]]
    assert stored.slot("residual_rows")[TABLE].tolist() == [2, 4, 7, 8]


def test_what_belongs_to_tasks_that_rest_stays():
    before = Extra(tensors={"residual": {Key("task:a", "w"): torch.ones(1, 2)}, "residual_rows": {}})
    _, after = leave({W: torch.tensor([[127.0, 0.4]])}, Codecs(up="int8"), before)
    assert after.slot("residual")[Key("task:a", "w")].tolist() == [[1.0, 1.0]]
    assert after.slot("residual")[W][0].tolist() == pytest.approx([0.0, 0.4])


def test_exact_updates_are_left_alone():
    delta = {W: torch.ones(1, 2)}
    sent, stored = leave(delta, Codecs())
    assert sent is delta
    assert not stored


def test_a_table_that_travels_whole_again_has_no_rows_of_before():
    codecs = Codecs(up="topk", topk_share=0.5)
    _, stored = leave({TABLE: torch.tensor([[9.0, 1.0]])}, codecs, rows=np.array([1]))
    _, stored = leave({TABLE: torch.tensor([[5.0, 1.0], [5.0, 2.0]])}, codecs, stored)
    assert stored.slot("residual")[TABLE].tolist() == [[0.0, 1.0], [0.0, 2.0]]
    # Had the rows of before stayed, row 1 would get what row 0 lost.
    assert stored.slot("residual_rows") == {}


def test_a_delta_that_is_no_number_is_not_sent_and_leaves_no_residual():
    with pytest.raises(WireError, match="w holds values that are not numbers"):
        leave({W: torch.tensor([[1.0, float("nan")]])}, Codecs(up="int8"))

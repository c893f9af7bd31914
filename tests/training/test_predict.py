import numpy as np
import pytest
import torch

from fedmtl.training.local import predict

from .small_client import CPU, CROSS, DUAL, SINGLE, bind, bind_rows, labels_of, make_shard, make_task, small_model

THREE = make_task("three", labels=("x", "y", "z"), pool="cls")


@pytest.mark.parametrize("indices", [range(12), [7, 2, 9, 0, 11], [5, 5, 1]])
@pytest.mark.parametrize("task", [SINGLE, CROSS, DUAL])
def test_outputs_come_in_the_order_of_the_shard(task, indices, tmp_path):
    model = small_model(task)
    # A score begins as the cosine, which two texts in either order share.
    torch.nn.init.normal_(model.heads[task.name].weight, generator=torch.Generator().manual_seed(0))
    bound = bind(model)
    outputs, loss = predict(bound, task.name, make_shard(task, tmp_path, indices), 4, CPU)
    alone = [predict(bound, task.name, make_shard(task, tmp_path, [index]), 1, CPU) for index in indices]
    assert np.allclose(outputs, np.concatenate([own for own, _ in alone]), atol=1e-6, rtol=0)
    assert loss == pytest.approx(sum(own for _, own in alone), abs=1e-6)
    # No two texts get the same output, so that a wrong order would be seen.
    assert len(np.unique(outputs.round(7), axis=0)) == len(set(indices))


@pytest.mark.parametrize("task", [SINGLE, CROSS, DUAL])
def test_outputs_do_not_depend_on_the_batch_size(task, tmp_path):
    bound = bind(small_model(task, dtype=torch.float32))
    shard = make_shard(task, tmp_path)
    whole, loss = predict(bound, task.name, shard, 64, CPU)
    for size in (1, 5):
        outputs, again = predict(bound, task.name, shard, size, CPU)
        assert np.abs(outputs - whole).max() < 1e-6
        assert again == pytest.approx(loss, abs=1e-5)


def test_outputs_do_not_depend_on_the_vocabulary_slice(tmp_path):
    shard = make_shard(CROSS, tmp_path, [3, 1, 8])
    sliced, _ = bind_rows(small_model(CROSS), {"cross": shard})
    outputs, _ = predict(sliced, "cross", shard, 2, CPU)
    expected, _ = predict(bind(small_model(CROSS)), "cross", shard, 2, CPU)
    assert np.array_equal(outputs, expected)


def test_the_loss_is_summed_over_examples_without_class_weights(tmp_path):
    bound = bind(small_model(CROSS))
    outputs, loss = predict(bound, "cross", make_shard(CROSS, tmp_path), 5, CPU)
    each = CROSS.kind_of.losses(CROSS, torch.from_numpy(outputs), torch.from_numpy(labels_of(CROSS)))
    assert loss == pytest.approx(each.sum().item(), abs=1e-5)


@pytest.mark.parametrize(("task", "columns"), [(THREE, 3), (SINGLE, 2), (CROSS, 1), (DUAL, 1)])
def test_no_examples_give_no_rows_of_the_right_width(task, columns, tmp_path):
    outputs, loss = predict(bind(small_model(task)), task.name, make_shard(task, tmp_path, []), 4, CPU)
    assert (outputs.shape, outputs.dtype, loss) == ((0, columns), np.float32, 0.0)

import pytest
import torch


@pytest.fixture(scope="module")
def one_thread():
    """Of the module, as its teacher is: with several threads, sums come out in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

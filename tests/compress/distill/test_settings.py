import pytest

from fedmtl.compress.distill.settings import DistillSettings, LossWeights, check_settings, parse_weights
from fedmtl.errors import ConfigError


def test_weights_are_named_and_others_keep_their_default():
    assert parse_weights("attention=0,gold=0.5") == LossWeights(1.0, 0.0, 1.0, 0.5)
    for wrong, words in (("heads=1", "there is no 'heads'"), ("hidden", "has no number")):
        with pytest.raises(ConfigError, match=words):
            parse_weights(wrong)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stages": "all"}, "--stages"),
        ({"temperature": 0.0}, "--temperature"),
        ({"weights": LossWeights(gold=2.0)}, "write 0 to 1"),
        ({"weights": LossWeights(0.0, 0.0, 0.0)}, "--stages prediction"),
    ],
)
def test_what_cannot_be_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        check_settings(DistillSettings("1x32", **changes))


def test_stages_say_what_is_passed_through():
    assert DistillSettings("tiny").epochs == {"intermediate": 20, "prediction": 3}
    assert DistillSettings("tiny", stages="prediction").epochs == {"prediction": 3}

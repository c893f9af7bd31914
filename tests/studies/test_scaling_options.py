import pytest

from fedmtl.config.file import config_from
from fedmtl.errors import ConfigError
from fedmtl_studies.options import read_rates
from fedmtl_studies.scaling import ScalingOptions, encoder_settings, make_cells, read_partition
from fedmtl_studies.scaling_results import encoder_label


def test_the_paper_is_as_it_was_published():
    options = ScalingOptions(preset="paper")
    training = config_from(dict(make_cells(options)[0].settings)).training
    assert (training.optimizer, training.learning_rate, training.batch_size) == ("sgd", 2e-5, 32)
    assert (training.momentum, training.weight_decay, training.max_grad_norm) == (0, 0, 0)
    assert (training.local_epochs, options.config["model"]["max_length"]) == (2, 128)
    assert options.rounds == {"imdb": 100, "ag_news": 100, "yelp": 50}
    assert options.threshold_rounds == {"imdb": 200, "ag_news": 200, "yelp": 100}
    assert (options.examples, options.validation) == (None, None)
    assert [encoder_label(encoder) for encoder in options.encoders] == [
        "bert-base-cased", "albert-base-v2", "distilbert-base-cased",
    ]  # fmt: skip


def test_ours_is_seventy_two_cells():
    # 6 numbers of clients, 3 encoders, 2 tasks, 2 seeds
    assert len(make_cells(ScalingOptions())) == 6 * 3 * 2 * 2


def test_what_is_given_replaces_the_presets():
    options = ScalingOptions(rounds=7, learning_rate=0.5, max_length=9, examples=0, tasks=("imdb",))
    assert (options.rounds, options.threshold_rounds) == ({"imdb": 7}, {"imdb": 14})
    assert options.config["training"]["learning_rate"] == 0.5
    assert options.config["training"]["local_epochs"] == 2
    assert options.config["model"]["max_length"] == 9
    assert options.examples is None
    # a preset's own threshold is not kept for other rounds
    assert ScalingOptions(quick=True).threshold_rounds["sentiment"] == 3
    assert ScalingOptions(quick=True, rounds=9).threshold_rounds["sentiment"] == 18


def test_an_encoder_may_have_a_rate_of_its_own():
    names = {"encoders": ("a/all-MiniLM-L6-v2", "minilm-l6", "tiny"), "tasks": ("ag_news",), "clients": (1, 32)}

    def rates(**given):
        cells = make_cells(ScalingOptions(**names, **given))
        return {cell.name: config_from(dict(cell.settings)).training.learning_rate for cell in cells}

    found = rates(rates=read_rates("tiny-ag_news-32=1e-3", "--rate"))
    assert found["all-MiniLM-L6-v2-ag_news-1-seed0"] == found["minilm-l6-ag_news-32-seed1"] == 5e-5
    assert (found["tiny-ag_news-1-seed1"], found["tiny-ag_news-32-seed1"]) == (2e-4, 1e-3)
    # the preset's is for its own optimizer and rate
    assert set(rates(learning_rate=0.5).values()) == set(rates(optimizer="sgd", learning_rate=0.5).values()) == {0.5}


def test_an_encoder_may_have_its_shape_alone():
    assert encoder_label("some/where/minilm-l6") == "minilm-l6"
    assert encoder_label("random:some/where/minilm-l6") == "random:minilm-l6"
    assert encoder_settings("random:tiny") == {"server_model": "tiny", "initial": "random"}
    assert encoder_settings("random-2x64") == {"server_model": "random-2x64", "initial": "pretrained"}


def test_a_partition_is_iid_or_dirichlet():
    assert read_partition("iid") == {"kind": "iid"}
    assert read_partition("dirichlet:0.1") == {"kind": "dirichlet", "alpha": 0.1}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"encoders": ()}, "--encoders: found none"),
        ({"encoders": ("a/tiny", "tiny")}, "--encoders: two are called tiny"),
        ({"clients": (0, 2)}, "--clients: found none, or less than 1"),
        ({"tasks": ("stsb",)}, "--tasks: stsb is no built-in classification"),
        ({"rounds": 4, "threshold_rounds": 3}, "--threshold-rounds: found 3, fewer than the 4"),
        ({"examples": 31}, "--examples: found 31 for 32 clients"),
        ({"partition": "dirichlet"}, "--partition: found dirichlet; write"),
        ({"partition": "quantity:1"}, "--partition: found quantity:1; write"),
        ({"data": "somewhere"}, "--data: --quick is on embedded data"),
    ],
)
def test_options_that_cannot_be_are_named(given, words):
    with pytest.raises(ConfigError, match=words):
        ScalingOptions(quick=True, **given)


def test_a_task_without_rounds_in_the_preset_is_named():
    with pytest.raises(ConfigError, match="--rounds: the preset has none for sst2"):
        ScalingOptions(preset="paper", tasks=("sst2",))

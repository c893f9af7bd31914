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
        "bert-base-cased", "albert-base-v2", "distilbert-base-cased", "dense:distilbert-base-cased",
    ]  # fmt: skip


def test_distilbert_has_a_second_row_with_the_classifier_of_its_class():
    made = {cell.name: config_from(dict(cell.settings)) for cell in make_cells(ScalingOptions(preset="paper"))}
    plain, dense = (made[f"{name}distilbert-base-cased-imdb-32-seed0"] for name in ("", "dense-"))
    assert plain.tasks["imdb"].head is None
    head = dense.tasks["imdb"].head
    # As DistilBertConfig and its class have them: the first token, no dropout in front of the layer, 0.2 behind it.
    assert (dense.tasks["imdb"].pool, dense.tasks["imdb"].dropout) == ("cls", 0)
    assert (head.hidden, head.activation, head.dropout) == (None, "relu", 0.2)
    assert dense.model == plain.model
    assert dense.training == plain.training


def test_every_client_may_have_as_many_examples():
    options = ScalingOptions(quick=True, examples_per_client=8, clients=(1, 4), tasks=("sentiment",))
    made = {cell.name: config_from(dict(cell.settings)) for cell in make_cells(options)}
    assert {name: config.tasks["sentiment"].train_samples for name, config in made.items() if "random" not in name} == {
        "tiny-sentiment-1-seed0": 8, "tiny-sentiment-4-seed0": 32,
    }  # fmt: skip
    # Where there are not so many, the run fails: it must not go on with fewer at some client.
    assert {config.partition.min_examples for config in made.values()} == {8}
    assert options.examples is None


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
    assert encoder_label("dense:random:some/where/minilm-l6") == "dense:random:minilm-l6"
    assert encoder_settings("dense:tiny") == {"server_model": "tiny", "initial": "pretrained"}
    assert encoder_settings("dense:random:tiny") == encoder_settings("random:tiny")
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
        ({"examples_per_client": 8, "examples": 64}, "--examples-per-client: --examples is a total"),
        (
            {"examples_per_client": 8, "partition": "dirichlet:1"},
            "--examples-per-client: --partition dirichlet:1",
        ),
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

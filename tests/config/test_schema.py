"""Shapes and types of the settings; reading files is tested in test_config_file."""

import pytest
from pydantic import ValidationError

from fedmtl.config import Config, Section, TaskConfig


def config(**sections):
    return Config.model_validate({"tasks": {"sst2": {}}, **sections})


def test_every_key_has_a_sentence():
    def fields(section, path=""):
        for name, field in section.model_fields.items():
            is_section = isinstance(field.annotation, type) and issubclass(field.annotation, Section)
            if is_section:
                yield from fields(field.annotation, f"{path}{name}.")
            else:
                yield f"{path}{name}", field.description

    described = dict(fields(Config))
    assert "training.num_rounds" in described
    assert [key for key, words in described.items() if not words or not words.endswith(".")] == []


@pytest.mark.parametrize("text", ["2e-5", "2E-5", "0.00002", 2e-5])
def test_a_learning_rate_may_be_written_as_a_word_with_an_exponent(text):
    assert config(training={"learning_rate": text}).training.learning_rate == 2e-5


def test_a_count_may_have_an_exponent_but_no_fraction():
    assert config(training={"num_rounds": "1e2"}).training.num_rounds == 100
    with pytest.raises(ValidationError):
        config(training={"num_rounds": "1.5"})


def test_a_long_seed_keeps_every_digit():
    # 2**53 + 1 is the first whole number that a float cannot hold.
    assert config(seed="9007199254740993").seed == 9007199254740993


@pytest.mark.parametrize("value", [True, "nan", "inf", float("nan"), None, "fast"])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(ValidationError):
        config(training={"learning_rate": value})


def test_an_empty_section_means_its_defaults():
    empty = Config.model_validate({"tasks": {"sst2": None}, "training": None, "clients": None, "sharing": None})
    assert empty == config()
    assert empty.tasks["sst2"] == TaskConfig()


def test_labels_and_names_that_are_numbers_become_text():
    numbered = config(tasks={1: {"labels": [0, 1]}}, clients={7: {"tasks": [1]}})
    assert numbered.tasks["1"].labels == ["0", "1"]
    assert numbered.clients["7"].tasks == ["1"]


def test_a_decay_of_one_would_divide_by_zero_and_is_refused():
    with pytest.raises(ValidationError):
        config(training={"betas": [0.9, 1.0]})


def test_a_source_is_a_file_or_a_hub_dataset_and_not_both():
    with pytest.raises(ValidationError, match="names both"):
        TaskConfig.model_validate({"source": {"train": "a.tsv", "hub": "glue"}})
    with pytest.raises(ValidationError, match="names neither"):
        TaskConfig.model_validate({"source": {}})


def test_values_never_change_after_loading():
    with pytest.raises(ValidationError):
        config().training.num_rounds = 3

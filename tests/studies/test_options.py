import pytest

from fedmtl.errors import ConfigError
from fedmtl_studies.folder import cell_name
from fedmtl_studies.multitask import MultitaskOptions
from fedmtl_studies.options import check_seeds, check_tables, fits, merged, rate_for, read_numbers, read_rates, seeds_of


def test_a_name_fits_one_of_several_patterns():
    assert fits("lora-r4", "joint, lora-*")
    assert not fits("joint-pcgrad", "joint,lora-*")
    assert fits("anything", "*")


def test_a_cell_is_named_by_setup_and_seed():
    assert cell_name("joint", 2) == "joint-seed2"


def test_settings_are_merged_section_by_section():
    assert merged({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"c": 4}, "d": {"e": 5}}) == {
        "a": {"b": 1, "c": 4},
        "d": {"e": 5},
    }


def test_what_is_given_goes_over_the_miniature_and_that_over_defaults():
    options = MultitaskOptions(quick=True, steps=40, epochs=None)
    assert (options.steps, options.epochs, options.encoder) == (40, 2, "tiny")
    assert MultitaskOptions().epochs == 100


def test_a_setup_has_all_seeds_where_one_of_its_names_fits():
    options = MultitaskOptions(seeds=(3, 4), seed_rows="joint*, even")
    assert seeds_of(options, "epoch", "joint-pcgrad") == (3, 4)
    assert seeds_of(options, "epoch") == (3,)


def test_tables_and_seeds_must_be_some_of_those_there_are():
    check_tables((1, 7), range(1, 8))
    for tables, found in (((), "none"), ((1, 9), "9")):
        with pytest.raises(ConfigError, match=f"--tables: found {found}; write some of 1 to 7"):
            check_tables(tables, range(1, 8))
    with pytest.raises(ConfigError, match="--seeds: found none"):
        check_seeds(())


def test_the_last_rate_that_fits_a_name_counts():
    rates = read_rates("tiny-*=1e-3, tiny-ag_news-*=2e-3", "--rate")
    assert rate_for(rates, "tiny-imdb-8") == 1e-3
    assert rate_for(rates, "tiny-ag_news-8") == 2e-3
    assert rate_for(rates, "elsewhere", "tiny-imdb-8") == 1e-3
    assert rate_for(rates, "minilm-l6-imdb-8") is None


@pytest.mark.parametrize("text", ["federated", "=1e-4", "federated=fast", "federated=-1", "federated=nan"])
def test_a_rate_that_is_none_is_named(text):
    with pytest.raises(ConfigError, match=r"--rate: found"):
        read_rates(text, "--rate")


def test_numbers_are_above_zero():
    assert read_numbers("5,0.5,5", "--alphas") == (5.0, 0.5)
    with pytest.raises(ConfigError, match="--alphas: found 5,0;"):
        read_numbers("5,0", "--alphas")

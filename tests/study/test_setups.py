import pytest

from fedmtl.errors import ConfigError
from fedmtl.study.setups import cell_name, check_seeds, check_tables, fits, given_over, merged


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


def test_what_is_not_given_keeps_its_default():
    assert given_over({"rounds": 2, "copies": 1}, {"rounds": 5, "copies": None}) == {"rounds": 5, "copies": 1}


def test_tables_and_seeds_must_be_some_of_those_there_are():
    check_tables((1, 7), range(1, 8))
    for tables, found in (((), "none"), ((1, 9), "9")):
        with pytest.raises(ConfigError, match=f"--tables: found {found}; write some of 1 to 7"):
            check_tables(tables, range(1, 8))
    with pytest.raises(ConfigError, match="--seeds: found none"):
        check_seeds(())

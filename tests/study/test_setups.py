from fedmtl.study.setups import cell_name, fits, merged


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

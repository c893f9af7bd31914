from fedmtl.study.patterns import fits


def test_a_name_fits_one_of_several_patterns():
    assert fits("lora-r4", "joint, lora-*")
    assert not fits("joint-pcgrad", "joint,lora-*")
    assert fits("anything", "*")

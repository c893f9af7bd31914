from fedmtl.compress.augment.settings import AugmentSettings
from fedmtl.compress.distill.settings import DistillSettings
from fedmtl_studies.compression_setups import Shape, Shapes, rows, setups

MINILM = Shapes(Shape(6, 384))
COMMON = DistillSettings("", epochs_intermediate=20, epochs_prediction=3, augment=AugmentSettings(("mlm",)))


def test_shapes_follow_the_teacher():
    assert (str(MINILM.large), str(MINILM.small), MINILM.layers_off) == ("3x384", "2x128", (2, 3))
    tiny = Shapes(Shape(2, 128))
    assert (str(tiny.large), str(tiny.small), tiny.layers_off) == ("1x128", "1x64", (1,))


def test_the_grid_has_every_student_once():
    every = setups(MINILM, ["sst2", "rte"], COMMON)
    listed = rows(every, MINILM)
    # 3 maps x 2 starts and 3 maps of the small one, each without and with copies, the teacher and tiny
    assert len(listed[1]) == 1 + 2 * (6 + 3) + 1
    assert len(listed[3]) == 9
    assert listed[4][:2] == ["3x384-uniform-teacher", "3x384-uniform-teacher-augmented"]
    assert listed[5] == [
        "whole",
        "prune-20",
        "prune-40",
        "prune-60",
        "ffn-25",
        "ffn-50",
        "heads-50",
        "layers-2",
        "layers-3",
    ]
    assert listed[7] == ["single-sst2", "single-sst2-3x384", "single-rte", "single-rte-3x384"]
    # a setup stands after the one it is made of
    names = list(every)
    assert all(setup.of is None or names.index(setup.of) < names.index(name) for name, setup in every.items())


def test_a_setup_says_what_its_student_learns_from():
    every = setups(MINILM, ["sst2"], COMMON)

    def student(name):
        return every[name].student

    copied, top = student("3x384-top-random-augmented"), student("3x384-top-random")
    assert (copied.student, copied.layer_map, copied.start, copied.augment.sources) == (
        "3x384",
        "top",
        "random",
        ("mlm",),
    )
    assert top.augment.sources == ()
    labels, long = student("3x384-labels"), student("3x384-prediction-long")
    assert (labels.weights.gold, labels.epochs) == (1.0, {"prediction": 3})
    # as many passes as both stages have
    assert (long.weights.gold, long.epochs) == (0.0, {"prediction": 23})
    assert student("3x384-uniform-teacher").epochs == {"intermediate": 20, "prediction": 3}


def test_without_words_there_is_no_augmented_setup():
    plain = setups(MINILM, ["sst2"], DistillSettings(""))
    assert not any(name.endswith("-augmented") for name in plain)
    assert rows(plain, MINILM)[4] == []

from fedmtl.compress.pretrain.segments import Aligned, Pieces, align

# "unlikely films ." as un ##like ##ly | films | . and as unlikely | film ##s | .
TEACHER = Pieces([10, 11, 12, 13, 14], [0, 0, 0, 1, 2], [2, 6, 8, 14, 16])
STUDENT = Pieces([20, 21, 22, 23], [0, 1, 1, 2], [8, 13, 14, 16])


def test_all_words_where_there_is_room():
    assert align(TEACHER, STUDENT, 10, 10) == Aligned(3, 5, 4)


def test_cut_at_the_last_word_that_fits_both():
    # Four of the teacher's pieces reach through `films`; three of the student's do too.
    assert align(TEACHER, STUDENT, 4, 10) == Aligned(2, 4, 3)
    # Two of the student's pieces end inside `films`, so only `unlikely` is left: three pieces and one.
    assert align(TEACHER, STUDENT, 10, 2) == Aligned(1, 3, 1)


def test_nothing_where_not_even_a_word_fits():
    assert align(TEACHER, STUDENT, 2, 10) is None


def test_nothing_where_word_counts_differ():
    # The other tokenizer leaves the full stop with its word.
    assert align(TEACHER, Pieces([20, 21], [0, 1], [8, 16]), 10, 10) is None


def test_nothing_where_as_many_words_end_elsewhere():
    assert align(TEACHER, Pieces([20, 21, 22], [0, 1, 2], [3, 8, 16]), 10, 10) is None


def test_nothing_without_words_or_with_a_gap_between_them():
    empty = Pieces([], [], [])
    assert align(empty, empty, 10, 10) is None
    gap = Pieces([1, 2], [0, 2], [1, 3])
    assert align(gap, gap, 10, 10) is None

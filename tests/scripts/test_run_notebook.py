"""The executor of notebooks, on a notebook of a few cells."""

import pytest

from run_notebook import execute


def cell(*lines: str) -> dict[str, object]:
    return {"cell_type": "code", "source": [f"{line}\n" for line in lines], "execution_count": None, "outputs": []}


def test_cells_share_names_and_leave_what_they_print_and_show():
    text = {"cell_type": "markdown", "source": ["# words"]}
    notebook = {"cells": [text, cell("a = 2", "print('two')"), cell("a + 1"), cell("print('three')", "[a, a]")]}
    done = execute(notebook)
    assert done["cells"][0] == text
    first, second, third = done["cells"][1:]
    assert first["outputs"] == [{"name": "stdout", "output_type": "stream", "text": ["two\n"]}]
    assert (second["execution_count"], second["outputs"][0]["data"]) == (2, {"text/plain": ["3"]})
    assert [output["output_type"] for output in third["outputs"]] == ["stream", "execute_result"]
    assert notebook["cells"][1]["outputs"] == [], "the notebook that was given stays as it is"


def test_a_cell_that_fails_is_an_error():
    with pytest.raises(ZeroDivisionError):
        execute({"cells": [cell("1 / 0")]})

"""The columns of `predict --out`."""

from fedmtl.predict.answer_files import answer_columns
from fedmtl.predict.answers import Prediction


def test_a_task_that_is_called_as_another_column_costs_that_one_nothing():
    answers = [Prediction("id", "yes", None, {"yes": 0.75}), Prediction("mood", None, 2.0, {})]
    found = answer_columns(answers, {"line": 1, "id": "x"})
    assert found == {"id_answer": "yes", "id.yes": 0.75, "mood": 2.0}

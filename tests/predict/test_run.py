"""A finished run's model answers texts as it was scored on them."""

from pathlib import Path

import pytest
import torch

from fedmtl.errors import DataError, FedmtlError
from fedmtl.experiment.run import start_run
from fedmtl.model.bert.layout import BertValues
from fedmtl.model.multitask import Inputs
from fedmtl.predict.answers import to_prediction
from fedmtl.predict.run import LoadedRun, answerable, evaluate_file, load_run, predict_texts

# The third and fourth are longer than the 16 tokens that count: what is cut must be the same on both ways.
LONG = "a film about " + "very " * 30 + "long nights"
ROWS = [
    ("the film was fine", "the film was not fine", "positive", "same", 4.5),
    ("no", "a short answer and a longer one", "negative", "different", 0.0),
    (LONG, "short", "positive", "different", 1.25),
    ("short", LONG, "negative", "same", 3.0),
]


@pytest.fixture(params=["cross", "dual"])
def loaded(request, make_config) -> LoadedRun:
    config = make_config(f"model.pair={request.param}", "model.max_length=16", "training.num_rounds=1")
    return load_run(start_run(config, "run"))


def write_rows(path: Path, *columns: int) -> Path:
    names = ("sentence1" if len(columns) == 3 else "sentence", "sentence2", "label", "label", "label")
    lines = ["\t".join(names[column] for column in columns)]
    lines += ["\t".join(str(row[column]) for column in columns) for row in ROWS]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_predictions_are_those_that_were_scored(loaded, tmp_path):
    singles = predict_texts(loaded, [row[:1] for row in ROWS], ["sentiment"])
    right = sum(answers[0].label == row[2] for answers, row in zip(singles, ROWS, strict=True))
    scores = evaluate_file(loaded, "sentiment", write_rows(tmp_path / "single.tsv", 0, 2))["sentiment"]
    assert scores.metrics["accuracy"] == right / 4

    pairs = predict_texts(loaded, [row[:2] for row in ROWS], ["paraphrase", "similarity"])
    right = sum(answers[0].label == row[3] for answers, row in zip(pairs, ROWS, strict=True))
    scores = evaluate_file(loaded, "paraphrase", write_rows(tmp_path / "same.tsv", 0, 1, 3))["paraphrase"]
    assert scores.metrics["accuracy"] == right / 4
    error = sum((answers[1].score - row[4]) ** 2 for answers, row in zip(pairs, ROWS, strict=True)) / 4
    scores = evaluate_file(loaded, "similarity", write_rows(tmp_path / "near.tsv", 0, 1, 4))["similarity"]
    assert scores.metrics["mse"] == pytest.approx(error, abs=1e-4)


def test_groups_of_a_file_have_scores_of_their_own(loaded, tmp_path):
    lines = [
        "sentence\tlabel\tcountry",
        *(f"{row[0]}\t{row[2]}\t{'DE' if n % 2 else 'AT'}" for n, row in enumerate(ROWS)),
    ]
    (tmp_path / "all.tsv").write_text("\n".join(lines) + "\n")
    found = evaluate_file(loaded, "sentiment", tmp_path / "all.tsv", "country")
    assert list(found) == ["sentiment", "sentiment:country=AT", "sentiment:country=DE"]
    for country, rows in (("AT", ROWS[::2]), ("DE", ROWS[1::2])):
        answers = predict_texts(loaded, [row[:1] for row in rows], ["sentiment"])
        right = sum(answer[0].label == row[2] for answer, row in zip(answers, rows, strict=True))
        assert found[f"sentiment:country={country}"].metrics["accuracy"] == right / len(rows)
        assert found[f"sentiment:country={country}"].examples == len(rows)
    assert found["sentiment"].examples == len(ROWS)


def test_what_cannot_be_a_group_is_one_line(loaded, tmp_path):
    path = write_rows(tmp_path / "single.tsv", 0, 2)
    with pytest.raises(DataError, match="has no column 'country'; task sentiment reads"):
        evaluate_file(loaded, "sentiment", path, "country")
    lines = ["sentence\tlabel\tid", *(f"{ROWS[0][0]}\t{ROWS[0][2]}\t{n}" for n in range(101))]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match="the column 'id' has 101 values, and groups are at most 100"):
        evaluate_file(loaded, "sentiment", path, "id")


def test_an_answer_does_not_depend_on_the_texts_beside_it(loaded):
    rows = [(f"{'word ' * (n % 7)}number {n}", f"{'other ' * (n % 5)}number {n}") for n in range(70)]
    together = predict_texts(loaded, rows, ["similarity", "paraphrase"])
    for n in (0, 6, 63, 64, 69):
        (alone,) = predict_texts(loaded, [rows[n]], ["similarity", "paraphrase"])
        assert [answer.task for answer in together[n]] == ["similarity", "paraphrase"]
        assert together[n][0].score == pytest.approx(alone[0].score, abs=1e-4)
        assert together[n][1].probabilities == pytest.approx(alone[1].probabilities, abs=1e-4)
        assert sum(alone[1].probabilities.values()) == pytest.approx(1)


def test_values_alone_answer_as_the_whole_model_and_its_plain_encoder(loaded):
    light = load_run(loaded.run, values_only=True)
    tokenizer = light.saved.encoder.tokenizer.backend_tokenizer
    before = tokenizer.to_str()
    assert type(light.saved.encoder.module) is BertValues
    assert type(loaded.saved.encoder.module) is not BertValues
    for row, tasks in ((ROWS[2][:1], ["sentiment"]), (ROWS[3][:2], ["paraphrase", "similarity"])):
        (ours,), (whole,) = predict_texts(light, [row], tasks), predict_texts(loaded, [row], tasks)
        assert ours == whole
        for answer, outputs in zip(ours, _plain_outputs(loaded, row, tasks), strict=True):
            expected = to_prediction(loaded.saved.tasks[answer.task], outputs)
            assert answer.probabilities == pytest.approx(expected.probabilities, abs=1e-6)
            assert answer.score == (expected.score and pytest.approx(expected.score, abs=5e-6))
    # Whoever saves the model again saves the tokenizer that it came with.
    assert tokenizer.to_str() == before


@torch.inference_mode()
def _plain_outputs(loaded, row, tasks):
    """The outputs by transformers' code, one text at a time."""
    for task in tasks:
        model = loaded.bound.use(task)
        texts = row if loaded.saved.tasks[task].is_dual else [row]
        vectors = []
        for text in texts:
            given = (text,) if isinstance(text, str) else text
            encoded = loaded.tokenizer(*given, truncation=True, max_length=16, return_tensors="pt")
            inputs = Inputs(encoded["input_ids"], encoded["attention_mask"], encoded["token_type_ids"])
            vectors.append(model.pool(task, *model.encode(task, inputs)))
        yield model.head(task, torch.cat(vectors)).numpy()[0]


def test_one_output_answers_with_two_probabilities(make_config):
    config = make_config("tasks.sentiment.outputs=1", "training.num_rounds=0")
    ((answer,),) = predict_texts(load_run(start_run(config, "run")), [("a film",)], ["sentiment"])
    assert list(answer.probabilities) == ["negative", "positive"]
    assert sum(answer.probabilities.values()) == pytest.approx(1)
    assert answer.label == max(answer.probabilities, key=answer.probabilities.__getitem__)


def test_layers_that_differ_between_tasks_answer_with_their_own(make_config):
    config = make_config("mode=federated_single_task")
    loaded = load_run(start_run(config, "run"))
    row = ("the film was fine", "the film was dull")
    ((both_a, both_b),) = predict_texts(loaded, [row], ["paraphrase", "similarity"])
    ((alone,),) = predict_texts(loaded, [row], ["similarity"])
    assert both_b.score == pytest.approx(alone.score, abs=1e-6)
    assert both_a.task == "paraphrase"


def test_a_client_answers_only_the_tasks_it_kept_a_head_of(make_config):
    config = make_config("sharing.rules=[{heads.sentiment.*: client}, {heads.*: task}, {'*': all}]")
    run = start_run(config, "run")
    assert load_run(run).tasks == ("paraphrase", "similarity")
    loaded = load_run(run, "sentiment_client_2")
    assert loaded.tasks == ("sentiment", "paraphrase", "similarity")
    assert answerable(loaded, 1) == ["sentiment"]
    first = predict_texts(load_run(run, "sentiment_client_1"), [("a film",)], ["sentiment"])[0][0]
    second = predict_texts(loaded, [("a film",)], ["sentiment"])[0][0]
    assert first.probabilities != second.probabilities
    with pytest.raises(FedmtlError, match="values of sentiment stay at its clients; name one of them with --client"):
        answerable(load_run(run), 1, "sentiment")
    with pytest.raises(FedmtlError, match="--client nobody: has no values of this run; it is one of sentiment"):
        load_run(run, "nobody")

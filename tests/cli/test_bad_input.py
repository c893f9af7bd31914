"""Whatever is wrong with the input: one line with the remedy, its exit code, and no run folder left behind."""

from pathlib import Path

import pytest

from cli.small_runs import small
from fedmtl.runs.folder import RunFolder
from raw_events import raw_events

OWN = """\
model: {server_model: random-1x32}
tasks:
  mail: {kind: classification, source: {train: mail.tsv}, text: [message], label: category}
  pairs: {kind: regression, source: {train: pairs.tsv}, text: [first, second], label: score, score_range: [0, 4]}
training: {num_rounds: 1, batch_size: 8}
compute: {workers: 0, device: cpu}
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A user's own two tasks, in ten lines of YAML."""
    (tmp_path / "own.yaml").write_text(OWN)
    mail = [f"letter number {n} is {'kind' if n % 2 else 'rude'}\t{'ham' if n % 2 else 'spam'}" for n in range(30)]
    pairs = [f"stone {n}\tstone {n % 5}\t{n % 5}" for n in range(30)]
    (tmp_path / "mail.tsv").write_text("\n".join(["message\tcategory", *mail]) + "\n")
    (tmp_path / "pairs.tsv").write_text("\n".join(["first\tsecond\tscore", *pairs]) + "\n")
    return tmp_path


def test_ones_own_files_run_evaluate_and_predict(cli, own):
    done = cli("run", "own.yaml")
    assert done.code == 0
    assert "  mail: 27 train, 3 validation (files in " in done.out
    assert cli("evaluate", "own", "--task", "mail", "--file", "mail.tsv").code == 0
    assert cli("predict", "own", "a rude letter").out.startswith(("mail: spam (", "mail: ham ("))
    assert cli("predict", "own", "stone 1", "stone 2").out.startswith("pairs: ")


@pytest.mark.parametrize(
    ("file", "line", "error"),
    [
        ("mail.tsv", "\tspam", "line 32: column message is empty, in 1 of 31 rows; fill or remove them"),
        ("mail.tsv", "only one value", "line 32: has 1 values, the header 2 (message, category); mend the line"),
        ("pairs.tsv", "a\tb\t5", "line 32: score '5' in column score lies outside 0 to 4; mend the row, or write"),
        ("pairs.tsv", "a\tb\thigh", "line 32: score 'high' in column score is not a number; mend the row"),
    ],
)
def test_a_bad_row_is_named_by_its_line(cli, own, file, line, error):
    with (own / file).open("a") as table:
        table.write(line + "\n")
    done = cli("run", "own.yaml")
    assert done.code == 2
    assert done.error.startswith(f"{own / file}, {error}")
    assert not (own / "runs").exists()


@pytest.mark.parametrize(
    ("override", "error"),
    [
        (
            "tasks.mail.text=[msg]",
            "mail.tsv: has no column 'msg'; write one of message, category under tasks.mail.text",
        ),
        ("tasks.mail.labels=[ham, junk]", "label 'spam' in column category is not one of ham, junk; mend the row, or"),
        ("tasks.mail.source.train=none.tsv", "none.tsv: no such file; check the path"),
        ("tasks.mail.kind=null", "tasks.mail.kind: found nothing, and mail is not built in"),
        ("training.num_round=1", "training.num_round: unknown key; did you mean `num_rounds`?"),
        ("training.num_rounds=many", "training.num_rounds: found 'many', it must be a whole number"),
        ("training.learning_rate=0", "training.learning_rate: found 0, it must be more than 0"),
        ("training", "--set training: write `--set path.to.key=value`"),
        ("tasks.a/b={}", "tasks: found the name 'a/b'; use letters from a to z, digits, `_` and `-`"),
        ("model.server_model=nobody/no-encoder", "model.server_model: cannot load nobody/no-encoder"),
        ("model.client_model=random-1x64", "model.client_model: found 'random-1x64', model.server_model is"),
        ("federation.clients_per_task=60", "fewer than partition.min_examples 1; use fewer clients than 60"),
        ("compute.device=gpu7", "compute.device: gpu7 cannot be used here; write `cpu` or `auto`"),
        ("tasks={sst2: {}}", "use files: `data.root=FOLDER`"),
    ],
)
def test_a_setting_that_cannot_be_is_named_before_anything_is_written(cli, own, override, error):
    done = cli("run", "own.yaml", "--set", override)
    assert done.code == 2
    assert error in done.error
    assert not (own / "runs").exists()


def test_a_client_left_with_nothing_names_alpha(cli):
    done = cli("run", *small("partition.kind=dirichlet", "partition.alpha=0.001"))
    assert done.code == 2
    assert "raise partition.alpha" in done.error


@pytest.mark.parametrize(
    ("task", "found"),
    [
        ("notes={}", "tasks.notes.kind: found nothing, and notes is not built in"),
        ("notes={kind: classification}", "tasks.notes.source: found nothing"),
        ("notes={kind: classification, source: {train: a.tsv}}", "tasks.notes.text: found nothing"),
        ("sst2={metric: pearson}", "tasks.sst2.metric: found pearson on a classification"),
        ("sst2={pair: dual}", "tasks.sst2.pair: found dual, and the task has one text column"),
        ("mrpc={}", "data.source: found embedded, and mrpc is not embedded"),
        ("x={kind: clasification, source: {train: a.tsv}}", "tasks.x.kind: found 'clasification'"),
    ],
)
def test_config_refuses_the_task_that_run_refuses_with_the_same_words(cli, task, found):
    overrides = small(f"tasks.{task}", "data.source=embedded")
    refused = cli("config", *overrides)
    assert (refused.code, refused.out) == (2, "")
    assert refused.error.startswith(found)
    assert cli("run", *overrides).error == refused.error


def test_config_refuses_a_method_that_is_not_there(cli):
    assert cli("config", *small("methods={scafold: {}}")).error.startswith(
        "methods.scafold: no capability is called so"
    )


def test_config_says_which_tasks_only_sites_can_bring(cli):
    done = cli("config", *small("tasks.notes={kind: classification, text: [a], label: b, labels: [x, y]}"))
    assert done.code == 0
    assert done.err.startswith("note: tasks.notes.source: found nothing, and ")
    assert done.err.endswith("; `fedmtl server` takes it as it is, its sites bring the examples\n")


def test_a_config_that_is_not_there_or_not_yaml(cli, tmp_path):
    assert cli("run", "none.yaml").error == "none.yaml: no such file; give the path of a config in YAML"
    (tmp_path / "broken.yaml").write_text("tasks: {a: [\n")
    assert cli("run", "broken.yaml").error.startswith("broken.yaml, line 2: ")
    (tmp_path / "file").write_text("")
    assert cli("run", *small("output=file")).error == (
        "file: cannot be written (File exists); set `output` to a folder you can write to"
    )


def test_a_run_where_every_client_fails_ends_with_3_and_says_why(cli, tmp_path):
    wild = ("training.optimizer=sgd", "training.learning_rate=1e30", "training.max_grad_norm=0")
    done = cli("run", *small(*wild))
    assert done.code == 3
    assert "lower training.learning_rate" in done.error
    run = RunFolder(tmp_path / "runs/demo")
    events = raw_events(run)
    assert events[-1]["status"] == "failed"
    assert sum(event["event"] == "failure" for event in events) == 6
    assert run.report.exists()
    assert cli("evaluate", "demo").code == 0


@pytest.mark.parametrize("command", ["evaluate", "export", "report"])
def test_an_unknown_run_is_answered_with_those_there_are(cli, runs, command):
    done = cli(command, "other")
    assert done.code == 2
    assert done.error == "other: no such run in runs, it has central, demo, personal; give a name or a run folder"

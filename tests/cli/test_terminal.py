"""What other machines and other people's files say reaches the terminal as text, never as codes, markup or lines."""

import io
import json

import pytest
from rich.table import Table
from typer.testing import CliRunner

from fedmtl.cli import app as cli_app
from fedmtl.cli.app import app
from fedmtl.cli.display import LiveDisplay, PlainDisplay
from fedmtl.cli.terminal import StageBars, Terminal
from fedmtl.runs.event_lines import from_json
from fedmtl.runs.folder import create_run
from fedmtl.runs.log import append_event

# Clears the screen and forges a line; a C1 introducer; a right-to-left override; rich's markup that closes nothing.
HOSTILE = "\x1b[2J\x1b[1;31mx\n  after round 9: sst2 accuracy 1.000\r\x9b31m\u202eevil[/b]"
START = {"event": "start", "version": "1", "mode": "federated", "device": "cpu", "workers": 0, "seed": 0}
START |= {"num_rounds": 2, "tasks": {"sst2": {"kind": "classification", "metric": "accuracy"}}}


def is_quiet(text: str) -> bool:
    return not any(sign in text for sign in "\x1b\x9b\u202e\r") and "\n  after round 9" not in text


@pytest.mark.parametrize("display", [PlainDisplay, LiveDisplay])
@pytest.mark.parametrize("key", ["client", "reason"])
def test_a_failure_cannot_forge_a_line_or_send_an_escape_code(display, key):
    seen = io.StringIO()
    shown = display(Terminal(file=seen, width=500))
    shown(from_json(START))
    shown(from_json({"event": "failure", "round": 1, "client": "a", "reason": "late"} | {key: HOSTILE}))
    assert is_quiet(seen.getvalue())
    assert "\\x1b[2J\\x1b[1;31mx\\n" in seen.getvalue()
    assert "evil[/b]" in seen.getvalue()


def test_a_cell_and_a_title_of_a_table_are_text():
    seen = io.StringIO()
    table = Table(HOSTILE, title=f"[red]{HOSTILE}")
    table.add_row(f"[bold]{HOSTILE}")
    Terminal(file=seen, width=300).print(table)
    assert is_quiet(seen.getvalue())
    assert "[red]" in seen.getvalue()
    assert "[bold]" in seen.getvalue()


def test_a_bar_of_a_stage_takes_any_words():
    seen = io.StringIO()
    stages = StageBars(Terminal(file=seen, force_terminal=True, width=300, color_system=None))
    stages.show("training", 0.5, HOSTILE)
    described = stages.progress.tasks[0].description
    assert is_quiet(described)


def hostile_run(folder):
    run = create_run(folder, "demo")
    for event in (
        START,
        {"event": "clients", "clients": {"[/b]": {"tasks": {"sst2": {"examples": 1, "labels": {}}}}}},
        {"event": "failure", "round": 1, "client": HOSTILE, "reason": HOSTILE},
    ):
        append_event(run, from_json(event))
    return run


def test_status_shows_a_client_called_like_markup(tmp_path):
    run = hostile_run(tmp_path)
    result = CliRunner().invoke(app, ["status", str(run.path)])
    assert result.exit_code == 0, result.exception
    assert "[/b]" in result.stdout
    assert is_quiet(result.stdout)


def test_json_stays_json_and_has_the_very_words(tmp_path):
    run = hostile_run(tmp_path)
    result = CliRunner().invoke(app, ["status", str(run.path), "--json"])
    assert json.loads(result.stdout)["last_failure"]["client"] == HOSTILE
    assert "\x1b" not in result.stdout


def test_compare_takes_runs_and_tasks_of_any_name(tmp_path):
    events = [
        START | {"tasks": {HOSTILE: {"kind": "classification", "metric": "accuracy"}}, "mode": HOSTILE},
        {"event": "evaluation", "round": 0, "task": HOSTILE, "metrics": {"accuracy": 0.5, "[/b]": 1.0}},
    ]
    runs = [create_run(tmp_path, "demo") for _ in range(2)]
    for run in runs:
        for event in events:
            append_event(run, from_json(event))
    result = CliRunner().invoke(app, ["compare", *(str(run.path) for run in runs)])
    assert result.exit_code == 0, result.exception
    assert is_quiet(result.stdout)


@pytest.mark.parametrize("extra", [[], ["--traceback"]])
def test_an_error_line_has_no_codes(tmp_path, monkeypatch, capsys, extra):
    monkeypatch.setattr("sys.argv", ["fedmtl", "run", "--set", f"training.num_rounds={HOSTILE}", *extra])
    with pytest.raises(SystemExit):
        cli_app.main()
    said = capsys.readouterr().err
    assert said
    # A traceback has lines of its own.
    assert is_quiet(said.replace("\n", " ") if extra else said)

"""scripts/round_files.py finds what one round executes, in a package that only pretends to train."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts/round_files.py"
FILES = {
    "fedmtl/__init__.py": "",
    "fedmtl/__main__.py": "from fedmtl.cli.app import main\nmain()\n",
    "fedmtl/cli/__init__.py": "",
    "fedmtl/cli/app.py": """\
import sys
from fedmtl.loop import drive
def main():
    settings = dict(text.split("=") for text in sys.argv if "=" in text)
    drive(settings["output"], int(settings["training.num_rounds"]), show)
    sys.exit(0)
def show(number):
    print(number)
""",
    "fedmtl/loop.py": """\
import json, pathlib, threading
from fedmtl.evaluation import evaluate
from fedmtl.once import begin, finish, first_round
def drive(output, num_rounds, show):
    folder = pathlib.Path(output) / "demo"
    begin(folder)
    for number in rounds(num_rounds):
        log(folder, {"event": "round", "round": number})
        show(number)
    finish()
def rounds(num_rounds):
    for number in range(num_rounds + 1):
        if number == 1:
            first_round()
        if number:
            thread = threading.Thread(target=evaluate)
            thread.start()
            thread.join()
            list(map(lambda step: step + 1, [step for step in range(3)]))
        yield number
def log(folder, event):
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\\n")
""",
    "fedmtl/evaluation.py": """\
def evaluate():
    return Scores().mean()
class Scores:
    def mean(self):
        return 0.5
""",
    "fedmtl/once.py": "def begin(folder):\n    folder.mkdir()\ndef finish(): ...\ndef first_round(): ...\n",
}


def trace(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    command = [sys.executable, str(SCRIPT), "--root", str(root), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_round_is_what_happens_between_two_round_events(tmp_path):
    # Not `once.py`, which works before and after; not `main`, which waits; a thread's work and the loop itself.
    shown = trace(tmp_path, "--functions").stdout.splitlines()
    assert [" ".join(line.split()) for line in shown] == [
        "round 2: 2 files with 28 lines, 5 functions",
        "fedmtl/evaluation.py 2 functions 5 lines",
        "1 evaluate",
        "4 Scores.mean",
        "fedmtl/loop.py 3 functions 23 lines",
        "4 drive",
        "11 rounds",
        "21 log",
        "and to show it: 1 files with 8 lines, 1 functions",
        "fedmtl/cli/app.py 1 functions 8 lines",
        "7 show",
    ]


def test_the_first_round_can_be_traced_as_well(tmp_path):
    assert "fedmtl/once.py" in trace(tmp_path, "--round", "1").stdout


def test_too_many_files_are_an_error(tmp_path):
    assert trace(tmp_path, "--at-most", "2").returncode == 0
    done = trace(tmp_path, "--at-most", "1")
    assert (done.returncode, done.stderr) == (1, "2 files are more than 1\n")


def test_a_run_that_ends_early_is_shown(tmp_path):
    # The last of two values counts: the run ends before the round that is to be traced.
    done = trace(tmp_path, "--", "--set", "training.num_rounds=1")
    assert done.returncode == 2
    assert "before round 2 was over" in done.stderr

import signal
import time

from fedmtl.config.file import config_from
from fedmtl.runs import RunFolder
from fedmtl.study.cell_process import CellWork, end_cell, last_word, load_once, start_cell
from study.small_cells import settings


def wait_for(run, num_rounds):
    until = time.monotonic() + 60
    while not run.events.exists() or run.events.read_bytes().count(b'"event": "round"') < num_rounds:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_cell_ends_with_the_study_that_began_it(tmp_path):
    config = config_from({**settings(5000), "output": str(tmp_path)})
    load_once([config])
    cell = start_cell(CellWork(config, "cell", tmp_path / "cell.log"))
    wait_for(RunFolder(tmp_path / "cell"), 2)
    # what the system does to a killed process's pipes
    cell.line.close()
    cell.process.join(30)
    assert cell.process.exitcode == -signal.SIGKILL
    end_cell(cell)


def test_the_last_line_of_a_log_is_the_reason(tmp_path):
    log = tmp_path / "cell.log"
    assert last_word(log) == ""
    log.write_text("Traceback ...\nerror: tasks.x: no such file\n\n")
    assert last_word(log) == "tasks.x: no such file"

import multiprocessing
import signal
import time

from fedmtl.config.file import config_from
from fedmtl.runs.folder import RunFolder
from fedmtl_studies.cells import CellProcess, CellWork, end_cells, last_line, load_once, start_cell
from studies.small_cells import settings


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
    end_cells([cell])


def test_the_last_line_of_a_log_is_the_reason(tmp_path):
    log = tmp_path / "cell.log"
    assert last_line(log) == ""
    log.write_text("Traceback ...\nerror: tasks.x: no such file\n\n")
    assert last_line(log) == "tasks.x: no such file"


class Slow:
    """A process that is still saving when it is waited for, and done when it has been."""

    def __init__(self, told):
        self.told, self.is_there = told, True

    def is_alive(self):
        return self.is_there

    def terminate(self):
        self.told.append("terminate")

    def join(self, seconds=None):
        self.told.append("join")
        self.is_there = False


def test_all_cells_get_one_signal_before_any_is_waited_for():
    told = []
    lines = [multiprocessing.Pipe(duplex=False)[0] for _ in range(2)]
    end_cells(CellProcess(Slow(told), line) for line in lines)
    assert told == ["terminate", "terminate", "join", "join"]
    assert all(line.closed for line in lines)

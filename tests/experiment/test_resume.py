"""A resume gives the weights of an undisturbed run, or is refused by a line whose advice works."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedmtl.cli.app import app
from fedmtl.config.file import load_config
from fedmtl.errors import ConfigError, FedmtlError
from fedmtl.experiment.run import resume_run, start_run
from fedmtl.federation import server
from fedmtl.methods import server_optimizers
from fedmtl.model.bert.cpu.encoder_pass import kernels_here
from fedmtl.runs.event_lines import events_of, first_of
from fedmtl.runs.events import ConfigEvent, EndEvent, EnergyEvent, RemarkEvent, ResumedEvent, RoundEvent, StartEvent
from fedmtl.runs.folder import RunFolder, locked
from fedmtl.runs.log import read_events
from fedmtl.runs.summary import summarize
from raw_events import raw_events
from small_config import SMALL

KEPT = [
    'sharing.rules=[{"heads.similarity.*": client}, {"heads.*": task}, {"*": all}]',
    "training.keep_optimizer=true",
    "wire.up=int8",
    "training.num_rounds=3",
    "checkpoint.every=1",
]
PLAIN = ["training.num_rounds=3", "checkpoint.every=1"]


def digest(run: RunFolder) -> str | None:
    return summarize(read_events(run), run.name).weights_sha256


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Two finished runs of three rounds; the clients of `kept` keep values, optimizers and residuals."""
    output = tmp_path_factory.mktemp("runs")
    for name, overrides in {"kept": KEPT, "plain": PLAIN}.items():
        start_run(load_config(None, [*SMALL, f"output={output}", *overrides]), name)
    return output


@pytest.fixture
def kept(made, tmp_path) -> RunFolder:
    return RunFolder(Path(shutil.copytree(made / "kept", tmp_path / "runs" / "kept")))


@pytest.fixture
def plain(made, tmp_path) -> RunFolder:
    return RunFolder(Path(shutil.copytree(made / "plain", tmp_path / "runs" / "plain")))


def break_tensors(run: RunFolder, number: int) -> None:
    path = run.checkpoints / f"round-{number:04d}.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut_record(run: RunFolder, number: int) -> None:
    path = run.checkpoints / f"round-{number:04d}.json"
    path.write_bytes(path.read_bytes()[:-20])


def without_end(run: RunFolder) -> list[str]:
    lines = run.events.read_text().splitlines()
    return [line for line in lines if json.loads(line)["event"] != "end"]


class TestLock:
    def test_a_second_process_is_refused_before_it_touches_anything(self, plain):
        before = plain.events.read_bytes()
        with locked(plain.path), pytest.raises(FedmtlError, match=r"plain: another process is at work in it \(process"):
            resume_run(plain)
        assert plain.events.read_bytes() == before

    def test_a_run_holds_its_folder_while_it_goes_on(self, make_config):
        refused = []

        def observe(event):
            if isinstance(event, RoundEvent) and not refused:
                with pytest.raises(FedmtlError, match="another process is at work") as caught:
                    resume_run(RunFolder(folder / "busy"))
                refused.append(str(caught.value))

        config = make_config("training.num_rounds=1")
        folder = Path(config.output)
        start_run(config, "busy", observe)
        assert len(refused) == 1


class TestCheckpoints:
    @pytest.mark.parametrize("harm", [break_tensors, cut_record])
    def test_a_broken_last_one_is_named_and_the_one_before_gives_the_same_weights(self, kept, harm):
        whole = digest(kept)
        harm(kept, 3)
        seen = []
        resume_run(kept, seen.append)
        told = first_of(seen, ResumedEvent)
        # The true round, and which file is broken.
        assert told.round == 2
        assert len(told.broken) == 1
        assert "round-0003" in told.broken[0]
        assert digest(kept) == whole

    def test_further_back_than_clients_remember_is_refused_by_name(self, kept):
        for number in (2, 3):
            break_tensors(kept, number)
        before = kept.events.read_bytes()
        with pytest.raises(FedmtlError) as caught:
            resume_run(kept)
        message = str(caught.value)
        assert "would go on after round 1, for which client" in message
        assert "needs its state of round 1 and has those of rounds 2, 3" in message
        assert "\n" not in message
        assert kept.events.read_bytes() == before

    def test_a_clients_values_that_are_gone_are_not_begun_anew(self, kept):
        break_tensors(kept, 3)
        shutil.rmtree(kept.clients)
        with pytest.raises(FedmtlError, match=r"client similarity\S* needs its state of round 2 and has none"):
            resume_run(kept)

    def test_where_clients_keep_nothing_any_whole_one_gives_the_same_weights(self, plain):
        whole = digest(plain)
        for number in (2, 3):
            break_tensors(plain, number)
        resume_run(plain)
        assert digest(plain) == whole

    def test_all_broken_or_gone_does_not_begin_anew(self, plain):
        for path in plain.checkpoints.glob("*.json"):
            path.write_text("{")
        with pytest.raises(FedmtlError, match="no other checkpoint is whole"):
            resume_run(plain)
        shutil.rmtree(plain.checkpoints)
        with pytest.raises(FedmtlError, match=r"has no checkpoint, but events\.jsonl tells of round 3"):
            resume_run(plain)

    def test_one_of_another_model_is_refused_before_it_is_used(self, plain, make_config):
        other = start_run(make_config("model.server_model=random-1x16", "training.num_rounds=1"), "other")
        shutil.rmtree(plain.checkpoints)
        shutil.copytree(other.checkpoints, plain.checkpoints)
        with pytest.raises(FedmtlError, match="is of another model or config"):
            resume_run(plain)

    def test_a_clients_broken_state_is_that_clients_failure(self, kept, make_config):
        break_tensors(kept, 3)
        client = next(path for path in kept.clients.iterdir() if path.name.startswith("similarity"))
        path = client / "round-0002.safetensors"
        path.write_bytes(path.read_bytes()[:40])
        resume_run(kept)
        failures = [event for event in raw_events(kept) if event["event"] == "failure"]
        assert {event["client"] for event in failures} == {client.name}
        assert all("round-0002.safetensors" in event["reason"] for event in failures)


class TestEditedConfig:
    def edit(self, run: RunFolder, before: str, after: str) -> None:
        text = run.config.read_text()
        assert text.count(before) == 1
        run.config.write_text(text.replace(before, after))

    def test_one_that_changes_training_is_refused_with_the_keys_and_how_to_begin_anew(self, plain):
        break_tensors(plain, 3)
        self.edit(plain, "  batch_size: 8\n", "  batch_size: 16\n")
        self.edit(plain, "  num_rounds: 3\n", "  num_rounds: 5\n")
        before = plain.events.read_bytes()
        with pytest.raises(ConfigError) as caught:
            resume_run(plain)
        message = str(caught.value)
        assert "training.num_rounds from 3 to 5, training.batch_size from 8 to 16" in message
        assert message.endswith(f"undo that, or start a new run with `fedmtl run {plain.config}`")
        assert plain.events.read_bytes() == before
        (plain.path / "place.json").write_text("{}")
        with pytest.raises(ConfigError, match="start a new run with `fedmtl server --config "):
            resume_run(plain)

    def test_one_that_does_not_is_recorded_once_and_gives_the_same_weights(self, plain):
        whole = digest(plain)
        break_tensors(plain, 3)
        self.edit(plain, "  every: 1\n  where", "  every: 1 # as it was\n  where")
        self.edit(plain, "  round_timeout: 3600.0\n", "  round_timeout: 60.0\n")
        shown = []
        resume_run(plain, shown.append)
        resume_run(plain)
        edited = [event for event in events_of(read_events(plain), ConfigEvent) if event.changed]
        assert [event.changed for event in edited] == [{"federation.round_timeout": [3600.0, 60.0]}]
        assert first_of(shown, ConfigEvent) is not None
        assert digest(plain) == whole

    def test_a_run_of_an_earlier_version_has_no_record_and_gets_one(self, plain):
        lines = [line for line in without_end(plain) if json.loads(line)["event"] != "config"]
        plain.events.write_text("\n".join(lines) + "\n")
        resume_run(plain)
        assert len(events_of(read_events(plain), ConfigEvent)) == 1


def test_a_resume_that_rounds_otherwise_says_so(plain, monkeypatch):
    began = first_of(read_events(plain), StartEvent)
    # random-1x32 is laid out as BERT, so it is computed by what this installation has.
    assert began.kernels == kernels_here()
    other = "torch" if began.kernels == "compiled" else "compiled"
    monkeypatch.setattr("fedmtl.experiment.events.kernels_here", lambda: other)
    resume_run(plain)
    reasons = [event.reason for event in events_of(read_events(plain), RemarkEvent)]
    words = f"kernels {began.kernels} before, {other} now"
    assert reasons == [f"weights will not be those of an undisturbed run, bit for bit: {words}"]


class TestEvents:
    def harm(self, run: RunFolder, how: str) -> None:
        lines = without_end(run)
        if how == "half":
            lines = lines[: len(lines) // 2]
        elif how == "middle":
            middle = next(n for n, line in enumerate(lines) if '"round": 1' in line and '"event": "round"' in line)
            lines[middle] = lines[middle][:30]
        elif how == "opening":
            lines[0] = "[" * 3000
        run.events.write_text("\n".join(lines) + "\n")

    @pytest.mark.parametrize(
        ("how", "message"),
        [
            ("half", r"has no `round` of rounds \d to 3, and the checkpoint is of round 3"),
            ("middle", r"line \d+: is not JSON"),
            ("opening", "line 1: is not JSON"),
        ],
    )
    def test_what_is_lost_is_said_and_the_advice_of_the_message_works(self, plain, how, message):
        whole = digest(plain)
        self.harm(plain, how)
        refused = CliRunner().invoke(app, ["run", "--resume", str(plain.path)])
        assert isinstance(refused.exception, FedmtlError)
        assert re.search(message, str(refused.exception))
        advice = re.search(r"with `fedmtl (.*?)`", str(refused.exception))
        assert advice is not None
        done = CliRunner().invoke(app, shlex.split(advice[1]))
        assert done.exit_code == 0, done.exception
        assert "plain goes on after round 3" in done.stdout
        assert digest(plain) == whole
        # The opening is whole again, whatever was lost.
        kinds = [event["event"] for event in raw_events(plain)][:6]
        assert kinds == ["start", "data", "data", "data", "clients", "plan"]
        if how != "opening":
            assert "are lost; the weights are not" in done.stdout

    def test_a_whole_file_needs_no_repair_and_says_nothing(self, plain):
        plain.events.write_text("\n".join(without_end(plain)) + "\n")
        done = CliRunner().invoke(app, ["run", "--resume", str(plain.path)])
        assert done.exit_code == 0, done.exception
        assert "goes on after round 3" in done.stdout
        assert "lost" not in done.stdout


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[" * 3000,
        '{"id": "../../x", "host": "h", "port": 1, "certs": null}',
        '{"id": "0123456789abcdef", "host": "h", "port": 70000, "certs": null}',
        '{"id": "0123456789abcdef", "host": 7, "port": 1, "certs": null}',
    ],
)
def test_a_place_that_is_not_ours_is_one_line(tmp_path, text):
    pytest.importorskip("flwr")
    from fedmtl.deploy.server import saved_endpoint

    (tmp_path / "place.json").write_text(text)
    with pytest.raises(FedmtlError, match=r"place\.json: is not one of our files .*start a new run with"):
        saved_endpoint(RunFolder(tmp_path))


def breaking_in_round_2(step):
    """The same function, which fails when it is called for the second time."""
    calls: list[int] = []

    def breaks(*given):
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError("what was wrong")
        return step(*given)

    return breaks


def test_a_run_that_ends_by_a_mistake_of_ours_says_that_it_is_over_and_goes_on_from_its_last_round(plain, monkeypatch):
    config = load_config(None, [*SMALL, f"output={plain.path.parent}", *PLAIN])
    monkeypatch.setattr(server, "_check_enough", breaking_in_round_2(server._check_enough))
    with pytest.raises(ZeroDivisionError):
        start_run(config, "broken")
    run = RunFolder(plain.path.parent / "broken")
    end = raw_events(run)[-1]
    assert (end["event"], end["status"], end["reason"]) == ("end", "failed", "unexpected ZeroDivisionError")
    assert run.report.exists()
    assert digest(resume_run(run)) == digest(plain)


def test_a_run_that_ends_by_a_mistake_in_a_method_names_it_and_goes_on_from_its_last_round(plain, monkeypatch):
    # Without momentum, FedAvgM's step is the plain sum.
    method = "federation.server_optimizer={kind: fedavgm, momentum: 0}"
    config = load_config(None, [*SMALL, f"output={plain.path.parent}", *PLAIN, method])
    monkeypatch.setattr(server_optimizers, "server_step", breaking_in_round_2(server_optimizers.server_step))
    reason = "round 2: server_optimizer failed with ZeroDivisionError: what was wrong"
    with pytest.raises(server.RoundFailed, match=reason):
        start_run(config, "broken")
    run = RunFolder(plain.path.parent / "broken")
    end = read_events(run)[-1]
    assert (end.kind, end.status, end.reason) == ("end", "failed", reason)
    assert run.report.exists()
    assert digest(resume_run(run)) == digest(plain)


def test_energy_is_summed_over_sessions_also_for_rounds_that_were_cut_back(plain):
    first = events_of(read_events(plain), EnergyEvent)
    before = summarize(read_events(plain), "plain").energy
    assert before is not None
    assert sum(event.cpu_seconds for event in first) == before.cpu_seconds > 0
    break_tensors(plain, 3)
    resume_run(plain)
    spent = events_of(read_events(plain), EnergyEvent)
    after = first_of(read_events(plain), EndEvent).energy
    # The first session's event stays as it was, though its last round was trained again.
    assert spent[: len(first)] == first
    assert len(spent) == len(first) + 1
    assert after.cpu_seconds == sum(event.cpu_seconds for event in spent) > before.cpu_seconds
    assert after.estimated == any(event.cpu_source == "estimated" for event in spent)

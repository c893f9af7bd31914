import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from compose_stand_in import Wrong, in_order, main, read_services
from fedmtl.cli.app import app
from fedmtl.config.file import demo_config, load_config
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events
from fedmtl.runs.summary import summarize

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE = DEPLOY / "compose.yaml"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
COMMANDS = typer.main.get_command(app)
SITES = ("north", "south", "west")


def sections():
    return yaml.safe_load(COMPOSE.read_text())["services"]


def test_every_service_is_without_rights_and_its_root_is_read_only():
    for name, section in sections().items():
        assert section["user"] == "10001:10001", name
        assert section["read_only"] is True, name
        assert section["cap_drop"] == ["ALL"], name
        assert section["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in section, name


def test_a_private_key_is_mounted_into_its_site_alone_and_the_authority_into_the_server():
    mounts = {name: {each.split(":")[0] for each in section["volumes"]} for name, section in sections().items()}
    for site in SITES:
        assert {name for name, volumes in mounts.items() if f"{site}-key" in volumes} == {site, f"{site}-key"}
        assert {name for name, volumes in mounts.items() if site in volumes} == {site}
    assert {name for name, volumes in mounts.items() if "certs" in volumes} == {"enrol", "server"}


def test_every_command_is_one_that_the_program_takes(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for section in sections().values():
        lines = [["fedmtl", *section["command"]]]
        if section.get("entrypoint") == ["sh", "-c"]:
            [script] = section["command"]
            lines = [shlex.split(line.split("||")[-1]) for line in re.split(r";|&&", script) if "fedmtl" in line]
        for line in lines:
            assert line[0] == "fedmtl"
            context = COMMANDS.make_context("fedmtl", line[1:])
            name, command, rest = COMMANDS.resolve_command(context, [*context._protected_args, *context.args])
            command.make_context(name, rest, parent=context)


def test_commands_have_this_machines_folders_and_addresses(tmp_path):
    services = read_services(COMPOSE, tmp_path, port=1234)
    assert services["north"].command == [
        "fedmtl",
        "client",
        "--client-id=north",
        "--tasks=sentiment,paraphrase",
        "--server=127.0.0.1:1234",
        f"--ca={tmp_path}/volumes/public/ca.crt",
        f"--key={tmp_path}/volumes/north-key/north.key",
        f"--folder={tmp_path}/volumes/north/north",
    ]
    assert services["server"].health == ["python3", str(DEPLOY / "health.py"), "port", "1234"]
    assert "--listen=127.0.0.1:1234" in services["server"].command
    assert services["north"].environment == {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def test_in_the_root_of_an_image_commands_and_paths_are_those_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr("os.chown", lambda *args: None)
    north = read_services(COMPOSE, tmp_path / "out", root=tmp_path / "image")["north"]
    assert north.command[:4] == ["unshare", "--mount", "--propagation", "private"]
    assert north.command[north.command.index("--") + 1 :][:4] == ["/data", "fedmtl", "client", "--client-id=north"]
    assert "--server=server:9092" in north.command
    words = north.command[: north.command.index("--")]
    mounted = {words[at + 1]: words[at + 2] for at in range(10, len(words), 3)}
    assert mounted == {"/data": "rw", "/keys": "ro", "/public": "ro", "/etc/hosts": "ro"}
    assert north.environment["PATH"] == "/opt/fedmtl/bin:/usr/local/bin:/usr/bin:/bin"
    assert north.environment["HOME"] == "/data"


def test_services_come_after_those_that_they_wait_for(tmp_path):
    order = [service.name for service in in_order(read_services(COMPOSE, tmp_path))]
    assert order[0] == "north-key"
    assert order[3:5] == ["enrol", "server"]
    assert sorted(order[5:]) == sorted(SITES)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("{privileged: true}", "services.a.privileged is a key that this script does not know"),
        ("{volumes: ['nowhere:/data']}", "nowhere is no volume of the file"),
        ("{depends_on: {b: {condition: service_started}}}", "b with service_started is not known"),
        ("{healthcheck: {test: 'true'}}", "begins with CMD"),
    ],
)
def test_what_it_does_not_do_is_named(tmp_path, section, words):
    file = tmp_path / "compose.yaml"
    file.write_text(f"services: {{a: {section}}}")
    with pytest.raises(Wrong, match=re.escape(words)):
        read_services(file, tmp_path)


def test_a_service_that_fails_ends_the_others_with_its_last_words(tmp_path, capsys):
    file = tmp_path / "compose.yaml"
    file.write_text(
        "services:\n"
        "  first: {entrypoint: [sh, -c], command: ['echo no such thing; exit 3']}\n"
        "  second: {entrypoint: [sh], depends_on: {first: {condition: service_completed_successfully}}}\n"
    )
    assert main([str(file), "--folder", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == "error: first ended with 3: no such thing\n"


def test_the_federation_is_the_demonstration_with_three_sites_of_two_tasks():
    ours, demo = load_config(DEPLOY / "federation.yaml"), demo_config()
    assert {name: client.tasks for name, client in ours.clients.items()} == {
        "north": ["sentiment", "paraphrase"],
        "south": ["paraphrase", "similarity"],
        "west": ["similarity", "sentiment"],
    }
    assert ours.model == demo.model
    assert ours.training == demo.training
    assert ours.tasks == demo.tasks


def test_the_image_ends_without_a_compiler_and_without_rights():
    stages = DEPLOY.joinpath("Dockerfile").read_text().split("\nFROM ")
    assert len(stages) == 3
    assert "gcc" in stages[1]
    assert "gcc" not in stages[2]
    assert "\nUSER 10001:10001\n" in stages[2]
    assert "\nHEALTHCHECK " in stages[2]
    assert "apt-get" not in stages[2]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_units_are_valid_and_hardened(unit):
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False)
    others = [line for line in done.stderr.splitlines() if "/opt/fedmtl/bin/fedmtl is not executable" not in line]
    assert others == []
    # 0 is locked up, 10 is unprotected.
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=15", unit]
    rated = subprocess.run(command, capture_output=True, text=True, check=False)
    assert rated.returncode == 0, rated.stdout.splitlines()[-1]


@pytest.mark.slow
def test_one_command_runs_a_federation_of_three_sites_to_the_weights_of_one_machine(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert main([str(COMPOSE), "--folder", str(tmp_path), "--port", str(port), "--seconds", "550"]) == 0
    served = RunFolder(tmp_path / "volumes" / "server" / "runs" / "federation")
    alone = tmp_path / "alone"
    config = DEPLOY / "federation.yaml"
    command = [
        sys.executable,
        "-m",
        "fedmtl",
        "run",
        str(config),
        "--name",
        "alone",
        "--set",
        f"output={alone}",
        "--quiet",
    ]
    subprocess.run(command, check=True, capture_output=True)
    ends = [read_events(run)[-1] for run in (served, RunFolder(alone / "alone"))]
    assert [end.status for end in ends] == ["done", "done"]
    assert ends[0].weights_sha256 == ends[1].weights_sha256
    # The demonstration's six clients come to .97 on the same examples.
    assert (summarize(read_events(served), "federation").overall or 0) > 0.9

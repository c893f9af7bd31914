"""What the dashboard's server answers, refuses and sends by itself; nothing of it writes."""

import asyncio
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dashboard.made_runs import a_round, append, end, opening, write_run
from fedmtl.cli import app as cli
from fedmtl.cli.dashboard import with_address
from fedmtl.errors import FedmtlError

server = pytest.importorskip("fedmtl.dashboard.server", reason="needs the extra `serve`")
httpx = pytest.importorskip("httpx")

HOST = "http://127.0.0.1:8080"
TOKEN = "a-token-of-more-than-16-letters"


def get(dashboard, *paths, method="GET", base=HOST, **given):
    """The answers to requests, without a socket."""

    async def ask():
        transport = httpx.ASGITransport(dashboard.app(), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=base) as client:
            return [await client.request(method, path, **given) for path in paths]

    answers = asyncio.run(ask())
    return answers[0] if len(paths) == 1 else answers


@pytest.fixture
def runs(tmp_path):
    write_run(tmp_path / "runs" / "one", 2)
    return tmp_path / "runs"


@pytest.fixture
def dashboard(runs):
    return server.Dashboard([runs])


@pytest.fixture
def protected(runs):
    return server.Dashboard([runs], "0.0.0.0", server.Protection(TOKEN, Path("c"), Path("k")))


PATHS = ("/", "/static/page.js", "/static/page.css", "/api/runs", "/api/run?id=0/one", "/api/compare?id=0/one", "/no")


def test_every_answer_forbids_scripts_and_frames_of_others(dashboard):
    for answer in get(dashboard, *PATHS):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "style-src 'self';" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"


def test_the_page_has_no_inline_script_or_style_and_writes_no_markup():
    for name in server.FILES:
        text = (server.HERE / name).read_text(encoding="utf-8")
        if name.endswith(".html"):
            assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", text)
            assert not re.search(r"(src|href|action)=\"(?!/|#)", text)
        elif name.endswith(".js"):
            assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|\bstyle:", text)
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "10.0.0.1", ""])
def test_a_name_that_was_rebound_to_this_machine_is_refused(dashboard, host):
    answers = get(dashboard, *PATHS, "/api/stream", headers={"Host": host})
    assert {answer.status_code for answer in answers} == {403}


def test_names_of_this_machine_are_accepted(dashboard):
    for host in ("localhost:1", "127.0.0.1", "[::1]:8080"):
        assert get(dashboard, "/api/runs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_but_reading_is_accepted(dashboard, method):
    answers = get(dashboard, "/", "/api/runs", "/api/run?id=0/one", method=method)
    assert {answer.status_code for answer in answers} == {405}


@pytest.mark.parametrize(
    "id",
    ["", "0", "0/..", "0/../runs/one", "0//one", "/etc/passwd", "0/one/../one", "0/one/events.jsonl", "1/one", "0/\0"],
)
def test_only_an_id_of_the_list_opens_a_run(dashboard, id):
    for path in ("/api/run", "/api/compare", "/api/stream", "/api/study"):
        assert get(dashboard, path, params={"id": id}).status_code in (400, 404)


@pytest.mark.parametrize("name", ["server.py", "page.html", "..%2fserver.py", "%2e%2e/state.py", "", "none.js"])
def test_only_the_files_of_the_page_are_served(dashboard, name):
    assert get(dashboard, f"/static/{name}").status_code == 404


def test_the_list_and_a_run_as_json(dashboard):
    listed, run = get(dashboard, "/api/runs", "/api/run?id=0/one")
    assert [row["name"] for row in listed.json()["runs"]] == ["one"]
    assert run.json()["head"]["round"] == 2
    assert list(run.json()) == ["head", "curves", "sites", "plan", "timeline", "failures", "config"]


def test_markup_of_a_stranger_travels_as_json_alone(runs):
    name = "<script>alert(1)</script>"
    write_run(runs / "x", 1, sites=(name,))
    answer = get(server.Dashboard([runs]), "/api/run?id=0/x")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["sites"][0]["name"] == name


def test_too_many_runs_to_compare_are_refused(dashboard):
    assert get(dashboard, "/api/compare?" + "&".join(f"id=0/{n}" for n in range(9))).status_code == 400


# The token.


def test_without_the_token_nothing_is_shown(protected):
    answers = get(protected, "/api/runs", "/api/run?id=0/one", "/api/stream", "/static/page.js", "/no")
    assert {answer.status_code for answer in answers} == {401}
    first = get(protected, "/")
    assert (first.status_code, first.headers["location"]) == (303, "/login")
    assert get(protected, "/login").status_code == 200


@pytest.mark.parametrize(("token", "status"), [(TOKEN, 200), (TOKEN[:-1], 401), ("", 401), (TOKEN + "x", 401)])
def test_the_token_opens_the_page_for_a_program(protected, token, status):
    assert get(protected, "/api/runs", headers={"Authorization": f"Bearer {token}"}).status_code == status


def test_the_token_opens_the_page_for_a_browser(protected, monkeypatch):
    monkeypatch.setattr(server, "WRONG_TOKEN_SECONDS", 0.0)
    assert get(protected, "/login", method="POST", data={"token": "wrong"}).status_code == 403
    answer = get(protected, "/login", method="POST", data={"token": TOKEN})
    cookie = answer.headers["set-cookie"]
    assert answer.status_code == 303
    assert TOKEN not in cookie
    assert all(word in cookie for word in ("HttpOnly", "Secure", "SameSite=strict"))
    assert get(protected, "/api/runs", headers={"Cookie": cookie.split(";")[0]}).status_code == 200
    assert get(protected, "/api/runs", headers={"Cookie": f"{server.COOKIE}=x"}).status_code == 401


def test_a_path_that_only_begins_like_the_form_needs_the_token(protected):
    assert get(protected, "/login%3F/api/runs").status_code == 401
    assert get(protected, "/login%3F", method="POST").status_code == 405


def test_a_form_of_any_size_is_not_read(protected):
    assert get(protected, "/login", method="POST", content=b"token=" + b"x" * 5000).status_code == 413


def test_a_form_that_never_ends_is_not_waited_for(protected, monkeypatch):
    monkeypatch.setattr(server, "FORM_SECONDS", 0.05)

    async def body():
        yield b"token="
        await asyncio.sleep(5)
        yield TOKEN.encode()

    started = time.monotonic()
    assert get(protected, "/login", method="POST", content=body()).status_code == 408
    assert time.monotonic() - started < 4


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "example.org"])
def test_an_address_that_others_reach_needs_tls_and_a_token(host):
    with pytest.raises(FedmtlError, match="is not this machine's loopback"):
        server.check_address(host, None)
    server.check_address(host, server.Protection(TOKEN, Path("c"), Path("k")))
    server.check_address("127.0.0.1", None)


def test_a_token_that_others_may_read_or_guess_is_refused(tmp_path):
    file = tmp_path / "token"
    file.write_text("short\n")
    file.chmod(0o600)
    with pytest.raises(FedmtlError, match="has 5 letters"):
        server.read_token(file)
    file.write_text(f"{TOKEN}\n")
    assert server.read_token(file) == TOKEN
    file.chmod(0o644)
    with pytest.raises(FedmtlError, match="others may open it"):
        server.read_token(file)
    with pytest.raises(FedmtlError, match="cannot be read"):
        server.read_token(tmp_path / "none")


# What the server sends by itself.


@asynccontextmanager
async def streamed(dashboard, query=""):
    """The events of a stream as they come: a function that waits for the next one."""
    parts = asyncio.Queue()
    status = []

    async def send(message):
        if message["type"] == "http.response.start":
            status.append(message["status"])
        elif message.get("body"):
            await parts.put(message["body"])

    async def receive():
        await asyncio.sleep(60)

    scope = {
        "type": "http", "method": "GET", "path": "/api/stream", "raw_path": b"/api/stream", "root_path": "",
        "query_string": query.encode(), "headers": [(b"host", b"localhost")], "scheme": "http",
        "server": ("127.0.0.1", 80), "http_version": "1.1", "asgi": {"spec_version": "2.0"},
    }  # fmt: skip
    task = asyncio.create_task(dashboard.app()(scope, receive, send))

    async def following():
        while True:
            text = (await asyncio.wait_for(parts.get(), 5)).decode()
            if text.startswith("event: "):
                name, data = text.split("\n")[:2]
                return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))

    try:
        yield following
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_an_event_reaches_the_page_within_a_second(runs, dashboard):
    async def follow():
        async with streamed(dashboard, "id=0/one") as following:
            name, first = await following()
            assert (name, first["head"]["round"]) == ("run", 2)
            taken = []
            for number in (3, 4, 5):
                started = time.monotonic()
                append(runs / "one", *a_round(number))
                _, later = await following()
                taken.append(time.monotonic() - started)
                assert set(later) == {"head", "curves", "sites", "timeline"}
                assert later["head"]["round"] == number
            return taken

    # The quickest of three: on a busy machine a single one says how busy it is.
    assert min(asyncio.run(follow())) < 1.0


def test_the_list_sends_rows_that_changed_and_names_those_that_are_gone(runs, dashboard, monkeypatch):
    monkeypatch.setattr(server, "LIST_SECONDS", 0.05)
    write_run(runs / "two", 1, done=False)

    async def follow():
        async with streamed(dashboard) as following:
            _, first = await following()
            assert sorted(row["name"] for row in first["runs"]) == ["one", "two"]
            append(runs / "two", end("failed", reason="no updates"))
            _, second = await following()
            assert [(row["name"], row["status"], row["reason"]) for row in second["runs"]] == [
                ("two", "failed", "no updates")
            ]
            (runs / "one").rename(runs.parent / "one")
            _, third = await following()
            assert (third["runs"], third["gone"]) == ([], ["0/one"])

    asyncio.run(follow())


def test_a_stream_goes_on_when_the_run_disappears(runs, dashboard):
    async def follow():
        async with streamed(dashboard, "id=0/one") as following:
            await following()
            (runs / "one").rename(runs.parent / "away")
            _, gone = await following()
            assert gone["head"]["status"] == "gone"

    asyncio.run(follow())


def test_a_stream_ends_with_the_server_and_when_its_page_is_closed(dashboard, monkeypatch):
    monkeypatch.setattr(server, "MOST_STREAMS", 1)

    async def follow():
        async with streamed(dashboard) as following:
            await following()
            assert dashboard._num_streams == 1
            transport = httpx.ASGITransport(dashboard.app())
            async with httpx.AsyncClient(transport=transport, base_url=HOST) as client:
                assert (await client.get("/api/stream")).status_code == 503
        assert dashboard._num_streams == 0
        dashboard.is_stopping = lambda: True
        return [part async for part in dashboard._list_events()]

    assert asyncio.run(follow()) == []


def test_pages_that_are_opened_at_once_are_no_more_than_the_limit(dashboard, monkeypatch):
    monkeypatch.setattr(server, "MOST_STREAMS", 1)
    scope = {"type": "http", "query_string": b"id=0/one", "headers": []}

    async def follow():
        three = (dashboard.stream(server.Request(scope)) for _ in range(3))
        return await asyncio.gather(*three, return_exceptions=True)

    answers = asyncio.run(follow())
    assert sorted(getattr(answer, "status", 200) for answer in answers) == [200, 503, 503]


def test_two_hundred_runs_of_fifty_rounds_are_read_without_the_lines_of_single_clients(tmp_path, monkeypatch):
    from fedmtl.dashboard import files

    lines = b"".join([*opening(50), *(part for number in range(51) for part in a_round(number)), end(rounds=50)])
    for number in range(200):
        folder = tmp_path / f"run-{number:03}"
        folder.mkdir()
        (folder / "events.jsonl").write_bytes(lines)
    parsed = []
    plain = files.from_json
    monkeypatch.setattr(files, "from_json", lambda value: parsed.append(value["event"]) or plain(value))
    dashboard = server.Dashboard([tmp_path])
    assert len(get(dashboard, "/api/runs").json()["runs"]) == 200
    # Of each run: start, 51 rounds, its end, and the scores of the last two rounds of three tasks.
    assert len(parsed) <= 200 * (1 + 51 + 1 + 6)
    before = len(parsed)
    get(dashboard, "/api/runs")
    assert len(parsed) == before


# The commands.


def refused(capsys, *words):
    sys.argv = ["fedmtl", *words]
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code != 0
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    return said[0]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["dashboard", "none-such"], "none-such: no such folder"),
        (["dashboard", ".", "--allow-actions"], "--allow-actions: the page only reads"),
        (["dashboard", ".", "--listen", "0.0.0.0:0"], "0.0.0.0 is not this machine's loopback"),
        (["dashboard", ".", "--listen", "nonsense"], "--listen: found nonsense, write HOST:PORT"),
        (["dashboard", ".", "--token", "t"], "--token, --certificate and --key: one is missing"),
        (["run", "--dashboard", "0.0.0.0:8080"], "--dashboard: 0.0.0.0 is not this machine's loopback"),
        (["server", "--dashboard", "10.0.0.1:8080"], "--dashboard: 10.0.0.1 is not this machine's loopback"),
    ],
)
def test_what_a_command_refuses_in_one_line(capsys, monkeypatch, words, reason):
    monkeypatch.setattr(sys, "argv", [])
    assert reason in refused(capsys, *words)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("run --dashboard", "run --dashboard 127.0.0.1:8080"),
        ("run --dashboard 127.0.0.1:9 a.yaml", "run --dashboard 127.0.0.1:9 a.yaml"),
        ("run --dashboard a.yaml --set x=1:2", "run --dashboard 127.0.0.1:8080 a.yaml --set x=1:2"),
        ("run --dashboard=[::1]:0", "run --dashboard=[::1]:0"),
        ("", ""),
    ],
)
def test_the_address_beside_a_run_may_be_left_out(given, read):
    assert with_address(given.split()) == read.split()


@pytest.mark.slow
def test_a_page_beside_a_run_shows_it_and_ends_with_it(runs):
    from fedmtl.cli.dashboard import page_beside

    said = []
    with page_beside(runs, "127.0.0.1:0", said.append):
        address = said[0].removeprefix("dashboard: ")
        assert httpx.get(f"{address}/api/runs").json()["runs"][0]["name"] == "one"
        with pytest.raises(FedmtlError, match="cannot listen"), page_beside(runs, address[7:], said.append):
            pass
    with pytest.raises(httpx.ConnectError):
        httpx.get(address)


@pytest.mark.slow
def test_a_page_beside_a_run_ends_also_when_the_run_is_killed(runs):
    code = (
        "import sys, time; from pathlib import Path; from fedmtl.cli.dashboard import page_beside\n"
        "with page_beside(Path(sys.argv[1]), '127.0.0.1:0', lambda line: print(line, flush=True)): time.sleep(60)"
    )
    run = subprocess.Popen([sys.executable, "-c", code, str(runs)], stdout=subprocess.PIPE, text=True)
    address = run.stdout.readline().strip().removeprefix("dashboard: ")
    assert httpx.get(f"{address}/api/runs").status_code == 200
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stdout.close()
    assert any(is_closed(address) or time.sleep(0.2) for _ in range(100))


def is_closed(address):
    """Whether nothing listens there any more."""
    try:
        httpx.get(address, timeout=2)
    except httpx.TransportError:
        return True
    return False


@pytest.mark.slow
def test_with_a_token_the_page_is_served_over_tls_and_ends_on_a_signal_while_it_is_open(runs, tmp_path):
    certificates = pytest.importorskip("fedmtl.engines.flower.certificates", reason="needs the extra `flower`")
    certificates.make_authority(tmp_path / "certs", ["127.0.0.1"])
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    files = ["--certificate", tmp_path / "certs/server.crt", "--key", tmp_path / "certs/server.key", "--token", token]
    command = [sys.executable, "-m", "fedmtl", "dashboard", runs, "--listen", "127.0.0.1:0", *files]
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True)
    address = process.stdout.readline().removeprefix("dashboard: ").partition(";")[0]
    assert address.startswith("https://")
    context = ssl.create_default_context(cafile=str(tmp_path / "certs/ca.crt"))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    assert httpx.get(f"{address}/api/runs", verify=context).status_code == 401
    with httpx.stream("GET", f"{address}/api/stream", verify=context, headers=headers) as stream:
        assert next(stream.iter_lines()).startswith("retry")
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert time.monotonic() - started < 15
    assert process.stdout.read() == "stopped\n"
    process.stdout.close()


@pytest.mark.slow
def test_the_page_is_served_without_loading_torch():
    code = (
        "import sys; import fedmtl.dashboard.server; print([n for n in ('torch', 'transformers') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert done.stdout.strip() == "[]", done.stderr

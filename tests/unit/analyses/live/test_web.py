"""`commtrace top --web`: what it serves, what it refuses, and clients and logs that fail."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import re
import shutil
import socket
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import processes
import pytest
from factory import WORLD, LogFactory, record, training
from ports import free_port

pytest.importorskip("plotly", reason="plotly is not installed")
pytest.importorskip("jinja2", reason="jinja2 is not installed")

from commtrace.cli import main
from commtrace.commands import http_server, live_pages, option_types
from commtrace.commands.exit_status import AS_EXPECTED, FAILED
from commtrace.commands.http_server import serve
from commtrace.commands.live_pages import ReportPage
from commtrace.commands.report import page_of_log

LIMIT_SECONDS = 120
TOKEN = "a-token-of-the-tests"


@dataclass
class Answer:
    """An answer, with its headers in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


def ask(port: int, target: str = "/", method: str = "GET", **headers: str) -> Answer:
    """Send a request; the target is not normalised. Keywords are headers, with _ for -."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_SECONDS)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    with contextlib.closing(connection):
        connection.putrequest(method, target, skip_host="Host" in sent, skip_accept_encoding=True)
        for name, value in sent.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())


def exchange(port: int, request: bytes) -> bytes:
    """Send bytes, and return all that comes."""
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_SECONDS) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@dataclass
class Served:
    """A `top --web` of a run that goes on until `end` is called."""

    log: Path
    port: int
    end: Callable[[], list[int]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The pages of a run whose process is on another host, and whose end is therefore not known."""
    log = tmp_path_factory.mktemp("web") / "log"
    process = LogFactory(log).process(0, pid=100, world_size=1, boot_id="a").known({WORLD: [0]})
    process.write([record(seq=step, step=step) for step in range(3)])
    port, statuses = free_port(), list[int]()
    arguments = ["top", str(log), "--web", str(port), "--interval", "0.1"]
    thread = threading.Thread(target=lambda: statuses.append(main(arguments)), daemon=True)
    thread.start()

    def end() -> list[int]:
        process.end()
        thread.join(LIMIT_SECONDS)
        return statuses

    wait_for(lambda: is_open(port))
    yield Served(log, port, end)
    assert end() == [AS_EXPECTED], "the server ends with the run"
    assert not is_open(port)


def is_open(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def without_state(page: str) -> str:
    """Return a page without the line on its state, and without what differs from reading to reading."""
    return re.sub(r'  <p class="state".*</p>\n', "", page)


def test_the_page_is_that_of_the_report(served: Served, tmp_path: Path) -> None:
    wait_for(lambda: ask(served.port).status == 200)
    answer = ask(served.port)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert re.search(r'<p class="state" role="status">As of \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC', answer.text)
    assert main(["report", str(served.log), "--html", str(tmp_path / "page.html")]) == AS_EXPECTED
    assert without_state(answer.text) == (tmp_path / "page.html").read_text()
    assert answer.headers["cache-control"] == "no-store"
    assert "python" not in answer.headers["server"].lower()
    compressed = ask(served.port, Accept_Encoding="gzip, br")
    assert compressed.headers["content-encoding"] == "gzip"
    assert without_state(gzip.decompress(compressed.body).decode()) == without_state(answer.text)


def test_the_state_is_that_of_top(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(ask(served.port, "/state.json").text)
    assert main(["top", str(served.log), "--json"]) == AS_EXPECTED
    printed = json.loads(capsys.readouterr().out)
    assert {**document, "read_ns": 0} == {**printed, "read_ns": 0}
    assert (document["format"], document["processes"], document["is_over"]) == ("commtrace-live", {"unknown": 1}, False)
    assert document["step"] == 2
    assert {"volume_by_purpose", "step_times", "stuck_calls"} <= {*document["tables"]} == {*document["columns"]}


def test_a_page_that_reloads_itself(served: Served) -> None:
    wait_for(lambda: ask(served.port).status == 200)
    assert ask(served.port, "/?refresh=60").headers["refresh"] == "60"
    assert ask(served.port, "/?refresh=0").headers["refresh"] == "5"
    for query in ("refresh=-1", "refresh=x", "refresh=", "refresh=%0d%0aSet-Cookie:x", ""):
        assert "refresh" not in ask(served.port, f"/?{query}").headers


def test_head_has_the_headers_alone(served: Served) -> None:
    head, got = ask(served.port, "/state.json", "HEAD"), ask(served.port, "/state.json")
    assert (head.status, head.body) == (200, b"")
    assert head.headers["content-type"] == "application/json; charset=utf-8"
    assert int(head.headers["content-length"]) == pytest.approx(len(got.body), abs=50)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "get", "X"])
def test_other_methods(served: Served, method: str) -> None:
    answer = ask(served.port, "/", method)
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    "target",
    [
        "/../../../../etc/passwd", "/..%2f..%2f..%2f..%2fetc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd",
        "/etc/passwd", "file:///etc/passwd", "/state.json/../../etc/passwd", "/%00", "/state.json%00", "/\\..\\etc",
        "/log", "/index.html", "/%2fetc%2fpasswd", "/" + "a" * 60_000, "http://127.0.0.1/etc/passwd", "*", "etc/passwd",
    ],
)  # fmt: skip
def test_no_other_path(served: Served, target: str) -> None:
    answer = exchange(served.port, f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\n\r\n".encode())
    assert int(answer.split()[1]) in (400, 404), answer[:200]
    assert b"root:" not in answer
    assert b"/bin/" not in answer


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\0\0\0\0\r\n\r\n", b"", b"\x16\x03\x01\x02\0", b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\0 HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 1000 + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
    ],
)  # fmt: skip
def test_broken_requests(served: Served, request_bytes: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # not all was read
        answer = exchange(served.port, request_bytes)
        assert b" 200 " not in answer.partition(b"\r\n")[0]
    assert ask(served.port, "/state.json").status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost,evil", "[::2]"]
)
def test_a_page_of_another_site_cannot_read(served: Served, host: str) -> None:
    """A host name of another site may be made to point to 127.0.0.1 (DNS rebinding)."""
    assert ask(served.port, Host=host).status == 421
    assert ask(served.port, "/state.json", Host=host).status == 421


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9000", "127.0.0.1", "[::1]:80"])
def test_names_of_this_host(served: Served, host: str) -> None:
    """A tunnel has another port."""
    assert ask(served.port, "/state.json", Host=host).status == 200


def test_slow_clients_keep_no_others_waiting(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 that send nothing, and one that sends a byte again and again, which no timeout of a socket would end."""
    monkeypatch.setattr(http_server, "_REQUEST_SECONDS", 3.0)
    with contextlib.ExitStack() as open_connections:
        idle = [
            open_connections.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=LIMIT_SECONDS))
            for _ in range(100)
        ]
        slow = open_connections.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=0.2))
        assert ask(served.port, "/state.json").status == 200
        assert {connection.recv(1) for connection in idle} == {b""}, "they are closed"
        with contextlib.suppress(TimeoutError):
            wait_for(lambda: sends_in_vain(slow))


def sends_in_vain(connection: socket.socket) -> bool:
    """Send a byte; return whether the connection is closed."""
    try:
        connection.sendall(b"G")
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_too_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_MAX_CONNECTIONS", 3)
    port = free_port()
    with serve(hello, port, "127.0.0.1", None, requires_token=True), contextlib.ExitStack() as idle:
        for _ in range(3):
            idle.enter_context(socket.create_connection(("127.0.0.1", port), timeout=LIMIT_SECONDS))
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_SECONDS) as refused:
            assert refused.recv(1) == b""
        idle.close()
        wait_for(lambda: answers(port))


def answers(port: int) -> bool:
    with contextlib.suppress(OSError, http.client.HTTPException):
        return ask(port).status == 200
    return False


# ---- tokens --------------------------------------------------------------------------------------------------------


def hello(_: object, start: Callable[[str, list[tuple[str, str]]], object]) -> list[bytes]:
    """Answer everything."""
    start("200 OK", [])
    return [b"hello"]


@pytest.fixture(scope="module")
def guarded() -> Iterator[int]:
    """The port of a server with a token."""
    port = free_port()
    with serve(hello, port, "127.0.0.1", TOKEN, requires_token=True) as server:
        assert server.url == f"http://127.0.0.1:{port}/?token={TOKEN}"
        yield port


def test_the_token_of_an_address_becomes_a_cookie(guarded: int) -> None:
    first = ask(guarded, f"/a%20b?x=1&token={TOKEN}")
    assert (first.status, first.headers["location"], first.body) == (303, "/a%20b?x=1", b"")
    cookie, *attributes = first.headers["set-cookie"].split("; ")
    assert {*attributes} == {"HttpOnly", "SameSite=Lax", "Path=/"}
    assert ask(guarded, "/", Cookie=f"other=1; {cookie}").text == "hello"
    assert ask(guarded, "/", Authorization=f"Bearer {TOKEN}").text == "hello"
    assert ask(guarded, f"/%2fevil.example/?token={TOKEN}").headers["location"] == "/evil.example/", "of this server"


@pytest.mark.parametrize(
    ("target", "headers"),
    [
        ("/", {}), ("/nothing", {}), ("/?token=", {}), (f"/?token={TOKEN[:-1]}", {}), (f"/?token={TOKEN}x", {}),
        (f"/?Token={TOKEN}", {}), ("/?token=%ff%fe", {}), ("/", {"Authorization": "Bearer wrong"}),
        ("/", {"Authorization": TOKEN}), ("/", {"Authorization": f"Basic {TOKEN}"}), ("/", {"Authorization": "Bearer"}),
        ("/", {"Cookie": f"commtrace-1={TOKEN}"}), ("/", {"Cookie": f"token={TOKEN}"}), ("/", {"Cookie": "=;=\x7f"}),
        ("/", {"Authorization": "Bearer \xff"}),
    ],
)  # fmt: skip
def test_without_the_token(guarded: int, target: str, headers: dict[str, str]) -> None:
    answer = ask(guarded, target, **headers)
    assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert "set-cookie" not in answer.headers
    assert TOKEN not in answer.text


def test_other_addresses_require_a_token() -> None:
    """One is made if none is given; on this host alone, none is needed."""
    port = free_port()
    with serve(hello, port, "0.0.0.0", None, requires_token=True) as server:
        (token,) = urllib.parse.parse_qs(urllib.parse.urlsplit(server.url).query)["token"]
        assert len(token) == 32
        assert ask(port).status == 401
        assert ask(port, Authorization=f"Bearer {token}", Host="node7:80").text == "hello"
    with serve(hello, port, "127.0.0.1", None, requires_token=True) as server:
        assert server.url == f"http://127.0.0.1:{port}/"
        assert ask(port).text == "hello"


def test_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert option_types.access_token(f"@{tmp_path / 'token'}") == TOKEN
    for text, message in (
        ("short", "at least 16 characters"), ("a b c d e f g h i j", "at least 16"), ("@/no/such", "No such file"),
        ("é" * 20, "A-Z a-z"),
    ):  # fmt: skip
        with pytest.raises(SystemExit):
            main(["top", str(tmp_path), "--web", "8400", "--token", text])
        assert message in capsys.readouterr().err
    assert main(["top", str(tmp_path), "--token", TOKEN]) == FAILED
    assert "are for --web PORT" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["top", str(tmp_path), "--web", "0"])
    assert "'0' is not a port" in capsys.readouterr().err


@pytest.mark.parametrize("library", ["plotly", "jinja2"])
def test_without_a_library_of_pages(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training(tmp_path / "log")
    monkeypatch.setitem(sys.modules, library, None)
    assert main(["top", str(tmp_path / "log"), "--web", str(free_port())]) == FAILED
    assert capsys.readouterr().err == f"commtrace: --web: needs {library}; pip install 'commtrace[html]'\n"


def test_libraries_of_pages_are_imported_when_a_page_is_asked_for(tmp_path: Path) -> None:
    """They take memory that a view in a terminal, or a reader of the state, does not need."""
    training(tmp_path / "log")
    code = "import sys; from commtrace.cli import main; main(sys.argv[1:]); print('plotly' in sys.modules)"
    command = [sys.executable, "-c", code, "top", str(tmp_path / "log"), "--web", str(free_port())]
    assert processes.run(command, limit=LIMIT_SECONDS).out.splitlines()[-1] == "False"


def test_a_port_that_is_in_use(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(served.log), "--web", str(served.port)]) == FAILED
    assert f"127.0.0.1 port {served.port}: Address already in use" in capsys.readouterr().err


# ---- logs that fail ------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_log_that_breaks_leaves_the_last_page(tmp_path: Path) -> None:
    training(tmp_path / "log")
    page = ReportPage(lambda state: page_of_log(tmp_path / "log", state), 0.01)
    good = page.text()
    assert good is not None
    shutil.move(tmp_path / "log", tmp_path / "gone")
    wait_for(lambda: "There is no newer page" in (page.text() or ""))
    shown = page.text() or ""
    assert without_state(shown) == without_state(good)
    assert re.search(rf"As of .* UTC, \d+ s ago. There is no newer page: {tmp_path}/log: no such directory", shown)
    shutil.move(tmp_path / "gone", tmp_path / "log")
    wait_for(lambda: "There is no newer page" not in (page.text() or "There is no newer page"))


def test_a_log_that_cannot_be_read_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> str:
        raise ValueError("<script>")

    pages = live_pages.LivePages(Path("log"), 0.01, lambda: pytest.fail("not asked for"))
    monkeypatch.setattr(pages, "_report", ReportPage(fail, 0.01))
    port = free_port()
    with serve(pages, port, "127.0.0.1", None, requires_token=True):
        answer = ask(port)
        assert (answer.status, answer.headers["content-type"]) == (503, "text/plain; charset=utf-8")
        assert (answer.headers["retry-after"], answer.headers["refresh"]) == ("5", "5")
        assert ask(port, "/state.json").status == 500


def test_a_page_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last page is shown meanwhile, and only one page is made at a time."""
    goes_on, made = threading.Event(), list[str]()
    goes_on.set()

    def make(state: str) -> str:
        made.append(state)
        assert goes_on.wait(LIMIT_SECONDS)
        return f"<{state}>{len(made)}"

    monkeypatch.setattr(live_pages, "_NEXT_SECONDS", 0.1)
    page = ReportPage(make, 0.01)
    assert (page.text() or "").endswith("Reload for a later state of the run.>1")
    goes_on.clear()
    wait_for(lambda: (page.text() or "").endswith("A newer page is being made: reload in some seconds.>1"))
    askers = [threading.Thread(target=page.text) for _ in range(20)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(LIMIT_SECONDS)
    assert len(made) == 2
    goes_on.set()
    wait_for(lambda: not (page.text() or "").endswith(">1"))

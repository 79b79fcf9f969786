"""`commtrace top` in a terminal: keys, sizes, the end of the run, and the terminal that it leaves."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from factory import WORLD, LogFactory, ProcessFactory, record
from ports import free_port
from simulated_hangs import write_hang

pytest.importorskip("pyte", reason="pyte is not installed")

import pyte

from commtrace.analyses.volume_by_purpose import VOLUME_BY_PURPOSE
from commtrace.analyses.volume_tables import RANKS
from commtrace.commands.exit_status import AS_EXPECTED, INTERRUPTED, STUCK

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("setsid") is None, reason="setsid of util-linux is not installed"),
]
LIMIT_SECONDS = 120
LINES = 50
OTHER_SCREEN = 1049 << 5
"""pyte's number of the mode in which a program shows a screen of its own."""
KEYS = "Tab: purposes, ranks   r: read now   q: end"
OVER = "The run is over: commtrace report shows all of it."


class Terminal:
    """A terminal in which `commtrace top` runs."""

    def __init__(self, log: Path, columns: int, *arguments: str) -> None:
        self.program, self.own = os.openpty()
        self.screen = pyte.Screen(columns, LINES)
        self._stream = pyte.ByteStream(self.screen)
        self.resize(columns)
        self.attributes = termios.tcgetattr(self.own)
        # setsid --ctty: keys such as Ctrl-C signal the processes of the terminal that they control.
        top = [sys.executable, "-m", "commtrace.cli", "top", str(log), "--interval", "0.2", *arguments]
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *top], stdin=self.own, stdout=self.own, stderr=self.own,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "", "LINES": ""},
            # What runs the tests may ignore interrupts, which processes inherit: a shell does for what it has in the
            # background.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip

    def close(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_SECONDS)
        os.close(self.program)
        os.close(self.own)

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.program, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
        self.screen.resize(LINES, columns)

    def press(self, key: bytes) -> None:
        os.write(self.program, key)

    def wait(self, condition: Callable[[str], bool]) -> str:
        """Return the text on the screen when it fulfils a condition."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not condition(text := "\n".join(map(str.rstrip, self.screen.display))):
            assert time.monotonic() < deadline, text
            self._take(0.1)
        return text

    def _take(self, seconds: float) -> bool:
        """Show what the program writes within some seconds."""
        if not select.select([self.program], [], [], seconds)[0]:
            return False
        self._stream.feed(os.read(self.program, 1 << 16))
        return True

    def end(self) -> int:
        """Return the exit status, and check that the terminal is as it was."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while self.process.poll() is None:
            assert time.monotonic() < deadline
            self._take(0.1)  # it would wait for a full terminal
        while self._take(0.1):
            pass
        text = "\n".join(map(str.rstrip, self.screen.display))
        assert "Traceback" not in text, text
        assert OTHER_SCREEN not in self.screen.mode
        assert not self.screen.cursor.hidden
        assert termios.tcgetattr(self.own) == self.attributes
        assert termios.tcgetattr(self.own)[3] & (termios.ECHO | termios.ICANON) == termios.ECHO | termios.ICANON
        return int(self.process.returncode)


@contextlib.contextmanager
def terminal(log: Path, columns: int, *arguments: str) -> Iterator[Terminal]:
    """Show a log in a terminal."""
    opened = Terminal(log, columns, *arguments)
    try:
        yield opened
    finally:
        opened.close()


@pytest.fixture
def running(tmp_path: Path) -> ProcessFactory:
    """A process on another host, whose end is not known; its log is `tmp_path / "log"`."""
    process = LogFactory(tmp_path / "log").process(0, pid=100, world_size=1, boot_id="a").known({WORLD: [0]})
    process.write([record(seq=step, step=step) for step in range(3)])
    return process


def test_keys_and_the_end_of_the_run(running: ProcessFactory, tmp_path: Path) -> None:
    with terminal(tmp_path / "log", 80) as shown:
        narrow = shown.wait(lambda text: KEYS in text)
        assert OTHER_SCREEN in shown.screen.mode
        assert shown.screen.cursor.hidden
        assert not termios.tcgetattr(shown.own)[3] & termios.ECHO, "keys are not shown"
        assert VOLUME_BY_PURPOSE.title in narrow
        assert RANKS.title not in narrow
        shown.press(b"\t")
        shown.wait(lambda text: RANKS.title in text and VOLUME_BY_PURPOSE.title not in text)
        shown.press(b"x")
        shown.press(b"\t")
        shown.wait(lambda text: VOLUME_BY_PURPOSE.title in text)
        running.end()
        shown.wait(lambda text: OVER in text)
        assert shown.process.poll() is None, "it can still be read"
        shown.press(b"q")
        assert shown.end() == AS_EXPECTED


def test_the_size_changes(tmp_path: Path) -> None:
    """Sentences and tables take the width that there is, and nothing of another width is left."""
    write_hang(tmp_path / "log", "lock", 8, 3)
    with terminal(tmp_path / "log", 80) as shown:
        narrow = shown.wait(lambda text: KEYS in text)
        shown.resize(160)
        wide = shown.wait(lambda text: KEYS in text and max(map(len, text.splitlines())) > 80)
        assert " ".join(wide.split("!")[1].split()[:20]) == " ".join(narrow.split("!")[1].split()[:20])
        shown.resize(80)
        shown.wait(lambda text: text == narrow)
        shown.press(b"q")
        assert shown.end() == STUCK


@pytest.mark.long
@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM", "gone"])
def test_the_terminal_is_left_as_it_was(how: str, running: ProcessFactory, tmp_path: Path) -> None:
    """Also if the log is gone."""
    with terminal(tmp_path / "log", 160) as shown:
        shown.wait(lambda text: KEYS in text)
        match how:
            case "Ctrl-C":
                shown.press(b"\x03")
                assert shown.end() == INTERRUPTED
            case "SIGTERM":
                shown.process.terminate()
                assert shown.end() == 128 + signal.SIGTERM
            case _:
                (tmp_path / "log").rename(tmp_path / "elsewhere")
                shown.wait(lambda text: "Not read again:" in text)
                shown.press(b"q")
                assert shown.end() == AS_EXPECTED


def test_the_address_of_the_page_is_shown(running: ProcessFactory, tmp_path: Path) -> None:
    port = free_port()
    with terminal(tmp_path / "log", 100, "--web", str(port)) as shown:
        shown.wait(lambda text: f"page: http://127.0.0.1:{port}/" in text)
        shown.press(b"q")
        assert shown.end() == AS_EXPECTED


def test_an_error_leaves_no_screen(tmp_path: Path) -> None:
    with terminal(tmp_path / "none", 80) as shown:
        shown.wait(lambda text: "nosuchdirectory" in "".join(text.split()))  # the path is of any length
        assert shown.end() != AS_EXPECTED

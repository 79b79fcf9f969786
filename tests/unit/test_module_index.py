"""The page of all modules names each file and what its names mean, in Python and in C++."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from commtrace.recording import peer_watch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def page() -> str:
    """Return the page."""
    pytest.importorskip("mkdocs")
    text: str = runpy.run_path(str(ROOT / "docs" / "module_index.py"))["modules_page"]()
    return text


def test_each_file_has_a_part(page: str) -> None:
    headings = {line.removeprefix("### ").strip("`") for line in page.splitlines() if line.startswith("### ")}
    for folder in ("commtrace", "hooks", "analyses", "wheels", "examples", "benchmarks"):
        files = [path for ending in ("*.py", "*.h", "*.cpp") for path in (ROOT / folder).rglob(ending)]
        names = {path.relative_to(ROOT).as_posix() for path in files if path.read_text().startswith(('"""', "//"))}
        assert names
        assert names <= headings
    assert len(headings) == sum(line.startswith("### ") for line in page.splitlines())  # links are not followed


def test_names_have_the_first_sentence_of_their_description(page: str) -> None:
    lines = page.partition("### `commtrace/recording/peer_watch.py`\n")[2].partition("\n##")[0].splitlines()
    assert (peer_watch.__doc__ or "").splitlines()[0] in lines
    (constant,) = (line for line in lines if line.startswith("- `MAX_PEERS`: "))
    assert constant == "- `MAX_PEERS`: Processes that one process watches: those of the next higher ranks on its host."
    assert any(line.startswith("- `PeerWatch.check`: Add rows for peers that have ended by now") for line in lines)


@pytest.mark.parametrize(
    "line",
    [
        "- `_WRAPPERS`: Path prefixes of wrappers, relative to the packages' root.",  # a comment before it
        '- `_CONTRACTION`: "can\'t" is not a quotation mark',  # a comment beside it
        "- `ExpectedCall.calls`: Number of calls.",  # in the description of the class
    ],
)
def test_descriptions_in_other_places(line: str, page: str) -> None:
    assert any(found.startswith(line) for found in page.splitlines())


def test_the_list_of_a_folder_s_modules_is_shown(page: str) -> None:
    part = page.partition("### `hooks/megatron/__init__.py`\n")[2].partition("\n##")[0]
    assert "```text\ncore_groups, gpt_neox_groups        roles of their groups\n" in part


def test_names_in_cpp(page: str) -> None:
    lines = page.partition("### `hooks/native/recording_kernels.h`\n")[2].partition("\n##")[0].splitlines()
    expected = "- `future_of`: The future that shows the end of a call on the host; null if the backend has none."
    assert expected in lines
    variables = ("fetch_add", "in_stream")  # with a comment within a function
    assert not any(line.startswith(f"- `{name}`") for name in variables for line in lines)


def test_what_markdown_would_read_is_escaped() -> None:
    plain = runpy.run_path(str(ROOT / "docs" / "module_index.py"))["_plain"]
    assert plain("a <b> [c] `d_[e]` f_g") == r"a \<b\> \[c\] `d_[e]` f\_g"

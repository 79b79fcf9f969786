"""The page of all modules, their names, and what each is, which mkdocs makes from the code at each build.

An mkdocs hook (`hooks:` in mkdocs.yml). The search of the site finds in it where something is done.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).parents[1]
FOLDERS: Final = ("commtrace", "hooks", "analyses", "wheels", "examples", "benchmarks")
_INTRODUCTION: Final = """\
# Modules

All modules but the tests', and the names in them that have a description. First read the
[architecture](../explanation/architecture.md), which says what several files do together. The
search of this site finds all words of this page.
"""
_Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_DIRECTIVES: Final = ("fmt:", "type:", "noqa", "pragma")
_CPP_NAME: Final = re.compile(
    r" {0,2}(?! )(?:(?:class|struct|enum(?: class)?) (\w+)|[\w:<>,*& ]+ [*&]?(\w+)(?:\(| = |\{|;))"
)
"""What a line of C++ after a comment defines: a type, a function, or a variable."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page to the site."""
    files.append(File.generated(config, "reference/modules.md", content=modules_page()))
    return files


def modules_page() -> str:
    """Return the page as Markdown."""
    lines, folder = [_INTRODUCTION], ROOT
    paths = [path for name in FOLDERS for path in _sources(ROOT / name)]
    for path in sorted(paths, key=lambda path: (path.parent, path.name)):
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            tree = ast.parse(text)
            about, names = ast.get_docstring(tree) or "", [*_names(_comments(text), tree.body)]
        else:
            (about, _), *names = _described_in_cpp(text)
        if path.parent != folder:
            folder = path.parent
            lines += (f"## {folder.relative_to(ROOT).as_posix()}/", "")
        if about:
            shown = about if path.name == "__init__.py" else about.split("\n\n")[0]
            lines += (f"### `{name}`", "", *_paragraphs(shown))
            lines += (f"- `{name}`: {_plain(meaning)}" for name, meaning in names)
            lines.append("")
    return "\n".join(lines)


def _sources(folder: Path) -> Iterator[Path]:
    """Yield the files with code below a folder; links, which lead to other folders of the list, are not followed."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            yield from _sources(path)
        elif path.suffix in (".py", ".h", ".cpp"):
            yield path


def _names(comments: Mapping[int, str], body: Sequence[ast.stmt], owner: str = "") -> Iterator[tuple[str, str]]:
    """Yield the names that a module or class describes, each with the first sentence of its description.

    A constant is described by a string after it, or by a comment at the end of its line or before it.
    """
    following: list[ast.stmt | None] = [*body[1:], None]
    for node, after in zip(body, following, strict=True):
        if isinstance(node, _Documented):
            if node.name != "__init__" and (meaning := ast.get_docstring(node)):
                yield owner + node.name, _first_sentence(meaning)
            if isinstance(node, ast.ClassDef):
                attributes = _attributes(ast.get_docstring(node) or "")
                yield from ((f"{owner}{node.name}.{name}", meaning) for name, meaning in attributes)
                yield from _names(comments, node.body, f"{owner}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            meaning = _string(after) or comments.get(node.end_lineno or 0) or comments.get(-node.lineno, "")
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = (part for target in targets for part in ast.walk(target))
            names = (part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store))
            yield from ((owner + name, _first_sentence(meaning)) for name in names if meaning)


def _comments(text: str) -> dict[int, str]:
    """Return the comments of a module by the line that they end, or -line of the statement that they precede."""
    found: dict[int, str] = {}
    above: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            words = token.string.lstrip("# ")
            if token.line[: token.start[1]].strip():
                found[token.start[0]] = words
            else:
                above.append(words)
        elif token.type not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            if above:
                found[-token.start[0]] = " ".join(above)
            above = []
    return {line: words for line, words in found.items() if not words.startswith(_DIRECTIVES)}


def _attributes(docstring: str) -> Iterator[tuple[str, str]]:
    """Yield the attributes that a class describes in its docstring."""
    section = re.search(r"^Attributes:\n((?:[ ]{4}.*\n?|\n)+)", docstring, re.MULTILINE)
    entries = re.findall(r"^[ ]{4}(\w+): ((?:.*\n?(?=[ ]{8}))*.*)", section[1] if section else "", re.MULTILINE)
    yield from ((name, _first_sentence(meaning)) for name, meaning in entries)


def _string(node: ast.stmt | None) -> str:
    """Return the text of a statement that is only a string, such as the description of a constant; "" if it is not."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value
    return ""


def _described_in_cpp(text: str) -> Iterator[tuple[str, str]]:
    """Yield the comment that begins a file of C++, and each name after a comment, with the first sentence of that."""
    comment: list[str] = []
    for number, line in enumerate((*text.splitlines(), "")):
        if line.lstrip().startswith("// "):
            comment.append(line.lstrip().removeprefix("// "))
            continue
        if number == len(comment):
            yield " ".join(comment), ""
        elif comment and (defined := _CPP_NAME.match(line)):
            yield defined[1] or defined[2], _first_sentence(" ".join(comment))
        comment = []


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the lines of a description: its paragraphs, and lists of modules as they are."""
    for paragraph in text.split("\n\n"):
        if re.search(r" {3}", paragraph):
            yield from ("```text", paragraph, "```", "")
        else:
            yield from (_plain(paragraph), "")


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s", " ".join(text.split("\n\n")[0].split()), maxsplit=1)[0]


def _plain(text: str) -> str:
    """Return text in which Markdown finds no links and no HTML."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(part if part.startswith("`") else re.sub(r"([\[\]<>*_])", r"\\\1", part) for part in parts)

"""The rules of docs/explanation/architecture.md: which part may import which, and unique class names."""

from __future__ import annotations

import ast
import configparser
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest
from processes import ROOT

from commtrace.cli import COMMANDS

FOLDERS: Final = ("commtrace", "commtrace/hooks", "commtrace/analyses")
"""The folders of the package; the last two are links, which `rglob` does not follow."""
MAY_IMPORT_ANYTHING: Final = ("commtrace.run", "commtrace.commands")
"""The public interface and the commands, which may import all parts, as `commtrace` itself may."""


@cache
def modules() -> dict[str, Path]:
    """Return the file of every installed module by dotted name; that of a package is its `__init__.py`."""
    files = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if "bootstrap" not in parts:  # scripts outside the package
                files[".".join(part for part in parts if part != "__init__")] = path
    return files


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text(encoding="utf-8"))


def statements(node: ast.AST, *, lazy: bool) -> Iterator[ast.AST]:
    """Yield the nodes below `node`; without `lazy`, not those within functions or only for type checkers."""
    for child in ast.iter_child_nodes(node):
        if not lazy and isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        if lazy or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from statements(child, lazy=lazy)


def imported(name: str, *, lazy: bool) -> set[str]:
    """Return the modules that a module imports; for other names, the modules that they are imported from."""
    package = name.split(".")
    if modules()[name].name != "__init__.py":
        package.pop()
    imports = set()
    for node in statements(tree(name), lazy=lazy):
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                imports.add(full if (full := f"{source}.{alias.name}") in modules() else source)
    return imports


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def part_of(name: str) -> str:
    """Return the part of the package that a module belongs to, "" for the modules that all parts share."""
    part = name.split(".")[1] if "." in name else ""
    return part if f"commtrace.{part}" in modules() and modules()[f"commtrace.{part}"].name == "__init__.py" else ""


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other in a cycle."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [*graph[start]]
        while todo:
            if (name := todo.pop()) not in seen:
                seen.add(name)
                todo += graph[name]
        return seen

    reach = {name: reached(name) for name in graph}
    groups = {tuple(sorted(other for other in reach[name] if name in reach[other])) for name in graph}
    return [list(group) for group in sorted(groups) if group]


def test_cycles_are_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == [["b", "c"]]


@pytest.mark.long
def test_no_module_imports_itself_in_a_circle() -> None:
    """Imports within functions or only for type checkers do not count: they do not run when a module is loaded."""
    graph = {name: imported(name, lazy=False) & set(modules()) - {name} for name in modules()}
    assert cycles(graph) == []


def test_no_two_modules_import_each_other() -> None:
    """Imports within functions and for type checkers count. `commtrace` itself imports its interface on first use."""
    graph = {name: (imported(name, lazy=True) & set(modules())) - {name, "commtrace"} for name in modules()}
    assert [(a, b) for a in graph for b in graph[a] if a < b and a in graph[b]] == []


@pytest.mark.parametrize("part", ["", "recording", "reading", "theory", "network", "dryrun", "hooks", "analyses"])
def test_imports_point_one_way(part: str) -> None:
    """hooks -> commtrace <- analyses; imports within functions and module names in strings count."""
    forbidden = {f"commtrace.{other}" for other in ("hooks", "analyses") if other != part}
    tables = {"commtrace.hook_table": "HOOKS"}  # names hooks, and imports one when its library is imported
    wrong = []
    for name in modules():
        if part_of(name) != part or name == "commtrace" or any(is_within(name, free) for free in MAY_IMPORT_ANYTHING):
            continue
        names = imported(name, lazy=True)
        if name not in tables:
            names |= {
                node.value
                for node in ast.walk(tree(name))
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isascii()
                if all(word.isidentifier() for word in node.value.split("."))
            }
        wrong += [(name, other) for other in sorted(names) if any(is_within(other, package) for package in forbidden)]
    assert wrong == []


def test_nothing_that_ships_imports_an_example() -> None:
    assert [
        name for name in modules() if any(is_within(other, "examples") for other in imported(name, lazy=True))
    ] == []


def test_setup_lists_every_package() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    packages = {name for name, path in modules().items() if path.name == "__init__.py"}
    assert set(config["options"]["packages"].split()) == packages


def test_a_command_is_a_module_with_two_functions() -> None:
    for name in COMMANDS:
        functions = {node.name for node in tree(f"commtrace.commands.{name}").body if isinstance(node, ast.FunctionDef)}
        assert functions >= {"prepare", "run"}, name


def test_a_class_name_is_used_once() -> None:
    classes = defaultdict(list)
    for name in modules():
        for node in tree(name).body:
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(name)
    assert {name: where for name, where in classes.items() if len(where) > 1} == {}


COMMAND_FOLDER: Final = "commtrace.commands"
"""Its modules have the names of the commands, whatever other modules are called."""
ROLES: Final = frozenset(("hook", "tracer"))
"""Names of one part of the hooks of each library."""


def test_a_module_name_is_used_once() -> None:
    names = defaultdict(list)
    for name, path in modules().items():
        if path.name != "__init__.py" and not is_within(name, COMMAND_FOLDER):
            names[name.rpartition(".")[2]].append(name)
    twice = {name for name, where in names.items() if len(where) > 1}
    assert twice == ROLES


FOLDERS_WITHOUT_LIST: Final = ("commtrace.commands",)
"""Folders whose modules need no list: a command is a module of its name."""


@pytest.mark.parametrize(
    "package",
    sorted(name for name, path in modules().items() if path.name == "__init__.py" and name not in FOLDERS_WITHOUT_LIST),
)
def test_a_folder_lists_its_modules(package: str) -> None:
    """The docstring of a folder names every module in it, so that a reader finds them there first."""
    docstring = ast.get_docstring(tree(package)) or ""
    names = {path.stem for path in modules()[package].parent.glob("*.py")} - {"__init__"}
    assert {name for name in names if not re.search(rf"\b{name}\b", docstring)} == set()


def test_files_that_the_architecture_names_exist() -> None:
    text = (ROOT / "docs/explanation/architecture.md").read_text(encoding="utf-8")
    named = {name for quoted in re.findall(r"`([^`]+)`", text) for name in re.findall(r"[\w/]+\.(?:py|h)\b", quoted)}
    files = [
        f"/{path.relative_to(ROOT)}"
        for folder in ("commtrace", "hooks", "analyses", "wheels", "docs", "tests")
        for suffix in ("py", "h")
        for path in (ROOT / folder).rglob(f"*.{suffix}")
    ]
    assert len(named) > 50
    assert [name for name in sorted(named) if not any(file.endswith(f"/{name}") for file in files)] == []

"""Reference pages that mkdocs makes from the code at each build: commands, settings, tables, rules.

An mkdocs hook (`hooks:` in mkdocs.yml). The pages are not in the repository, so that they always match the code.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import textwrap
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from commtrace import settings
from commtrace.analyses.analysis_catalog import SECTIONS, TABLE_GROUPS
from commtrace.cli import COMMANDS
from commtrace.commands import exit_status
from commtrace.job_facts import MISSING, Facts, fields_of
from commtrace.job_row import JobRow
from commtrace.theory import predict  # imports every rule, and so fills RULES
from commtrace.theory.rules.registry import DEEPSPEED, GPT_NEOX, RULES


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the site."""
    pages = {
        "reference/commands.md": commands_page(),
        "reference/settings.md": settings_page(),
        "reference/tables.md": tables_page(),
        "reference/job.md": job_page(),
        "reference/rules.md": rules_page(),
        "reference/real-programs.md": real_programs_page(),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def real_programs_page() -> str:
    """Return the comparison of theory with recorded runs of GPT-NeoX's own program, computed at each build."""
    recorded = _recorded("gpt_neox")
    lines = [
        "# Real programs\n\n`train.py` of [GPT-NeoX](https://github.com/EleutherAI/gpt-neox) at "
        f"{GPT_NEOX[1]}, unedited, on CPU ranks with gloo and DeepSpeed {DEEPSPEED[1]}: calls of a rank in all steps; "
        "unexpected and missing ones, by the rules; whether the calls of all ranks equal those of its dry run "
        "(`commtrace check --against`; -: not recorded). `tests/external` runs it again, where each call has a purpose "
        "and the typical step equals its closed forms, purpose by purpose.\n",
        "| configuration | ranks | scheme | calls | not as expected | matches dry run |\n"
        "| --- | ---: | --- | ---: | ---: | --- |",
    ]
    for name, run in recorded.items():
        first = run["ranks"][0]
        prediction = predict(first["job"])
        steps = {step: first["steps"].get(str(calls), calls) for step, calls in first["steps"].items()}
        expected, measured = Counter[Any](), Counter[Any]()
        for step, calls in steps.items():
            for call in prediction.step(int(step)):
                expected[step, call.role, call.op, call.payload] += call.calls
            for role, op, payload, _, count in calls:
                measured[step, role, op, payload] += count
        differing = (measured - expected).total() + (expected - measured).total()
        equal = {0: "yes", 1: "no"}.get(run.get("against_dry_run"), "-")
        cells = (name, first["job"]["world_size"], prediction.scheme, measured.total(), differing, equal)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join((*lines, "", *_configuration_files(), *_frameworks())) + "\n"


def _recorded(name: str) -> dict[str, Any]:
    path = Path(__file__).parents[1] / "tests" / "support" / "recorded" / f"{name}.json"
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def _configuration_files() -> Iterator[str]:
    """Yield the table of GPT-NeoX's own configuration files, as `tests/external/gpt_neox_files.py` recorded it."""
    document = _recorded("gpt_neox_files")
    files = document["files"].values()
    equal = sum("parameters" in file and file["parameters"] == file.get("real") for file in files)
    refused = sum("refused" in file for file in files)
    yield (
        f"## Configuration files\n\nAll files of GPT-NeoX {document['commit'][:8]} on {document['world_size']} ranks, "
        f"recorded on {document['date']}: for {equal} of {len(files)}, the predicted parameter count equals that of "
        "GPT-NeoX's model on the meta device (of a tensor-parallel rank, all stages together); "
        f"{refused} are refused with a reason. Files that lack model or training settings were combined with "
        "another file.\n"
    )
    yield from (
        "| files | theory | parameters | GPT-NeoX's model, or why it cannot be built |",
        "| --- | --- | ---: | ---: |",
    )
    for name, file in document["files"].items():
        outcome = file.get("scheme") or f"refused: {file['refused']}"
        counts = [f"{file[key]:,}" if key in file else "-" for key in ("parameters", "real")]
        yield f"| {name} | {outcome} | {counts[0]} | {file['fails'] if 'fails' in file else counts[1]} |"


def _frameworks() -> Iterator[str]:
    """Yield the table of trainings with frameworks, as `tests/external` recorded them."""
    yield (
        "\n## Frameworks\n\nSmall models on CPU ranks with gloo ([how to](../how-to/frameworks.md)); `check`: status "
        "with rules, and against a dry run of the same program (-: not recorded).\n\n"
        "| training | version | date | ranks | calls | steps | dimensions | phases | check | dry run |\n"
        "| --- | --- | --- | ---: | ---: | --- | --- | --- | ---: | ---: |"
    )
    for name, run in _recorded("frameworks").items():
        steps = f"{run['steps'][0]} to {run['steps'][-1]}"
        names = (", ".join(run[key]) for key in ("dimensions", "phases"))
        ran = (f"{run['package']} {run['version']}", run["date"], run["ranks"], run["calls"])
        cells = (name, *ran, steps, *names, run["rules"], run.get("dry_run", "-"))
        yield "| " + " | ".join(map(str, cells)) + " |"


def commands_page() -> str:
    """Return the exit statuses, and the help text of every command, as Markdown."""
    statuses = _documented_values(Path(inspect.getfile(exit_status)))
    rows = "\n".join(f"| {getattr(exit_status, name)} | {meaning} |" for name, meaning in statuses)
    parts = [f"# Commands\n\n| exit status | meaning |\n| ---: | --- |\n{rows}"]
    for name in COMMANDS:
        command = import_module(f"commtrace.commands.{name}")
        parser = argparse.ArgumentParser(
            prog=f"commtrace {name}",
            description=inspect.getdoc(command),
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=100),
        )
        command.prepare(parser)
        parts.append(f"## commtrace {name}\n\n```text\n{parser.format_help().rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def settings_page() -> str:
    """Return the table of environment variables, from the fields of `Settings` and their docstrings."""
    lines = [
        "# Settings",
        "",
        "Settings are environment variables, because every launcher can forward them. A value that is not valid is "
        "reported in one line on stderr, and the program runs untraced. Sizes take `k`, `m`, `g`, `t` (powers of "
        "1024).",
        "",
        "| variable | default | meaning |",
        "| --- | --- | --- |",
    ]
    for name, meaning in _documented_values(Path(inspect.getfile(settings)), "Settings"):
        variable = "COMMTRACE" if name == "directory" else f"COMMTRACE_{name.upper()}"
        default = getattr(settings.Settings, name, "unset")
        shown = int(default) if isinstance(default, bool) else default
        lines.append(f"| `{variable}` | `{shown}` | {meaning} |")
    return "\n".join(lines) + "\n"


_TABLE_SECTIONS: Final = (
    (
        "Tables of a report",
        "`commtrace report DIR --json`, and `commtrace.open(DIR).table(NAME)`. All of them are in every document; one "
        "that does not apply to a run has no rows.",
        TABLE_GROUPS["report"],
    ),
    (
        "Tables used only by figures",
        "`commtrace.open(DIR).table(NAME)`; not in the JSON document.",
        TABLE_GROUPS["figures"],
    ),
    ("Tables of a report with a network", "`commtrace report DIR --network NET --json`.", TABLE_GROUPS["network"]),
    (
        "Tables of runs side by side",
        "`commtrace report DIR DIR ... --json`, and `commtrace.compare`.",
        TABLE_GROUPS["comparison"],
    ),
    (
        "Tables of the differences of two runs",
        "`commtrace diff A B --json`; `commtrace.open(A).diff(commtrace.open(B))` returns the first.",
        TABLE_GROUPS["differences"],
    ),
    (
        "Tables of a scaling comparison",
        "`commtrace scaling DIR DIR ... --json`, and `commtrace.scaling`.",
        TABLE_GROUPS["scaling"],
    ),
    (
        "Tables of predicted changes",
        "`commtrace whatif DIR ... --json`; methods of `commtrace.open(DIR)` return those of changes, "
        "`commtrace.compare_layouts` those of layouts. `step_timelines`, `exposed_by_speed` and `exposed_by_bandwidth` "
        "are only in pages and Python.",
        TABLE_GROUPS["what_if"],
    ),
)

_WIDTH: Final = 100

_TABLES_INTRODUCTION: Final = """\
Every table with its rows and columns. `run.describe_table(NAME)` shows the same in Python; the JSON
documents have it as "columns".

- Counts and bytes are sums over the ranks that left a log, unless a column says "per rank".
- Every recorded call counts, including calls that failed or did not end; the table `states` counts them.
- A missing value means "not known", never zero: `null` in JSON, "-" in text.
- Text and HTML reports use short column heads and suitable units; JSON and pandas hold exact
  numbers.

Tables marked "Merged by rank" (or host) have, in reports and JSON of more than 32 ranks, a
row per class of equivalent ranks and per outlier; pandas, and reports with `--per-rank`, have all
rows. Such a row lists its ranks as text ("0-31,64-1016:8"; of many ranges the first and the last), and the
column `alike` counts them. A cell whose values differ is an object in JSON:

- `{"known", "lowest", "lowest_at", "median", "highest", "highest_at"}` of numbers: how many are
  known, the extremes with the ranks that have them, and the (lower) median;
- `{"different"}` of strings and identifiers: how many there are.

`stuck_call` always refers to a row of the complete `stuck_calls`.
"""


def tables_page() -> str:
    """Return the descriptions of all tables."""
    return "\n".join(("# Tables", "", *_describe_tables()))


def _describe_tables() -> Iterator[str]:
    yield _TABLES_INTRODUCTION
    yield from ("## Sections of a report", "", "| section | heading | tables |", "| --- | --- | --- |")
    for section in SECTIONS:
        names = ", ".join(f"[`{spec.name}`](#{spec.name})" for spec in section.tables)
        yield f"| `{section.name}` | {section.title} | {names} |"
    yield ""
    for title, about, specs in _TABLE_SECTIONS:
        yield from (f"## {title}", "", textwrap.fill(about, _WIDTH, break_on_hyphens=False), "")
        for spec in specs:
            merged = f" Merged by {spec.column(spec.merge_by).head.rstrip('s')}." if spec.merge_by else ""
            text = textwrap.fill(f"{spec.title}. {spec.rows}{merged}", _WIDTH, break_on_hyphens=False)
            yield from (f"### `{spec.name}`", "", text, "")
            yield from ("| column | unit | meaning |", "| --- | --- | --- |")
            yield from (f"| `{column.name}` | {column.unit} | {column.meaning} |" for column in spec.columns)
            yield ""


def job_page() -> str:
    """Return the fields of a row of the log's table `job`, from their definition."""
    return "\n".join(("# The job row", "", *_describe_job()))


def _describe_job() -> Iterator[str]:
    yield from (
        "What determines the communication of a model's training, as the hooks capture it and "
        "`commtrace.theory.predict` reads it: a line of the table `job` of the [log](log-format.md#tables). A row has "
        "the fields that its source provides. One without a field, or with a value of another type, is not predicted "
        "if a rule needs the field, unless the column `missing` has a value. Parameters, modules and layers are "
        "referred to by their index in the list that the row has of them.",
        "",
    )
    classes: list[type[Facts]] = [JobRow, *(rows for rows in Facts.__subclasses__() if rows is not JobRow)]
    for rows in classes:
        kinds = inspect.get_annotations(rows)
        yield from (f"## {rows.__name__}", "", str(inspect.getdoc(rows)), "")
        yield from ("| field | type | missing | meaning |", "| --- | --- | --- | --- |")
        for name, field in fields_of(rows).items():
            kind = str(kinds[name]).replace("|", "or")
            missing = "" if field.absent is MISSING else f"`{json.dumps(field.absent)}`"
            yield f"| `{name}` | {kind} | {missing} | {field.meaning} |"
        yield ""


def rules_page() -> str:
    """Return the table of prediction rules: what each reproduces, in which library version."""
    lines = [
        "# Prediction rules",
        "",
        "A rule is a function that predicts calls of a job. Each reproduces one place in a library, in the version "
        "that it was written against. Libraries of other versions may communicate differently; a dry run executes the "
        "installed ones.",
        "",
        "| rule | reproduces | library |",
        "| --- | --- | --- |",
    ]
    for rule in sorted(RULES, key=lambda rule: (rule.library, rule.module, rule.name)):
        module = rule.module.removeprefix("commtrace.theory.")
        mirrors = rule.mirrors.replace("|", "\\|")
        lines.append(f"| `{module}.{rule.name}` | {mirrors} | {rule.library} {rule.version} |")
    return "\n".join(lines) + "\n"


def _documented_values(path: Path, class_name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the annotated names of a class, or of the module, with the string literal that follows each."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    if class_name:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == class_name)
    for field, documentation in pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(documentation, ast.Expr)
            and isinstance(documentation.value, ast.Constant)
        ):
            yield field.target.id, " ".join(str(documentation.value.value).split())

"""Execution traces parse by Chakra's own schema, and every field has the meaning that it has there.

    CHAKRA=checkout LOGS=logs/ddp:logs/zero1 pytest -m external tests/external/test_chakra_schema.py

CHAKRA is a checkout of github.com/mlcommons/chakra, whose schema is not part of this project. LOGS are recorded runs;
without it, a small made one is used.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final

import pytest
from chakra_traces import Node, messages, play, read
from simulated_steps import PROGRAMS, Simulation

from commtrace.analyses.chakra_export import COLLECTIVES, NodeType, export_chakra
from commtrace.run import Run, open_run

descriptor_pb2, descriptor_pool, message_factory, unknown_fields = (
    pytest.importorskip(f"google.protobuf.{module}")
    for module in ("descriptor_pb2", "descriptor_pool", "message_factory", "unknown_fields")
)
SCHEMA: Final = Path(os.environ.get("CHAKRA", "")) / "schema" / "protobuf" / "et_def.proto"
LOGS: Final[list[Path | None]] = [Path(path) for path in os.environ.get("LOGS", "").split(":") if path]
pytestmark = [pytest.mark.external, pytest.mark.skipif(not SCHEMA.is_file(), reason="CHAKRA names no checkout")]

_BLOCK: Final = re.compile(r"^(message|enum) (\w+) \{(.*?)^\}", re.DOTALL | re.MULTILINE)
_FIELD: Final = re.compile(r"(repeated )?(\w+) (\w+) = (\d+);")
_ONE_OF: Final = re.compile(r"oneof (\w+) \{(.*?)\}", re.DOTALL)
_NUMBER: Final = re.compile(r"(\w+) = (\d+);")


def schema() -> tuple[dict[str, Any], dict[str, dict[str, int]]]:
    """Return the classes of the messages, and the numbers of the enumerations, by name."""
    file, enums = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package="chakra", syntax="proto3"), {}
    blocks = _BLOCK.findall(SCHEMA.read_text())
    for kind, name, body in blocks:
        if kind == "enum":
            enums[name] = {label: int(number) for label, number in _NUMBER.findall(body)}
            enum = file.enum_type.add(name=name)
            for label, number in enums[name].items():
                enum.value.add(name=label, number=number)
    types = descriptor_pb2.FieldDescriptorProto
    for kind, name, body in blocks:
        if kind != "message":
            continue
        message = file.message_type.add(name=name)
        one_of = _ONE_OF.search(body)
        if one_of is not None:
            message.oneof_decl.add(name=one_of[1])
        for repeated, of, label, number in _FIELD.findall(body):
            field = message.field.add(name=label, number=int(number), label=3 if repeated else 1)
            if one_of is not None and f" {label} = " in one_of[2]:
                field.oneof_index = 0
            if hasattr(types, f"TYPE_{of.upper()}"):
                field.type = getattr(types, f"TYPE_{of.upper()}")
            else:
                field.type, field.type_name = types.TYPE_ENUM if of in enums else types.TYPE_MESSAGE, f".chakra.{of}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = [name for kind, name, _ in blocks if kind == "message"]
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"chakra.{name}")) for name in names
    }, enums


@pytest.fixture(params=LOGS or [None], ids=str)
def recorded(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    if request.param is None:
        PROGRAMS["pipeline"](Simulation(3), 6).write(tmp_path / "log")
    return open_run(request.param or tmp_path / "log")


def test_files_parse_by_the_schema(recorded: Run, tmp_path: Path) -> None:
    classes, _ = schema()
    export_chakra(recorded, tmp_path / "traces")
    for rank, nodes in read(tmp_path / "traces").items():
        metadata, *rest = messages(tmp_path / "traces" / f"trace.{rank}.et")
        assert classes["GlobalMetadata"].FromString(metadata).version == "1.0.0"
        for message, node in zip(rest, nodes, strict=True):
            parsed = classes["Node"].FromString(message)
            assert not len(unknown_fields.UnknownFieldSet(parsed))
            attributes = {of.name: [(field.name, value) for field, value in of.ListFields()][1] for of in parsed.attr}
            assert node == Node(
                rank, parsed.id, parsed.name, parsed.type, [*parsed.data_deps], parsed.start_time_micros,
                parsed.duration_micros, attributes,
            )  # fmt: skip


def test_the_longest_path_is_the_recorded_step(recorded: Run, tmp_path: Path) -> None:
    export_chakra(recorded, tmp_path / "traces")
    paths = recorded.step_paths
    assert paths is not None
    ends = (paths.ends.max(axis=0)[1:] - paths.ends[:, 0].min()) / 1000
    played = play(tmp_path / "traces")
    for step, end in zip(paths.steps.tolist(), ends.tolist(), strict=True):
        assert played[step] == pytest.approx(end, rel=0.03)


def test_types_have_the_numbers_of_the_schema() -> None:
    _, enums = schema()
    assert {f"{kind.name}_NODE": kind.value for kind in NodeType}.items() <= enums["NodeType"].items()
    assert {op.upper(): number for op, number in COLLECTIVES.items()}.items() <= enums["CollectiveCommType"].items()

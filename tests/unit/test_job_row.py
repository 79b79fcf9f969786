"""The row of a job: what is read from a log that lacks fields or is damaged, and what is written."""

from __future__ import annotations

import json
import runpy
from typing import Any

import pytest
from processes import ROOT

from commtrace.job_facts import MISSING, Facts, UnknownFactError, fields_of, known
from commtrace.job_row import JobRow, ModelSettings, TensorRow, UnitRow, ZeroSettings

RECORDED = json.loads((ROOT / "tests" / "support" / "recorded" / "gpt_neox.json").read_text())


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "the job in the log has no zero$"),
        ({"zero": {}}, "the job in the log has no zero.overlap_comm$"),
        ({"zero": {"overlap_comm": 1}}, r"the job in the log cannot be read \(zero.overlap_comm: 1\)$"),
        ({"zero": {"overlap_comm": None}}, r"cannot be read \(zero.overlap_comm: None\)$"),
        ({"zero": [1]}, r"cannot be read \(zero: \[1\]\)$"),
        ({"zero": "x" * 100}, rf"cannot be read \(zero: {'x' * 60}\)$"),
    ],
)
def test_what_is_not_known_is_an_error(row: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownFactError, match=message):
        _ = JobRow.read(row).zero.overlap_comm
    assert known(lambda: JobRow.read(row).zero.overlap_comm) is None


def test_a_damaged_element_is_named() -> None:
    row = JobRow.read({"parameters": [{"name": "a", "shape": [2, 3]}, {"name": "b", "shape": [2, "x"]}]})
    assert row.parameters[0].elements == 6
    with pytest.raises(UnknownFactError, match=r"cannot be read \(parameters.1.shape: \[2, 'x'\]\)"):
        _ = row.parameters[1].shape
    with pytest.raises(UnknownFactError, match=r"has no parameters\.1\.dtype$"):
        _ = row.parameters[1].dtype


@pytest.mark.parametrize(
    ("value", "read"),
    [(True, True), (False, False), (4, 4), (4.0, 4), (4.5, None), ("4", None), (None, None), (10**400, 10**400)],
)
def test_a_number_of_ranks_or_a_flag(value: object, read: object) -> None:
    unit = UnitRow.read({"reshard_after_forward": value})
    result = known(lambda: unit.reshard_after_forward)
    assert result == read
    assert type(result) is type(read)


def test_a_whole_number_is_a_float_but_a_flag_is_no_number() -> None:
    assert type(JobRow.read({"gradient_clipping": 1}).gradient_clipping) is float
    rows = [JobRow.read({"gradient_clipping": value}) for value in (True, 10**400, "1")]
    assert [known(lambda row=row: row.gradient_clipping) for row in rows] == [None] * 3  # type: ignore[misc]


def test_fields_with_a_meaning_if_they_are_missing() -> None:
    row = JobRow.read({"mixed_precision": None})
    assert row.has(JobRow.mixed_precision)
    assert row.mixed_precision is None
    assert not row.has(JobRow.expert_parallel_sizes)
    assert row.expert_parallel_sizes == []
    assert row.get(JobRow.zero_stage, 7) == 7
    assert JobRow.read({"zero_stage": 2}).get(JobRow.zero_stage, 7) == 2
    with pytest.raises(UnknownFactError, match="zero_stage"):
        JobRow.read({"zero_stage": "x"}).get(JobRow.zero_stage, 7)


def test_a_row_is_written_as_it_was_built() -> None:
    row = JobRow(source="ddp", world_size=2, parameters=[TensorRow(name="a", shape=[2], dtype="int8")], moe=MISSING)
    assert row.to_json() == {
        "source": "ddp", "world_size": 2, "parameters": [{"name": "a", "shape": [2], "dtype": "int8"}],
    }  # fmt: skip
    row.zero = ZeroSettings.read({"stage": 1, "overlap_comm": True})
    row.zero.overlap_comm = False
    del row.world_size
    assert row.to_json()["zero"] == {"stage": 1, "overlap_comm": False}
    assert not row.has(JobRow.world_size)


def all_values(facts: Facts) -> int:
    """Read every field that a row has, and those of the rows within it; return their number."""
    count = 0
    for name, field in fields_of(type(facts)).items():
        if facts.has(field):
            value = getattr(facts, name)
            items = value if isinstance(value, list) else [value]
            count += 1 + sum(all_values(item) for item in items if isinstance(item, Facts))
    return count


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_rows_are_read_without_loss(name: str) -> None:
    row = RECORDED[name]["ranks"][0]["job"]
    job = JobRow.read(row)
    assert set(row) <= set(fields_of(JobRow))
    assert set(row["model"]) <= set(fields_of(ModelSettings))
    assert all_values(job) > len(row) + len(row["model"])
    assert job.to_json() == row


def test_rows_from_configurations_have_only_defined_fields() -> None:
    pytest.importorskip("yaml")
    from commtrace.theory.configs.job_plan import plan_job
    from commtrace.theory.configs.plan_options import PlanOptions

    for options in (PlanOptions(), PlanOptions(engine="ddp"), PlanOptions(engine="fsdp", precision="fp32")):
        for row in plan_job(["tiny"], 4, options).rows:
            written = row.to_json()
            assert set(written) <= set(fields_of(JobRow))
            assert set(written["model"]) <= set(fields_of(ModelSettings))
            assert set(written.get("zero", {})) - set(fields_of(ZeroSettings)) <= {
                "stage", "sub_group_size", "module_granularity_threshold",
            }  # fmt: skip
            assert JobRow.read(json.loads(json.dumps(written))).to_json() == written


def test_the_reference_page_has_all_fields() -> None:
    pytest.importorskip("mkdocs")
    page = runpy.run_path(str(ROOT / "docs" / "generated_pages.py"))["job_page"]()
    for rows in Facts.__subclasses__():
        assert f"## {rows.__name__}" in page
        for name, field in fields_of(rows).items():
            assert f"| `{name}` |" in page
            assert field.meaning.endswith(".")
    for line in page.splitlines():
        assert not line.startswith("|") or line.count("|") == 5


def test_a_row_has_only_defined_fields() -> None:
    names: dict[str, Any] = {"zero_stge": 1}
    with pytest.raises(TypeError, match="JobRow has no zero_stge"):
        JobRow(**names)

"""`commtrace diff`, `check --against` and `check --baseline`: what differs between two runs, and what does not."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from factory import (
    ALL_GATHER,
    ALL_REDUCE,
    ALONE,
    PAIR,
    SEND,
    WORLD,
    LogFactory,
    Records,
    record,
    records,
    training,
)

from commtrace.analyses.compare.call_keys import group_shape, site_name
from commtrace.analyses.compare.recorded_calls import read_calls
from commtrace.analyses.compare.two_runs import compare_calls
from commtrace.analyses.compare.verdict import Verdict
from commtrace.cli import main
from commtrace.reading.table_reader import Site
from commtrace.run import Run, open_run
from commtrace.schema import Flag, Phase, Purpose

Captured = pytest.CaptureFixture[str]
Rows = list[Records]


def steps(number: int = 4, ranks: int = 4, *, first: int = 3, last: bool = False) -> Rows:
    """Return start-up, then `first` reductions and a gather per step, and a final barrier if `last` is set."""
    rows = [record(payload=8, step=-1, phase=Phase.INIT, site=3)]
    for step in range(number):
        rows += [record(payload=1000 + index, step=step) for index in range(first)]
        rows.append(record(kind=ALL_GATHER, payload=64, local=64 // ranks, step=step, phase=Phase.OPTIMIZER, site=3))
    rows += [record(kind=5, payload=0, step=number - 1, phase=Phase.OTHER, site=2)] * last
    return numbered(rows)


def numbered(rows: Sequence[Records]) -> Rows:
    """Return copies whose begin times have the order of the rows."""
    copies = [row.copy() for row in rows]
    for index, row in enumerate(copies):
        row["t_begin"] = index + 1
    return copies


def inserted(rows: Rows, step: int = 2, **fields: int) -> Rows:
    """Return the rows with one more call at the beginning of a step."""
    index = next(index for index, row in enumerate(rows) if row["step"][0] == step)
    extra = record(**{"payload": 4, "step": step, "site": 2, "phase": Phase.OTHER, **fields})
    return numbered([*rows[:index], extra, *rows[index:]])


def swapped(rows: Rows) -> Rows:
    """Return the rows with the first two reductions of step 1 swapped."""
    index = next(index for index, row in enumerate(rows) if row["step"][0] == 1)
    return numbered([*rows[:index], rows[index + 1], rows[index], *rows[index + 2 :]])


def resized(rows: Rows) -> Rows:
    """Return the rows with a larger first reduction in step 1."""
    copies = numbered(rows)
    next(row for row in copies if row["step"][0] == 1)["payload"] += 24
    return copies


def run_of(
    path: Path, rows: Rows, *, ranks: int = 4, others: dict[int, Rows] | None = None, size: int = 4, **process: Any
) -> Run:
    """Return a data-parallel run; PAIR is a second group of all ranks, for example for another thread."""
    log = LogFactory(path)
    for rank in range(ranks):
        rank_process = log.process(rank, pid=4711 + rank, world_size=size, **process)
        rank_process.known({WORLD: [*range(size)], PAIR: [*range(size)], ALONE: [rank]}, {WORLD: "data", PAIR: "data"})
        rank_process.write((others or {}).get(rank, rows)).end()
    return open_run(path)


def compared(a: Run, b: Run) -> Verdict:
    return compare_calls(read_calls(a), read_calls(b))


def diff(tmp_path: Path, a: Rows, b: Rows, **options: Any) -> Verdict:
    return compared(run_of(tmp_path / "a", a), run_of(tmp_path / "b", b, **options))


def difference_rows(differences: Verdict) -> list[tuple[object, ...]]:
    """Return the rows of the table as (kind, ranks, steps, op, payload, calls in a, calls in b)."""
    table = differences.table[["kind", "ranks", "steps", "op", "payload", "calls_a", "calls_b"]]
    return [*table.itertuples(index=False, name=None)]


@pytest.mark.parametrize(
    ("purpose", "dry_calls", "status", "is_noted"),
    [
        (Purpose.EXPERT_DISPATCH, 1, 0, True),
        (Purpose.EXPERT_DISPATCH, 2, 1, True),  # their number does not depend on the data
        (Purpose.ACTIVATIONS, 1, 1, False),
    ],
)
def test_a_dry_run_routes_other_numbers_of_tokens(
    purpose: Purpose, dry_calls: int, status: int, is_noted: bool, tmp_path: Path, capsys: Captured
) -> None:
    for name, tokens, calls in (("dry", 5, dry_calls), ("log", 7, 1)):
        process = LogFactory(tmp_path / name).process(0, world_size=2, simulated=name == "dry")
        process.known({WORLD: [0, 1], PAIR: [0, 1]}, {WORLD: "data", PAIR: "expert"})
        process.add("kinds", id=9, op="all_to_all", variant="alltoall_", api="torch", dtype="float32", reduce_op=None)
        process.add("sites", id=9, file="moe.py", line=3, function="forward", purpose={"name": purpose.value})
        exchanges = [record(kind=9, group=PAIR, payload=tokens * 8, site=9)] * calls
        process.write(numbered([record(), *exchanges])).end()
    assert main(["check", str(tmp_path / "log"), "--against", str(tmp_path / "dry")]) == status
    shown = " ".join(capsys.readouterr().out.split())
    assert ("of calls with tokens of experts, sizes are not compared" in shown) == is_noted
    assert ("- 1 all_to_all of tokens of experts" in shown) == (dry_calls == 2)
    assert ("1 all_to_all of 40 bytes" in shown) == (purpose is Purpose.ACTIVATIONS)


def test_equal_runs(tmp_path: Path) -> None:
    """Times and the order of records in the log are not compared."""
    other = [row.copy() for row in steps()]
    for row in other:
        row["t_begin"] *= 1000
        row["t_end"] += 77
    differences = diff(tmp_path, steps(), other[::-1])
    assert differences.equal
    assert not len(differences.table)
    assert [sorted(compared) for compared in differences.compared] == [[0, 1, 2, 3], [-1, 0, 1, 2, 3]]
    assert differences.volumes[0] == differences.volumes[1] == (4 * 17, 4 * (8 + 4 * (3 * 1000 + 3 + 64)))
    assert not len(open_run(tmp_path / "a").diff(open_run(tmp_path / "b")))


CHANGES: dict[str, tuple[Callable[[Rows], Rows], list[tuple[object, ...]]]] = {
    "one call more": (inserted, [("calls", "all_reduce", 4, 0, 1)]),
    "another order": (swapped, [("order", "all_reduce", 1001, 1, 1)]),
    "another size": (resized, [("calls", "all_reduce", 1000, 1, 0), ("calls", "all_reduce", 1024, 0, 1)]),
    "a call less": (lambda rows: numbered(rows[:-1]), [("calls", "all_gather", 64, 1, 0)]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("where", ["all", "one"])
def test_every_difference_is_named_once(change: str, where: str, tmp_path: Path) -> None:
    changed, expected = CHANGES[change]
    other = changed(steps())
    if where == "all":
        differences = diff(tmp_path, steps(), other)
    else:
        differences = diff(tmp_path, steps(), steps(), others={2: other})
    ranks = {"all": "0-3", "one": "2"}[where]
    step = {"one call more": "step 2", "a call less": "step 3"}.get(change, "step 1")
    assert difference_rows(differences) == [(row[0], ranks, step, *row[1:]) for row in expected]
    assert not differences.equal


def test_steps_that_differ_alike_are_merged(tmp_path: Path) -> None:
    differences = diff(tmp_path, steps(6), steps(6, first=2))
    assert difference_rows(differences) == [("calls", "0-3", "step 0-5", "all_reduce", 1002, 1, 0)]


def test_groups_may_interleave(tmp_path: Path) -> None:
    """Calls of two groups with equal members may come from two threads, in an order that differs between equal runs."""
    rows = [record(payload=size, group=group) for size, group in ((8, WORLD), (16, PAIR), (24, WORLD))]
    interleaved = numbered([rows[1], rows[0], rows[2]])
    assert diff(tmp_path, numbered(rows), interleaved).equal
    reordered = numbered([rows[2], rows[0], rows[1]])
    assert [row[0] for row in difference_rows(diff(tmp_path / "reordered", numbered(rows), reordered))] == ["order"]


def test_phase_type_and_peer_are_part_of_a_call(tmp_path: Path) -> None:
    base = record(kind=SEND, payload=8, peer=1)
    for name, other in {
        "phase": record(kind=SEND, payload=8, peer=1, phase=Phase.FORWARD),
        "peer": record(kind=SEND, payload=8, peer=3),
        "group": record(kind=SEND, payload=8, peer=1, group=ALONE),
        "kind": record(kind=ALL_REDUCE, payload=8, peer=1),
    }.items():
        assert not diff(tmp_path / name, [base], [other]).equal, name
    assert diff(tmp_path / "tag", [base], [record(kind=SEND, payload=8, peer=1, tag=7, micro_batch=2)]).equal


def test_sizes_of_pickled_objects_do_not_count(tmp_path: Path) -> None:
    rows = [[record(payload=size, flags=Flag.OBJECT)] for size in (100, 117)]
    assert diff(tmp_path, *rows).equal


def test_another_call_site_is_no_difference(tmp_path: Path, capsys: Captured) -> None:
    rows = [row.copy() for row in steps()]
    for row in rows:
        row["site"] = 2
    differences = diff(tmp_path, steps(), rows)
    assert differences.equal
    assert {*differences.table["kind"]} == {"site"}
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "train.py main" in capsys.readouterr().out


# ---- ranks and steps that one run lacks ------------------------------------------------------------------------------


def test_missing_ranks(tmp_path: Path, capsys: Captured) -> None:
    differences = diff(tmp_path, steps(), steps(), ranks=2)
    assert difference_rows(differences) == [("rank", "2-3", "-", "-", 0, 34, 0)]
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "rank 2-3: only in A, 34 calls" in capsys.readouterr().out
    assert main(["check", str(tmp_path / "b"), "--against", str(tmp_path / "a")]) == 1
    assert "rank 2-3: only in expected" in capsys.readouterr().out


def test_a_dry_run_of_some_ranks(tmp_path: Path, capsys: Captured) -> None:
    differences = diff(tmp_path, steps(), steps(), ranks=2, simulated=True)
    assert differences.equal
    assert not differences.not_compared
    assert "rank 2-3: not in" in differences.notes[0]
    assert main(["check", str(tmp_path / "a"), "--against", str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out.startswith("matches the dry run ")


def test_a_rank_stands_for_others(tmp_path: Path) -> None:
    log = LogFactory(tmp_path / "dry")
    process = log.process(0, world_size=4, simulated=True).known(
        {WORLD: [*range(4)], PAIR: [*range(4)]}, {WORLD: "data"}
    )
    process.add("stands_for", ranks="0-3", count=4).write(steps()).end()
    dry = open_run(tmp_path / "dry")
    assert compared(dry, run_of(tmp_path / "same", steps())).compared[0] == {0, 1, 2, 3}
    assert compared(dry, run_of(tmp_path / "same2", steps())).equal
    other = compared(dry, run_of(tmp_path / "other", steps(), others={3: inserted(steps())}))
    assert [row[1] for row in difference_rows(other)] == ["3"]


def test_more_steps_are_compared_with_those_that_repeat(tmp_path: Path) -> None:
    """The last step of both runs ends with the barrier at the end of the program."""
    short, long = steps(4, last=True), steps(9, last=True)
    differences = diff(tmp_path / "equal", short, long)
    assert differences.equal
    assert differences.compared[1] == {*range(-1, 9)}
    assert "9 steps" in differences.notes[0]
    assert difference_rows(diff(tmp_path / "other", short, inserted(long, 6))) == [
        ("calls", "0-3", "step 6", "all_reduce", 4, 0, 1)
    ]
    assert difference_rows(diff(tmp_path / "swapped", inserted(long, 6), short)) == [
        ("calls", "0-3", "step 6", "all_reduce", 4, 1, 0)
    ]
    # Step 6 equals step 1 of the shorter run: the difference may recur every few steps.
    assert diff(tmp_path / "known", inserted(short, 1), inserted(long, 6)).table["steps"].tolist() == ["step 1"]


@pytest.mark.parametrize(("selected", "last"), [("0-1", 1), ("0-8", 0)])
def test_selected_steps(selected: str, last: int, tmp_path: Path) -> None:
    """A run that ends before the last selected step ends with the last step of its program, which is not compared."""
    differences = diff(tmp_path, inserted(steps(4), 1), steps(2), settings={"steps": selected})
    assert differences.compared[1] == {*range(-1, last + 1)}
    assert differences.equal == (last == 0)
    note = "only steps that COMMTRACE_STEPS selected in both runs are compared"
    assert (note if last else f"{note}, without step 1, the last one of a run") in differences.notes[0]


def test_steps_without_a_counterpart_are_named(tmp_path: Path) -> None:
    differences = diff(tmp_path, steps(1), steps(3, first=2))
    assert differences.equal
    assert "step 0-2 could not be compared" in differences.notes[0]


def test_a_killed_process_and_lost_records(tmp_path: Path, capsys: Captured) -> None:
    run_of(tmp_path / "a", steps())
    for name, cut in (("killed", steps()[:-1]), ("lost", [row for row in steps() if row["step"][0] != 1])):
        log = LogFactory(tmp_path / name)
        for rank in range(4):
            process = log.process(rank, pid=rank + 9, world_size=4).known(
                {WORLD: [*range(4)], ALONE: [rank]}, {WORLD: "data"}
            )
            process.write(steps() if rank else cut)
            if name == "killed" and rank == 0:
                process.stats()
            elif rank == 0:
                process.stats(dropped=4).add("end", mono_ns=1, unix_ns=2, reason="exit")
            else:
                process.end()
        assert main(["diff", str(tmp_path / "a"), str(tmp_path / name)]) == 3
        out = capsys.readouterr().out
        assert out.startswith("partly compared, equal\n")
        assert "not compared: rank 0:" in out
        assert main(["check", str(tmp_path / name), "--against", str(tmp_path / "a")]) == 3
        with_error = main(["check", str(tmp_path / name), "--update-baseline", str(tmp_path / "baseline")])
        assert with_error == 2
        assert "rank 0 lost records, did not exit cleanly" in capsys.readouterr().err


# ---- what is printed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 160])
def test_text_keeps_to_its_width(width: int, tmp_path: Path, capsys: Captured) -> None:
    run_of(tmp_path / "a", steps(), versions={"torch": "2.13.0"})
    run_of(tmp_path / "b", swapped(inserted(steps())), versions={"torch": "2.14.0"})
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--width", str(width)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0] == "different"
    assert "differing: step 1-2 of rank 0-3" in lines
    assert "rank 0-3, step 2, data group of 4 ranks:" in lines
    assert "    version torch: 2.13.0 -> 2.14.0" in lines
    assert "  from project/train.py:40 main" in lines


def test_json(tmp_path: Path, capsys: Captured) -> None:
    run_of(tmp_path / "a", steps())
    run_of(tmp_path / "b", inserted(steps()))
    assert main(["diff", "--json", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    document = json.loads(capsys.readouterr().out)
    (row,) = document["tables"]["call_differences"]
    assert document["equal"] is False
    assert (row["ranks"], row["steps"], row["calls_a"], row["calls_b"]) == ("0-3", "step 2", 0, 1)
    assert row["sites_b"] == "project/train.py:40 main"
    assert list(document["columns"]["call_differences"]) == list(row)


def test_declared_calls_are_left_out(tmp_path: Path, capsys: Captured) -> None:
    run_of(tmp_path / "a", steps())
    run_of(tmp_path / "b", inserted(steps()))
    arguments = ["check", str(tmp_path / "b"), "--against", str(tmp_path / "a")]
    assert main(arguments) == 1
    capsys.readouterr()
    assert main([*arguments, "--own", "train.py"]) == 0
    assert "project/train.py:40 main: 4 all_reduce, 16 bytes, rank 0-3" in capsys.readouterr().out


def test_calls_in_backward_are_never_own(tmp_path: Path) -> None:
    """DDP's calls have the line of the program that calls backward as their call site."""
    run_of(tmp_path / "a", steps())
    run_of(tmp_path / "b", inserted(steps(), phase=Phase.BACKWARD))
    assert main(["check", str(tmp_path / "b"), "--against", str(tmp_path / "a"), "--own", "train.py"]) == 1


def test_many_differences_are_cut(tmp_path: Path, capsys: Captured) -> None:
    rows = numbered([record(payload=size, step=size % 100) for size in range(4_100)])
    run_of(tmp_path / "a", numbered([record(step=99)]))
    run_of(tmp_path / "b", rows)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert len(capsys.readouterr().out.splitlines()) < 2000


def test_only_rules_have_a_tolerance(tmp_path: Path, capsys: Captured) -> None:
    run_of(tmp_path, steps())
    assert main(["check", str(tmp_path), "--against", str(tmp_path), "--strict"]) == 2
    assert "--strict is only for the comparison with rules" in capsys.readouterr().err


# ---- baselines -------------------------------------------------------------------------------------------------------


def test_a_baseline(tmp_path: Path, capsys: Captured) -> None:
    run_of(tmp_path / "a", steps(), versions={"torch": "2.13.0"})
    file = tmp_path / "calls.txt"
    update = ["check", str(tmp_path / "a"), "--update-baseline", str(file)]
    assert main(update) == 0
    orders = [text[:12] for text in file.read_text().split("order data 4 ")[1:]]
    gather = "deepspeed/runtime/zero/partition_parameters_with_a_long_name.py _all_gather_params_of_one_coordinator"
    assert file.read_text().splitlines() == [
        "commtrace-baseline 1",
        "# calls operation bytes type reduction phase dimension group peer call-site",
        "world-size 4",
        "version torch 2.13.0",
        "",
        "ranks 0-3 start-up",
        f" 1 all_reduce 8 float32 sum init data 4 - {gather}",
        f" order data 4 {orders[0]}",
        "",
        "ranks 0-3 steps 0-3",
        f" 1 all_gather 64 float16 - optimizer data 4 - {gather}",
        *(f" 1 all_reduce {size} float32 sum backward data 4 - deepspeed/runtime/engine.py allreduce_bucket"
          for size in (1000, 1001, 1002)),
        f" order data 4 {orders[1]}",
    ]  # fmt: skip
    capsys.readouterr()
    assert main(["check", str(tmp_path / "a"), "--baseline", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"matches the baseline {file}",
        "compared: start-up and step 0-3 of rank 0-3, 68 calls of 48.0 KiB",
    ]
    assert main(update) == 0
    assert capsys.readouterr().out == f"{file}: not changed\n"


@pytest.mark.parametrize("change", CHANGES)
def test_differences_from_a_baseline(change: str, tmp_path: Path, capsys: Captured) -> None:
    run_of(tmp_path / "a", steps())
    run_of(tmp_path / "b", steps(), others={1: CHANGES[change][0](steps())})
    file = tmp_path / "calls.txt"
    assert main(["check", str(tmp_path / "a"), "--update-baseline", str(file)]) == 0
    capsys.readouterr()
    assert main(["check", str(tmp_path / "b"), "--baseline", str(file), "--width", "200"]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"differs from the baseline {file}\n")
    assert "rank 1, step " in out
    assert "rank 0" not in out.replace("of rank 0-3", "")


def test_a_baseline_declares_own_calls(tmp_path: Path, capsys: Captured) -> None:
    run_of(tmp_path / "a", inserted(steps()))
    run_of(tmp_path / "b", inserted(steps(), 3))
    file = tmp_path / "calls.txt"
    assert main(["check", str(tmp_path / "a"), "--update-baseline", str(file)]) == 0
    assert main(["check", str(tmp_path / "b"), "--baseline", str(file)]) == 1
    assert main(["check", str(tmp_path / "b"), "--baseline", str(file), "--own", "train.py"]) == 2
    assert "--update-baseline" in capsys.readouterr().err
    assert main(["check", str(tmp_path / "a"), "--update-baseline", str(file), "--own", "train.py"]) == 0
    assert "own train.py" in file.read_text().splitlines()
    assert main(["check", str(tmp_path / "b"), "--baseline", str(file)]) == 0
    assert main(["check", str(tmp_path / "b"), "--update-baseline", str(file)]) == 0
    assert capsys.readouterr().out.endswith("not changed\n")


@pytest.mark.parametrize("text", ["", "hello\n", "commtrace-baseline 1\n x y z\n", "commtrace-baseline 1\nranks a\n"])
def test_a_file_that_is_no_baseline(text: str, tmp_path: Path, capsys: Captured) -> None:
    run_of(tmp_path / "a", steps())
    file = tmp_path / "calls.txt"
    assert main(["check", str(tmp_path / "a"), "--baseline", str(file)]) == 2
    file.write_text(text)
    for option in ("--baseline", "--update-baseline"):
        assert main(["check", str(tmp_path / "a"), option, str(file)]) == 2
        assert str(file) in capsys.readouterr().err
    assert file.read_text() == text


def many_ranks(path: Path, *, tensor: int, stages: int, data: int) -> Run:
    """Return a run of three dimensions: tensor-parallel groups of neighbours, then data parallelism, then stages."""
    world, block = tensor * stages * data, tensor * data
    log = LogFactory(path)
    sizes = range(512, 5_000, 512)
    for rank in range(world):
        first = rank - rank % tensor
        stage, offset = rank // block, rank % tensor
        groups: dict[int, Sequence[int]] = {
            11: [*range(first, first + tensor)],
            12: [*range(stage * block + offset, (stage + 1) * block, tensor)],
            13: [*range(rank % block, world, block)],
        }
        process = log.process(rank, pid=rank + 1, world_size=world, host=f"node{rank // 8}")
        process.known(groups, {11: "tensor", 12: "data", 13: "pipeline"})
        rows = [record(kind=5, payload=0, step=-1, group=12)]
        for step in range(3):
            for size in sizes:
                rows.append(record(payload=size, group=11, step=step))
                if stage + 1 < stages:
                    rows.append(record(kind=SEND, payload=size, group=13, peer=rank + block, step=step))
            rows.append(record(payload=99, group=12, peer=stage * block + offset, step=step))
        process.write(records(numbered(rows))).end()
    return open_run(path)


@pytest.mark.parametrize("data", [8, pytest.param(64, marks=pytest.mark.exhaustive)])
def test_a_baseline_of_many_ranks_is_small(tmp_path: Path, data: int) -> None:
    """The 128 or 1,024 ranks (8 tensor-parallel, 2 stages) form two classes, one per stage."""
    many_ranks(tmp_path / "run", tensor=8, stages=2, data=data)
    half = 8 * data
    file = tmp_path / "calls.txt"
    assert main(["check", str(tmp_path / "run"), "--update-baseline", str(file)]) == 0
    lines = file.read_text().splitlines()
    assert [line for line in lines if line.startswith("ranks")] == [
        f"ranks 0-{2 * half - 1} start-up", f"ranks 0-{half - 1} steps 0-2", f"ranks {half}-{2 * half - 1} steps 0-2"
    ]  # fmt: skip
    assert file.stat().st_size < 6_000
    assert main(["check", str(tmp_path / "run"), "--baseline", str(file)]) == 0


def test_data_parallel_ranks_are_one_class(tmp_path: Path) -> None:
    training(tmp_path / "run", ranks=64)
    file = tmp_path / "calls.txt"
    assert main(["check", str(tmp_path / "run"), "--update-baseline", str(file)]) == 0
    assert "ranks 0-63 start-up" in file.read_text().splitlines()
    assert file.stat().st_size < 2_000


@pytest.mark.parametrize(
    ("ranks", "shape"),
    [
        ((0, 1, 2, 3), "4"), ((4, 5, 6, 7), "4"), ((1, 3, 5, 7), "4/2"), ((8, 10, 12, 14), "4/2"), ((1, 2), "2+1"),
        ((3, 4), "2+1"), ((2, 3), "2"), ((5,), "1"), ((2, 6), "2/4"), ((6, 10), "2/4+1"),
    ],
)  # fmt: skip
def test_shapes_of_groups(ranks: tuple[int, ...], shape: str) -> None:
    assert group_shape(ranks) == shape


def test_a_rank_and_a_shape_name_all_members() -> None:
    """Different groups with constant strides that share a rank have different shapes."""
    groups = {
        tuple(range(first, first + size * stride, stride))
        for first in range(12) for size in range(2, 6) for stride in range(1, 6)
    }  # fmt: skip
    for rank in range(30):
        shapes = [group_shape(group) for group in groups if rank in group]
        assert len(shapes) == len({*shapes})
    assert group_shape((0, 1, 4, 5)) == group_shape((2, 3, 6, 7)) != group_shape((0, 1, 4, 6))


def test_names_of_call_sites() -> None:
    assert site_name(Site("/home/me/checkout/train.py", 40, "main")) == "train.py main"
    assert site_name(Site("/x/lib/site-packages/torch/nn/x.py", 4, "A.f")) == "torch/nn/x.py A.f"

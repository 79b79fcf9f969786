"""Theory compared with real trainings of models whose sequences or experts are shared among ranks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("yaml")

import sequence_trainings
import trainings
from matched_calls import counted_calls, summed_calls, unmatched_calls
from theory_assertions import Runs, assert_described, assert_exact, tables

from commtrace.analyses.compare.run_calls import EqualCalls
from commtrace.analyses.compare.waterfall import BELOW
from commtrace.theory import ExpectedCall

pytestmark = [pytest.mark.long, trainings.TIMEOUT]

RUNS_BY_NAME: dict[str, Runs] = {
    **dict.fromkeys(sequence_trainings.FIXED, sequence_trainings.runs),
    **dict.fromkeys(sequence_trainings.MORE, sequence_trainings.more),
    **dict.fromkeys(sequence_trainings.EIGHT, sequence_trainings.eight),
}


def listed(names: Iterable[str]) -> list[Any]:
    """Return names as parameters; those that represent no scheme are marked exhaustive."""
    return trainings.parameters(names, sequence_trainings.OF_EACH_SCHEME)


BOUNDED = sequence_trainings.BOUNDED


@pytest.mark.parametrize("name", listed(name for name in RUNS_BY_NAME if name not in BOUNDED))
def test_shared_sequences_and_experts_are_exact(name: str) -> None:
    assert_exact(tables(RUNS_BY_NAME[name], name), RUNS_BY_NAME[name]()[name])


@pytest.mark.parametrize("name", listed(RUNS_BY_NAME))
def test_a_job_told_from_its_configuration_is_the_one_that_was_captured(name: str, tmp_path: Path) -> None:
    assert_described(sequence_trainings.wanted(name), RUNS_BY_NAME[name]()[name], tmp_path)


@pytest.mark.parametrize("name", listed(sequence_trainings.EXPERTS))
def test_tokens_of_experts_have_their_closed_form(name: str) -> None:
    """The tokens that the gate chose slots for give the bytes of every call, also where the capacity is agreed."""
    step = RUNS_BY_NAME[name]()[name].table("step_by_purpose")
    tokens = step.loc[(step["role"] == "expert") & (step["op"] == "all_to_all")]
    assert len(tokens) or sequence_trainings.EXPERTS[name]["model"]["moe_expert_parallel_size"] == 1
    of_experts = step.loc[step["role"] == "expert"]
    assert (of_experts["difference_bytes"] == 0).all(), of_experts.to_dict("records")
    assert (of_experts["calls"] == of_experts["expected_calls"]).all(), of_experts.to_dict("records")


@pytest.mark.parametrize("name", listed(BOUNDED))
def test_sizes_that_depend_on_the_data_are_within_their_bounds(name: str) -> None:
    """Every call is as expected except for its size; the bytes below the bound have their own bar."""
    folded, run = tables(RUNS_BY_NAME[name], name), RUNS_BY_NAME[name]()[name]
    assert set(folded["reconciliation"]["cause"]) == {"expected"}
    events = run.events()
    theory = folded["theory"].set_index("rank")
    assert theory["matched_bytes"].to_dict() == events.groupby("rank")["payload_bytes"].sum().to_dict()
    expected = folded["expected"].set_index(["rank", "step", "role", "op"])
    measured = events.groupby(["rank", "step", "role", "op"], observed=True)["payload_bytes"].agg(["size", "sum"])
    assert measured["size"].to_dict() == expected["calls"].to_dict()
    bounded = expected.dropna(subset="payload_bytes_min")
    assert {key[2:] for key in bounded.index} == {("expert", "all_to_all")}
    sums = measured["sum"].loc[bounded.index]
    assert (bounded["payload_bytes_min"] <= sums).all()
    assert (sums <= bounded["payload_bytes"]).all()
    others = expected[expected["payload_bytes_min"].isna()]
    assert (others["payload_bytes"] == measured["sum"].loc[others.index]).all()
    bars = folded["waterfall"]
    assert "unexplained" not in set(bars["kind"])
    assert bars["bytes"][:-1].sum() == bars["bytes"].iloc[-1]
    below = bars.loc[bars["label"] == BELOW, "bytes"]
    assert (below < 0).all()


def test_a_size_beyond_its_bounds_shows() -> None:
    bounded = ExpectedCall("all_to_all", 100, "tokens", 2, role="expert", min_payload=40)

    def calls(size: int) -> EqualCalls:
        return counted_calls("expert", "all_to_all", size)

    def unmatched(*measured: EqualCalls) -> list[int]:
        return sorted(equal.key.payload * equal.calls for equal in unmatched_calls([bounded], measured))

    assert unmatched(calls(40), calls(100)) == []
    assert unmatched(calls(39), calls(70)) == [-100, 39]
    assert unmatched(calls(101), calls(70)) == [-100, 101]
    assert unmatched(summed_calls("expert", "all_to_all", 150, 2)) == []
    assert unmatched(summed_calls("expert", "all_to_all", 79, 2)) != []

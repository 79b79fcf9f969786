"""Tables of where the time of training steps goes across ranks: delays, stragglers, critical paths."""

from __future__ import annotations

from typing import Final

from commtrace.analyses.table_specs import shared_columns as shared
from commtrace.analyses.table_specs.spec import TableSpec, column, count, duration, share, text_column, word_column

_CHOSEN: Final = word_column("which", "step", '"median": a step of median duration; "slowest": the longest one.')
_NUMBER: Final = column("", str, "step", "number", "The training step.")
_PHASE: Final = text_column("phase", "phase",
    'Phase of the calls before and after the computation: "backward", "forward to backward", "begin of step to '
    'forward".')  # fmt: skip

STEP_TIME_PARTS: Final = TableSpec("step_time_parts", "Where the time of a step goes",
    "A row per chosen step, part and dimension; all parts except the last add up to the step.", (
    _CHOSEN, _NUMBER,
    text_column("part", "part",
        '"computation": no call blocks the rank; "waiting": it is blocked, and the last rank that the call '
        'depends on has not arrived; "exposed communication": it is blocked otherwise; "hidden communication": '
        "operations in flight that do not block it, which costs no time."),
    shared.ROLE,
    duration("ns", "time", "Mean over the ranks."),
    share("share", "share", "Share of the step."),
), {"terminal": "which part role ns share", "live": "part role ns share"})  # fmt: skip
STEP_TIMES: Final = TableSpec("step_times", "Time of each step",
    "A row per measured step, ascending. Its parts are means over the ranks, as in `step_time_parts`, over all "
    "dimensions.", (
    shared.STEP,
    duration("ns", "step", "From the end of the step before, on the last rank, to its end."),
    duration("computation_ns", "computation", "No call blocks the rank."),
    duration("waiting_ns", "waiting", "A call blocks it, and the last rank that the call depends on has not arrived."),
    duration("exposed_ns", "exposed", "A call blocks it otherwise."),
    duration("hidden_ns", "hidden", "Operations in flight that do not block it; costs no time."),
    column("", str, "slowest_rank", "slowest rank", "Rank with the longest computation."),
    duration("delay_ns", "its delay", "Its computation beyond the median of the other ranks."),
))  # fmt: skip
CRITICAL_PATH: Final = TableSpec("critical_path", "Critical path of a step",
    "A row per piece of the path of each chosen step, in the order of time; their times add up to the step. "
    "Computation has the phase of the call that it leads to, and no operation, dimension or call site.", (
    _CHOSEN, _NUMBER, shared.RANK,
    word_column("part", "part", '"computation" or "communication".'),
    shared.OP, shared.ROLE, shared.PHASE, shared.SITE,
    duration("begin_ns", "begin", "Start of the piece since the start of the step."),
    duration("ns", "time", "Its duration."),
), {"terminal": "rank part op role phase site ns"})  # fmt: skip
STRAGGLERS: Final = TableSpec("stragglers", "Stragglers", "A row per rank, ascending; over the measured steps.", (
    shared.RANK,
    count("operations", "operations", "Operations in which the rank waited, or was waited for.",
        measured=True),
    count("last", "last", "Operations that others waited in until this rank began its call.",
        measured=True),
    duration("waiting_ns", "waiting for it", "Waiting of all other ranks for this one, mean of a step."),
    share("waiting_share", "share", "waiting_ns as a share of the time of all ranks."),
    share("own_share", "own delay", "Part of the longest waits for this rank that began with its own computation."),
    share("passed_on_share", "passed on", "Part of them that began with the computation of other ranks."),
    shared.ranks_column("passed_on_from", "from", 'Those ranks, such as "2-3,7".', kind="text"),
), merge_by="rank")  # fmt: skip
DELAYS: Final = TableSpec("delays", "Delays",
    "A row per rank and phase that computes significantly longer than other ranks, the longest first.", (
    shared.RANK, _PHASE,
    word_column("recurrence", "how often", '"every step", "every 10 steps", "irregular" or "once".'),
    text_column("steps", "steps", "The delayed steps."),
    count("delayed_steps", "number", "Number of delayed steps.", measured=True),
    duration("delay_ns", "delay",
        "Computation beyond the median of the other ranks, median of the delayed steps."),
    duration("on_path_ns", "on the critical path", "Part of the delay that lengthens the step, mean."),
    share("share", "share", "delay_ns as a share of the delayed steps' duration."),
), {"terminal": "rank phase recurrence steps delay_ns share"}, merge_by="rank")  # fmt: skip
DELAY_BY_RANK_AND_STEP: Final = TableSpec("delay_by_rank_and_step",
    "Delay by rank and step", "A row per rank and measured step.", (
    shared.RANK, shared.STEP,
    duration("delay_ns", "delay", "Computation beyond the median of the other ranks; negative if it is shorter."),
))  # fmt: skip

TABLES: Final = {
    spec.name: spec for spec in (STEP_TIME_PARTS, STEP_TIMES, CRITICAL_PATH, STRAGGLERS, DELAYS, DELAY_BY_RANK_AND_STEP)
}

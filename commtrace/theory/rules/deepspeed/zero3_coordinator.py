"""Simulation of DeepSpeed's ZeRO-3 coordinator on the tree of modules: which parameters are gathered when.

It mirrors `deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator` of DeepSpeed
(`registry.DEEPSPEED`), one function for each method, without tensors. In the first micro-batch, every module fetches
its parameters when it runs, in forward and backward, and the order of modules is recorded as a trace. From the second
on, parameters are prefetched in the order of the trace, up to prefetch_bucket_size and max_live_parameters, and stay
gathered if they are used again within max_reuse_distance.

`zero3_passes` calls it for each module, in the order in which modules run.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from commtrace.theory.job import ModuleNode, NotPredictedError
from commtrace.theory.rules.registry import DEEPSPEED, rule

_COORDINATOR: Final = "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator."
_NEVER: Final = -(10**10)


@dataclass(frozen=True)
class CoordinatorLimits:
    """Settings of zero_optimization, in elements: prefetch_bucket_size, max_live_parameters, max_reuse_distance."""

    prefetch: int
    live: int
    reuse: int


@dataclass(frozen=True)
class CheckpointedSegment:
    """Children of the root that are recomputed together (torch.utils.checkpoint): from `first` to before `end`."""

    first: int
    end: int
    reentrant: bool
    masked: bool = False
    """Whether an operation after the last module (dropout) keeps a tensor for backward, and so is recomputed too."""


@dataclass
class CoordinatorCalls:
    """Recorded calls of the coordinator."""

    all_gathers: list[tuple[int, ...]] = field(default_factory=list)  # numbers of the parameters in each call
    hpz_all_gathers: list[tuple[int, ...]] = field(default_factory=list)
    """Numbers of the parameters in each call on secondary partitions (hpZ)."""
    compared: list[tuple[int, int]] = field(default_factory=list)  # most and least length of lists that ranks compared


@dataclass
class Coordinator:
    """State of the coordinator. Parameters are represented by their numbers."""

    root: ModuleNode  # the model
    elements: dict[int, int]  # elements of each parameter
    persistent: frozenset[int]  # parameters that are not released
    limits: CoordinatorLimits
    segments: Sequence[CheckpointedSegment] = ()  # recomputed children of the root
    resets_after_backward: bool = False  # DeepSpeed before 0.15.4; later versions reset before forward
    compares_lengths: bool = True  # DeepSpeed from 0.17.6 on
    secondary: frozenset[int] | None = None
    """Parameters whose secondary partition (hpZ) an optimizer step makes stale; None: there is none."""
    has_run: set[int] = field(default_factory=set)  # numbers of the modules that have run
    borrowed: frozenset[int] = field(init=False)  # parameters that modules return, which no module releases
    valid: set[int] = field(default_factory=set)  # parameters whose secondary partition can be gathered
    recorded: CoordinatorCalls = field(default_factory=CoordinatorCalls)
    available: set[int] = field(default_factory=set)
    inflight: set[int] = field(default_factory=set)
    active: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    recording: bool = False
    complete: bool = False
    order: list[ModuleNode] = field(default_factory=list)
    trace: list[tuple[int, int]] = field(default_factory=list)
    queue: deque[tuple[int, int]] = field(default_factory=deque)
    latest: dict[int, int] = field(default_factory=dict)
    position: int = 0
    live: int = 0
    released: dict[tuple[int, int], frozenset[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Set the fields that follow from others; all secondary partitions are valid at first."""
        self.recording = self.resets_after_backward
        self.borrowed = frozenset(number for module in self.root.walk() for number in module.borrowed)
        if self.secondary is not None:
            self.valid = {*self.elements}

    def take_recorded(self) -> CoordinatorCalls:
        """Return the calls recorded since this method was last called."""
        recorded, self.recorded = self.recorded, CoordinatorCalls()
        return recorded


@rule(_COORDINATOR + "reset_step", DEEPSPEED)
def reset_step(state: Coordinator) -> None:
    """Start a forward pass: the first starts the trace of modules, the second completes it, and ranks compare it.

    DeepSpeed before 0.15.4 records from the start, and resets after each backward pass.
    A micro-batch uses all prefetched parameters; an evaluation does not.
    """
    release_inflight(state)
    if not state.complete:
        compare(state, len(state.order), sum(module.has_parameters for module in state.order))
        if state.recording:
            state.trace = [
                (number, position)
                for position, module in enumerate(state.order)
                for number in sorted(used_parameters(state, module))
            ]
            compare(state, len(state.trace))
            compare(state, len(state.trace))
            state.complete, state.recording = True, False
        else:
            state.recording = True
    state.queue, state.latest = deque(state.trace), {}
    state.position = state.live = 0


@rule(_COORDINATOR + "trace_prologue, _invalidate_trace", DEEPSPEED)
def check_order(state: Coordinator, module: ModuleNode) -> None:
    """Invalidate the trace if a module is not the next one in it, as in backward if an evaluation was traced."""
    if state.complete and not (state.position < len(state.order) and state.order[state.position] is module):
        state.complete = False
        state.order, state.trace, state.latest = [], [], {}
        state.queue.clear()
        release_inflight(state)


@rule(_COORDINATOR + "_clean_inflight_param_registry", DEEPSPEED)
def release_inflight(state: Coordinator) -> None:
    """Release parameters that were prefetched and not used."""
    for number in sorted(state.inflight):
        state.inflight.discard(number)
        state.available.add(number)
        release_parameter(state, number)


@rule("deepspeed.runtime.zero.utils.assert_ints_same_as_other_ranks (before 0.17.6 without the length)", DEEPSPEED)
def compare(state: Coordinator, length: int, least: int | None = None) -> None:
    """Record rank 0's broadcasts of a list: the length, then the numbers."""
    if state.compares_lengths:
        state.recorded.compared.append((1, 1))
    state.recorded.compared.append((length, length if least is None else least))


@rule("deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module (external parameters)",
      DEEPSPEED)  # fmt: skip
def used_parameters(state: Coordinator, module: ModuleNode) -> set[int]:
    """Return the parameters that a module uses: its own, and after its first run those of others."""
    of_others = (*module.borrowed, *module.external) if module.number in state.has_run else ()
    return {*module.parameters, *of_others}


@rule("deepspeed.runtime.zero.parameter_offload.ZeROOrderedDict.__getitem__", DEEPSPEED)
def access(state: Coordinator, module: ModuleNode) -> None:
    """Gather each missing parameter of others that a module uses in its first run, when nothing has told so yet."""
    for number in module.external:
        if module.number not in state.has_run and number not in state.available:
            state.available.add(number)
            state.recorded.all_gathers.append((number,))


@rule(_COORDINATOR + "fetch_sub_module", DEEPSPEED)
def fetch(state: Coordinator, module: ModuleNode) -> None:
    """Gather the missing parameters of a module before it runs, then prefetch those of later modules."""
    check_order(state, module)
    if state.recording:
        state.order.append(module)
    numbers = used_parameters(state, module)
    all_gather_parameters(state, numbers)
    for number in numbers:
        state.active[number].add(module.number)
        if number in state.inflight:
            state.inflight.discard(number)
            state.available.add(number)
    if state.complete:
        advance_queue(state, module)
        prefetch(state)
    state.position += 1


@rule(_COORDINATOR + "_fetch_sub_module_impl (the fetch queue)", DEEPSPEED)
def advance_queue(state: Coordinator, module: ModuleNode) -> None:
    """Remove a module's parameters from the queue, unless a prefetch has already removed them."""
    needed = {number for number in used_parameters(state, module) if state.latest.get(number, _NEVER) < state.position}
    taken: set[int] = set()
    while state.queue and len(taken) < len(needed):
        number, last = state.queue.popleft()
        state.latest[number] = last
        taken.add(number)
    if taken != needed:
        raise NotPredictedError("the modules in the log are inconsistent")


@rule(_COORDINATOR + "_fetch_sub_module_impl (prefetching)", DEEPSPEED)
def prefetch(state: Coordinator) -> None:
    """Gather the next parameters of the queue in one call, up to the limits."""
    max_elements = min(state.limits.live - state.live, state.limits.prefetch)
    numbers: list[int] = []
    if state.limits.prefetch > 0:
        while state.queue and sum(state.elements[number] for number in numbers) < max_elements:
            number, last = state.queue.popleft()
            state.latest[number] = max(state.latest.get(number, _NEVER), last)
            if number not in state.available | state.inflight and number not in numbers:
                numbers.append(number)
    all_gather_parameters(state, numbers)


@rule(_COORDINATOR + "__all_gather_params_", DEEPSPEED)
def all_gather_parameters(state: Coordinator, numbers: Iterable[int]) -> None:
    """Record an all_gather of missing parameters; with hpZ, a separate one from valid secondary partitions."""
    missing = tuple(sorted(set(numbers) - state.available - state.inflight))
    state.live += sum(state.elements[number] for number in missing)
    state.inflight.update(missing)
    from_secondary = tuple(number for number in missing if number in state.valid)
    from_primary = tuple(number for number in missing if number not in state.valid)
    if from_secondary:
        state.recorded.hpz_all_gathers.append(from_secondary)
    if from_primary:
        state.recorded.all_gathers.append(from_primary)


@rule(_COORDINATOR + "release_sub_module", DEEPSPEED)
def release(state: Coordinator, module: ModuleNode) -> None:
    """Release parameters of a module after it ran: all while the trace is recorded, else the releasable ones."""
    state.has_run.add(module.number)
    numbers = used_parameters(state, module)
    to_release = releasable(state, module) if state.complete else numbers
    for number in numbers:
        state.active[number].discard(module.number)
        if number in to_release and number not in state.borrowed:
            release_parameter(state, number)


@rule(_COORDINATOR + "__params_to_release", DEEPSPEED)
def releasable(state: Coordinator, module: ModuleNode) -> frozenset[int]:
    """Return a module's parameters that are not persistent, prefetched for later, or used within the reuse distance."""
    key = module.number, state.position  # DeepSpeed caches its first result (lru_cache)
    if key not in state.released:
        numbers = {number for number in used_parameters(state, module) if number not in state.persistent}
        numbers -= {number for number in numbers if state.latest.get(number, _NEVER) > state.position}
        passed = 0
        for later in state.order[state.position :]:
            if not numbers or passed >= state.limits.reuse:
                break
            used = used_parameters(state, later)
            numbers -= used
            passed += sum(state.elements[number] for number in used)
        state.released[key] = frozenset(numbers)
    return state.released[key]


@rule(_COORDINATOR + "__release_param", DEEPSPEED)
def release_parameter(state: Coordinator, number: int) -> None:
    """Release a parameter, unless a module still uses it."""
    if number in state.available and not state.active[number]:
        state.available.discard(number)
        state.live -= state.elements[number]
        keep_secondary(state, number)


@rule("deepspeed.runtime.zero.partition_parameters.Init._partition_param_sec", DEEPSPEED)
def keep_secondary(state: Coordinator, number: int) -> None:
    """Mark a released parameter's secondary partition (hpZ) as valid, until an optimizer step."""
    if state.secondary is not None:
        state.valid.add(number)


@rule("deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.invalidate_secondary_tensor", DEEPSPEED)
def invalidate_secondary(state: Coordinator) -> None:
    """Mark the secondary partitions of the trained parameters as stale after an optimizer step."""
    state.valid -= state.secondary or frozenset()


@rule(_COORDINATOR + "release_backward_leftovers", DEEPSPEED)
def release_leftovers(state: Coordinator, module: ModuleNode) -> None:
    """Release the non-persistent parameters of a module whose input has no gradient, after the backward pass."""
    for number in used_parameters(state, module):
        state.active[number].discard(module.number)
        if number not in state.persistent | state.borrowed:
            release_parameter(state, number)


@rule(_COORDINATOR + "release_and_reset_all", DEEPSPEED)
def release_all(state: Coordinator) -> None:
    """Release all parameters before the optimizer step."""
    for number in sorted(state.available):
        state.active[number].clear()
        release_parameter(state, number)


@rule("deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.checkpoint_event_epilogue; "
      "deepspeed.runtime.zero.partition_parameters.GatheredParameters.__exit__", DEEPSPEED)  # fmt: skip
def leave_gathered(state: Coordinator, numbers: Iterable[int]) -> None:
    """Release all parameters but these, which something else than a pass has left gathered."""
    release_inflight(state)
    release_all(state)
    state.available = {*numbers}


@rule("deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._post_step", DEEPSPEED)
def gather_persistent(state: Coordinator) -> None:
    """Gather each persistent parameter in its own call after the optimizer step; it stays gathered until the next."""
    for number in sorted(state.persistent):
        if number not in state.available:
            state.available.add(number)
            state.recorded.all_gathers.append((number,))

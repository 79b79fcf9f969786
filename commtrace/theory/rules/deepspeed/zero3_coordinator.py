"""Which parameters ZeRO-3 gathers when: DeepSpeed's coordinator, played through on the list of modules.

Mirrors `deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator` of DeepSpeed 0.19.8, a
method for a method, without tensors. In the first micro-batch every module fetches its parameters when it runs, forward
and backward, and the order of modules is recorded. From the second on the record is known: parameters are fetched ahead
of their use, as many as prefetch_bucket_size and max_live_parameters let, and are kept where they are used again soon
enough (max_reuse_distance).

Assumed, as the job cannot say it: modules run once each, in the order in which they were made, nested as they are
registered; the model's input needs no gradient. Modules whose activations are recomputed (`CheckpointedSegment`) run
once more within the backward pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from commtrace.theory.job import ModuleNode, NotPredictedError
from commtrace.theory.rules.registry import DEEPSPEED, rule

_WHERE: Final = "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator."
_NEVER: Final = -(10**10)


@dataclass(frozen=True)
class CoordinatorLimits:
    """Settings of zero_optimization, in elements."""

    prefetch: int
    live: int
    reuse: int


@dataclass(frozen=True)
class CheckpointedSegment:
    """Children of the root that are recomputed together (torch.utils.checkpoint): the first, and behind the last."""

    first: int
    end: int
    reentrant: bool
    masked: bool = False
    """Something behind the last module is kept for backward, as dropout's mask: recomputed up to there."""


@dataclass
class CoordinatorCalls:
    """What was communicated: sets of parameters gathered in one call, and lengths of lists that ranks compared."""

    gathers: list[tuple[int, ...]] = field(default_factory=list)
    within: list[tuple[int, ...]] = field(default_factory=list)
    """The same, of those gathered from the second partition alone (hpZ)."""
    compared: list[int] = field(default_factory=list)


class Coordinator:
    """The state between calls. Parameters are numbers; `elements` says how many elements each has."""

    def __init__(
        self,
        root: ModuleNode,
        elements: dict[int, int],
        persistent: frozenset[int],
        limits: CoordinatorLimits,
        stretches: Sequence[CheckpointedSegment] = (),
        second: frozenset[int] | None = None,
    ) -> None:
        """`second`: parameters that have a second partition (hpZ) which the optimizer makes invalid."""
        self.root, self.elements, self.persistent, self.limits = root, elements, persistent, limits
        self.stretches = {stretch.end - 1: stretch for stretch in stretches}
        self.second = second
        self.valid = {*elements} if second is not None else set()
        self.traffic = CoordinatorCalls()
        self.available: set[int] = set()
        self.inflight: set[int] = set()
        self.active: dict[int, set[int]] = {number: set() for number in elements}
        self.recording = self.complete = False
        self.order: list[ModuleNode] = []
        self.trace: list[tuple[int, int]] = []
        self.queue: deque[tuple[int, int]] = deque()
        self.latest: dict[int, int] = {}
        self.position = self.live = 0
        self.released: dict[tuple[int, int], frozenset[int]] = {}

    def take(self) -> CoordinatorCalls:
        """What was communicated since the last time."""
        traffic, self.traffic = self.traffic, CoordinatorCalls()
        return traffic


# --- rules: the methods, as functions of the state ------------------------------------------------------------------


@rule("deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload.setup_zero_stage3_hooks", DEEPSPEED)
def micro_batch(state: Coordinator) -> None:
    """Forward and backward of the whole model, module by module."""
    reset_step(state)
    forward(state, state.root)
    fetch(state, state.root)
    left, at = [state.root], len(state.root.children)
    while at:
        stretch = state.stretches.get(at - 1)
        at = at - 1 if stretch is None else stretch.first
        if stretch is None:
            left += backward(state, state.root.children[at], fed=at == 0)
        else:
            left += recomputed_backward(state, stretch)
    release_leftovers(state, left)


def forward(state: Coordinator, module: ModuleNode) -> None:
    """A module and the modules within it."""
    fetch(state, module)
    for child in module.children:
        forward(state, child)
    release(state, module)


def backward(state: Coordinator, module: ModuleNode, *, fed: bool) -> list[ModuleNode]:
    """The reverse. The end of a module's backward is seen at the gradient of its input.

    A module that is `fed` the model's own input gets none: it and those like it are returned, to be released later.
    """
    fetch(state, module)
    left = []
    for at in reversed(range(len(module.children))):
        left += backward(state, module.children[at], fed=fed and at == 0)
    if fed:
        return [module, *left]
    release(state, module)
    return left


@rule("deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload.pre_sub_module_forward_function "
      "(within torch.utils.checkpoint)", DEEPSPEED)  # fmt: skip
def recomputed_backward(state: Coordinator, stretch: CheckpointedSegment) -> list[ModuleNode]:
    """Backward of modules whose activations were not kept: they run forward again, first or on the way.

    With reentrant autograd before anything else. Without it when backward first needs what was not kept: at the last
    module that has parameters, whose backward has begun; and the second forward pass stops there, as it has by then
    made all that backward needs. Behind it dropout keeps a mask: then that is the place.
    """
    modules = state.root.children[stretch.first : stretch.end]
    if stretch.reentrant:
        for module in modules:
            forward(state, module)
        return [one for at in reversed(range(len(modules))) for one in backward(state, modules[at], fed=False)]
    last = modules[-1]
    way = [last] if stretch.masked else last_with_parameters(last)
    for module in way:
        fetch(state, module)
    for module in modules[:-1]:
        forward(state, module)
    forward_until(state, last, None if stretch.masked else way[-1])
    finish_backward(state, way)
    for at in reversed(range(len(modules) - 1)):
        backward(state, modules[at], fed=False)
    return []


def last_with_parameters(module: ModuleNode) -> list[ModuleNode]:
    """The way to the last module in it that has parameters of its own, itself included."""
    for child in reversed(module.children):
        way = last_with_parameters(child)
        if way:
            return [module, *way]
    return [module] if module.parameters else []


def forward_until(state: Coordinator, module: ModuleNode, end: ModuleNode | None) -> bool:
    """As `forward`, but for what comes behind the beginning of `end`; None: behind the last child of `module`.

    True where it came to its end.
    """
    fetch(state, module)
    if module is end:
        return True
    for child in module.children:
        if end is None:
            forward(state, child)
        elif forward_until(state, child, end):
            return True
    if end is None:
        return True
    release(state, module)
    return False


def finish_backward(state: Coordinator, way: Sequence[ModuleNode]) -> None:
    """The rest of backward of modules within each other whose backward has begun."""
    inner = way[1] if len(way) > 1 else None
    begun = inner is None
    for child in reversed(way[0].children):
        if begun:
            backward(state, child, fed=False)
        elif child is inner:
            finish_backward(state, way[1:])
            begun = True
    release(state, way[0])


@rule(_WHERE + "reset_step", DEEPSPEED)
def reset_step(state: Coordinator) -> None:
    """Before each forward pass. The first begins the record, the second completes it, and ranks compare it.

    Nothing is in flight here: a micro-batch of whole modules uses all that was fetched ahead.
    """
    if not state.complete:
        compare(state, len(state.order))
        if state.recording:
            state.trace = [(number, at) for at, one in enumerate(state.order) for number in sorted(set(one.parameters))]
            compare(state, len(state.trace))
            compare(state, len(state.trace))
            state.complete, state.recording = True, False
        else:
            state.recording = True
    state.queue, state.latest = deque(state.trace), {}
    state.position = state.live = 0


@rule("deepspeed.runtime.zero.utils.assert_ints_same_as_other_ranks", DEEPSPEED)
def compare(state: Coordinator, length: int) -> None:
    """Rank 0's list goes to the others: how long it is, then its numbers."""
    state.traffic.compared += [1, length]


@rule(_WHERE + "fetch_sub_module", DEEPSPEED)
def fetch(state: Coordinator, module: ModuleNode) -> None:
    """Gather what the module needs and nobody has gathered, then what later modules will need."""
    if state.recording:
        state.order.append(module)
    gather(state, module.parameters)
    for number in module.parameters:
        state.active[number].add(module.number)
        if number in state.inflight:
            state.inflight.discard(number)
            state.available.add(number)
    if state.complete:
        advance_queue(state, module)
        prefetch(state)
    state.position += 1


@rule(_WHERE + "_fetch_sub_module_impl (the fetch queue)", DEEPSPEED)
def advance_queue(state: Coordinator, module: ModuleNode) -> None:
    """Take what the module uses out of the queue, unless a prefetch has been there before."""
    wanted = {number for number in module.parameters if state.latest.get(number, _NEVER) < state.position}
    taken: set[int] = set()
    while state.queue and len(taken) < len(wanted):
        number, last = state.queue.popleft()
        state.latest[number] = last
        taken.add(number)
    if taken != wanted:
        raise NotPredictedError("the modules in the log do not fit together")


@rule(_WHERE + "_fetch_sub_module_impl (prefetching)", DEEPSPEED)
def prefetch(state: Coordinator) -> None:
    """Gather the next parameters of the queue in one call, up to the limits."""
    room = min(state.limits.live - state.live, state.limits.prefetch)
    ahead: list[int] = []
    if state.limits.prefetch > 0:
        while state.queue and sum(state.elements[number] for number in ahead) < room:
            number, last = state.queue.popleft()
            state.latest[number] = max(state.latest.get(number, _NEVER), last)
            if number not in state.available | state.inflight and number not in ahead:
                ahead.append(number)
    gather(state, ahead)


@rule(_WHERE + "__all_gather_params_", DEEPSPEED)
def gather(state: Coordinator, numbers: Iterable[int]) -> None:
    """One call for those that nobody has gathered; hpZ: one more for those whose second partition is valid."""
    missing = tuple(sorted(set(numbers) - state.available - state.inflight))
    state.live += sum(state.elements[number] for number in missing)
    state.inflight.update(missing)
    near = tuple(number for number in missing if number in state.valid)
    far = tuple(number for number in missing if number not in state.valid)
    if near:
        state.traffic.within.append(near)
    if far:
        state.traffic.gathers.append(far)


@rule(_WHERE + "release_sub_module", DEEPSPEED)
def release(state: Coordinator, module: ModuleNode) -> None:
    """After a module: its parameters, all of them while the record is made, else those that can go."""
    going = releasable(state, module) if state.complete else frozenset(module.parameters)
    for number in module.parameters:
        state.active[number].discard(module.number)
        if number in going:
            release_parameter(state, number)


@rule(_WHERE + "__params_to_release", DEEPSPEED)
def releasable(state: Coordinator, module: ModuleNode) -> frozenset[int]:
    """Neither persistent, nor fetched for a later use already, nor used again within the reuse distance."""
    key = module.number, state.position  # DeepSpeed remembers its first answer (lru_cache), so the same here
    if key not in state.released:
        going = {number for number in module.parameters if number not in state.persistent}
        going -= {number for number in going if state.latest.get(number, _NEVER) > state.position}
        passed = 0
        for later in state.order[state.position :]:
            if passed >= state.limits.reuse:
                break
            going.difference_update(later.parameters)
            passed += sum(state.elements[number] for number in later.parameters)
        state.released[key] = frozenset(going)
    return state.released[key]


@rule(_WHERE + "__release_param", DEEPSPEED)
def release_parameter(state: Coordinator, number: int) -> None:
    """Unless a module is still at work on it."""
    if number in state.available and not state.active[number]:
        state.available.discard(number)
        state.live -= state.elements[number]
        keep_secondary(state, number)


@rule("deepspeed.runtime.zero.partition_parameters.Init._partition_param_sec", DEEPSPEED)
def keep_secondary(state: Coordinator, number: int) -> None:
    """hpZ: what is taken apart is kept in the second partition as well, where it stays until it is invalid."""
    if state.second is not None:
        state.valid.add(number)


@rule("deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.invalidate_secondary_tensor", DEEPSPEED)
def invalidate_secondary(state: Coordinator) -> None:
    """After the optimizer: the second partition of what it trains is of yesterday."""
    state.valid -= state.second or frozenset()


@rule(_WHERE + "release_backward_leftovers", DEEPSPEED)
def release_leftovers(state: Coordinator, modules: Iterable[ModuleNode]) -> None:
    """After backward: modules whose input had no gradient. Their persistent parameters stay."""
    for module in modules:
        for number in module.parameters:
            state.active[number].discard(module.number)
            if number not in state.persistent:
                release_parameter(state, number)


@rule(_WHERE + "release_and_reset_all", DEEPSPEED)
def release_all(state: Coordinator) -> None:
    """Before the optimizer."""
    for number in sorted(state.available):
        state.active[number].clear()
        release_parameter(state, number)


@rule("deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._post_step", DEEPSPEED)
def gather_persistent(state: Coordinator) -> None:
    """After the optimizer, a call for each persistent parameter: it stays until the next optimizer step."""
    for number in sorted(state.persistent):
        if number not in state.available:
            state.available.add(number)
            state.traffic.gathers.append((number,))


def run_step(state: Coordinator, micro_batches: int) -> list[CoordinatorCalls]:
    """A whole step: the traffic of each of its micro-batches, then that of its optimizer."""
    parts = []
    for _ in range(micro_batches):
        micro_batch(state)
        parts.append(state.take())
    release_all(state)
    gather_persistent(state)
    invalidate_secondary(state)
    return [*parts, state.take()]

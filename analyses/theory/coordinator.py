"""Which parameters ZeRO-3 gathers when: DeepSpeed's coordinator, played through on the list of modules.

Mirrors `deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator` of DeepSpeed 0.19.8, a
method for a method, without tensors. In the first micro-batch every module fetches its parameters when it runs, forward
and backward, and the order of modules is recorded. From the second on the record is known: parameters are fetched ahead
of their use, as many as prefetch_bucket_size and max_live_parameters let, and are kept where they are used again soon
enough (max_reuse_distance).

Assumed, as the job cannot say it: modules run once each, in the order in which they were made, nested as they are
registered; the model's input needs no gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from .job import Module, NotPredictedError
from .rules import DEEPSPEED, rule

_WHERE: Final = "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator."
_NEVER: Final = -(10**10)


@dataclass(frozen=True)
class Limits:
    """Settings of zero_optimization, in elements."""

    prefetch: int
    live: int
    reuse: int


@dataclass
class Traffic:
    """What was communicated: sets of parameters gathered in one call, and lengths of lists that ranks compared."""

    gathers: list[tuple[int, ...]] = field(default_factory=list)
    compared: list[int] = field(default_factory=list)


class Coordinator:
    """The state between calls. Parameters are numbers; `elements` says how many elements each has."""

    def __init__(self, root: Module, elements: dict[int, int], persistent: frozenset[int], limits: Limits) -> None:
        self.root, self.elements, self.persistent, self.limits = root, elements, persistent, limits
        self.traffic = Traffic()
        self.available: set[int] = set()
        self.inflight: set[int] = set()
        self.active: dict[int, set[int]] = {number: set() for number in elements}
        self.recording = self.complete = False
        self.order: list[Module] = []
        self.trace: list[tuple[int, int]] = []
        self.queue: deque[tuple[int, int]] = deque()
        self.latest: dict[int, int] = {}
        self.position = self.live = 0
        self.released: dict[tuple[int, int], frozenset[int]] = {}

    def take(self) -> Traffic:
        """What was communicated since the last time."""
        traffic, self.traffic = self.traffic, Traffic()
        return traffic


# --- rules: the methods, as functions of the state ------------------------------------------------------------------


@rule("deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload.setup_zero_stage3_hooks", DEEPSPEED)
def micro_batch(state: Coordinator) -> None:
    """Forward and backward of the whole model, module by module."""
    reset_step(state)
    forward(state, state.root)
    left = backward(state, state.root, fed=True)
    release_leftovers(state, left)


def forward(state: Coordinator, module: Module) -> None:
    """A module and the modules within it."""
    fetch(state, module)
    for child in module.children:
        forward(state, child)
    release(state, module)


def backward(state: Coordinator, module: Module, *, fed: bool) -> list[Module]:
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
def fetch(state: Coordinator, module: Module) -> None:
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
        advance(state, module)
        prefetch(state)
    state.position += 1


@rule(_WHERE + "_fetch_sub_module_impl (the fetch queue)", DEEPSPEED)
def advance(state: Coordinator, module: Module) -> None:
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
    """One call for those that nobody has gathered."""
    missing = tuple(sorted(set(numbers) - state.available - state.inflight))
    if missing:
        state.live += sum(state.elements[number] for number in missing)
        state.inflight.update(missing)
        state.traffic.gathers.append(missing)


@rule(_WHERE + "release_sub_module", DEEPSPEED)
def release(state: Coordinator, module: Module) -> None:
    """After a module: its parameters, all of them while the record is made, else those that can go."""
    going = releasable(state, module) if state.complete else frozenset(module.parameters)
    for number in module.parameters:
        state.active[number].discard(module.number)
        if number in going:
            release_parameter(state, number)


@rule(_WHERE + "__params_to_release", DEEPSPEED)
def releasable(state: Coordinator, module: Module) -> frozenset[int]:
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


@rule(_WHERE + "release_backward_leftovers", DEEPSPEED)
def release_leftovers(state: Coordinator, modules: Iterable[Module]) -> None:
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


def play(state: Coordinator, micro_batches: int) -> list[Traffic]:
    """A whole step: the traffic of each of its micro-batches, then that of its optimizer."""
    parts = []
    for _ in range(micro_batches):
        micro_batch(state)
        parts.append(state.take())
    release_all(state)
    gather_persistent(state)
    return [*parts, state.take()]

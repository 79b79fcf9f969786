"""python behaviour.py FOLDER: assert that hooks do not change a program (one process, no network)."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

import commtrace
from commtrace.recording.session import session

StorageWeakRef: Any = torch.multiprocessing.reductions.StorageWeakRef
dist: Any = torch.distributed  # its stubs are incomplete

warnings.simplefilter("error")
LOG = sys.argv[1]
OPERATORS = ("c10d::allreduce_", "c10d::send", "_c10d_functional::wait_tensor")
METHODS = {name: vars(dist.Work)[name] for name in ("wait", "synchronize", "is_completed")}
ORIGINAL_INIT = torch.nn.parallel.DistributedDataParallel.__init__


def hooked() -> set[bool]:
    return {torch._C._dispatch_has_kernel_for_dispatch_key(name, "BackendSelect") for name in OPERATORS}


def soon(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def initialise() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def check_install_and_uninstall() -> None:
    from commtrace.hooks.torch import hook

    for _ in range(2):
        hook.install()
        assert hooked() == {True}
    for _ in range(2):
        hook.uninstall()
        assert hooked() == {True}  # kernels stay, because a thread may be entering one, and only forward calls
    hook.remove_kernels()
    assert hooked() == {False}
    assert {name: vars(dist.Work)[name] for name in METHODS} == METHODS
    assert torch.nn.parallel.DistributedDataParallel.__init__ is ORIGINAL_INIT


def check_half_an_install_is_taken_back() -> None:
    from commtrace.hooks.torch import hook
    from commtrace.hooks.torch import training as torch_training

    original: Any = torch_training.install

    def fails() -> None:
        original()
        raise AttributeError("another torch")

    torch_training.install = fails
    try:
        hook.install()
    except AttributeError:
        pass
    finally:
        torch_training.install = original
    assert {name: vars(dist.Work)[name] for name in METHODS} == METHODS


def check_works() -> None:
    work = dist.all_reduce(torch.ones(4), async_op=True)
    assert type(work).__mro__[-3:] == (dist.Work, *dist.Work.__mro__[1:])
    assert isinstance(work.get_future().wait(), list)
    assert work.wait(timedelta(seconds=5)) is True
    assert work.wait() is True
    assert work.is_completed() is True
    assert work.is_success() is True


def check_nothing_is_kept_after_a_wait() -> None:
    tensor = torch.ones(1000)
    died = weakref.ref(tensor)
    storage = StorageWeakRef(tensor.untyped_storage())
    dist.all_reduce(tensor, async_op=True).wait()
    del tensor
    soon(lambda: died() is None and storage.expired())  # gloo's thread releases it a moment later


def check_nothing_is_kept_after_a_work_was_dropped() -> None:
    tensor = torch.ones(1000)
    storage = StorageWeakRef(tensor.untyped_storage())
    dist.all_reduce(tensor, async_op=True)
    del tensor
    soon(storage.expired)


def check_groups_end() -> None:
    group = dist.new_group([0])
    died = weakref.ref(group)
    dist.all_reduce(torch.ones(1), group=group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert died() is None


def errors() -> list[tuple[type, str]]:
    """Return the exceptions of calls that torch refuses."""
    raised: list[tuple[type, str]] = []
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce("text"),
        lambda: dist.broadcast(torch.ones(1), src=3),
        lambda: dist.all_gather([torch.zeros(3)], torch.zeros(2)),
        lambda: dist.all_reduce(torch.ones(1), op=dist.ReduceOp.BAND),
        lambda: dist.send(torch.ones(1), 0),
    ]
    for call in calls:
        try:
            call()
        except Exception as error:
            raised.append((type(error), str(error)))
    return raised


def check_errors_are_the_same() -> None:
    assert len(ERRORS) == 5
    assert errors() == ERRORS


def check_threads() -> None:
    groups = [dist.new_group([0]) for _ in range(4)]
    failures: list[BaseException] = []

    def communicate(group: Any) -> None:
        try:
            for _ in range(200):
                dist.all_reduce(torch.ones(2), group=group)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=communicate, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def check_a_forked_child_leaves_its_parent_s_log_alone() -> None:
    work = dist.all_reduce(torch.ones(6), async_op=True)
    pid = os.fork()
    if pid == 0:
        del work
        os._exit(0 if session.recorder is None else 1)
    assert os.waitpid(pid, 0)[1] == 0
    work.wait()


def check_exec_does_not_fill_memory() -> None:
    from commtrace.hooks import call_site as module

    call_site: Any = module

    max_codes, call_site._MAX_CODES = call_site._MAX_CODES, 64
    for number in range(200):
        exec(compile("dist.all_reduce(torch.ones(1))", f"<made {number}>", "exec"), globals())
    from commtrace.hooks.torch.tracer import current

    tracer = current()
    assert tracer is not None
    assert len(tracer.sites._kinds) <= 64
    assert len(tracer.sites._sites) <= 64
    call_site._MAX_CODES = max_codes


def sharded_model() -> Callable[[], None]:
    """Return a step of an FSDP2 model that has run before tracing, whose settings are then unknown."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()
        with torch.no_grad():
            model(torch.ones(2, 4))

    step()
    return step


initialise()
ERRORS = errors()
STEP = sharded_model()
check_install_and_uninstall()
check_half_an_install_is_taken_back()
for number in range(2):
    commtrace.start(f"{LOG}/{number}")
    assert hooked() == {True}
    if number == 0:  # it belongs to the first world
        STEP()
    check_works()
    check_nothing_is_kept_after_a_wait()
    check_nothing_is_kept_after_a_work_was_dropped()
    check_groups_end()
    check_errors_are_the_same()
    check_threads()
    check_a_forked_child_leaves_its_parent_s_log_alone()
    check_exec_does_not_fill_memory()
    dist.destroy_process_group()
    initialise()
    dist.all_reduce(torch.ones(11))
    kept = dist.all_reduce(torch.ones(12), async_op=True)
    commtrace.stop()
    assert hooked() == {True}
    assert {name: vars(dist.Work)[name] for name in METHODS} == METHODS
    kept.wait()
    dist.all_reduce(torch.ones(13))
dist.destroy_process_group()
commtrace.start(f"{LOG}/end")
initialise()
left = dist.all_reduce(torch.ones(14), async_op=True)  # never waited for, and alive at exit

"""The hook of mpi4py: replaces every method that communicates, on its own class.

mpi4py's classes are immutable extension types. Replacing their methods anyway (`extension_types`) covers every object,
whenever and by whom it is made, without subclasses or wrapper objects. mpi4py calls MPI from C and not its own methods,
so a call that pickles is recorded once.
"""

from __future__ import annotations

import functools

from mpi4py import MPI

from commtrace.hooks import recorder_setup
from commtrace.hooks.native import mpi_recorder as native

from . import pickled_objects as mpi_pickle
from . import tracer as mpi_tracer
from .extension_types import ExtensionPatches, namespace
from .methods import METHODS
from .wrappers import (
    ENDS,
    SYNCHRONIZATIONS,
    cancelling,
    ending,
    forgetting,
    freeing,
    matching,
    matching_class,
    planning,
    recording,
    starting,
    starting_all,
    synchronizing,
)

_BLIND_SPOTS = (
    "MPI calls that C or Fortran code makes beside mpi4py, file input and output, and programs that use MPI sessions "
    "without initializing MPI are not seen",
    "a Request that is copied, or made from a handle, shows no end to the call that it stands for",
)

_patches = ExtensionPatches()


def install() -> None:
    """Hook mpi4py. Does nothing if it is hooked already."""
    if _patches:
        return
    try:
        _install()
    except BaseException:
        uninstall()  # complete or not there: half of it would write a log with gaps
        raise


def _install() -> None:
    in_c = native.usable()
    for method in METHODS:
        if method.name in namespace(method.owner):
            wrapper = planning(method) if method.returns == "prequest" else recording(method)
            _patches.wrap(
                method.owner, method.name, wrapper, functools.partial(native.replacement, method) if in_c else None
            )
    if in_c:
        recorder_setup.compiled.add("mpi4py")
        mpi_tracer.started.append(native.begins)
        mpi_tracer.ended.append(native.ends)
    for name in ENDS:
        _patches.wrap(MPI.Request, name, ending(name))
    for name in SYNCHRONIZATIONS:
        _patches.wrap(MPI.Win, name, synchronizing(name))
    for name in ("Cancel", "cancel"):
        _patches.wrap(MPI.Request, name, cancelling)
    _patches.wrap(MPI.Request, "Free", freeing)
    _patches.wrap(MPI.Prequest, "Start", starting)
    _patches.wrap(MPI.Prequest, "Startall", starting_all)
    for owner, name in ((MPI.Comm, "Free"), (MPI.Comm, "Disconnect"), (MPI.Win, "Free")):
        _patches.wrap(owner, name, forgetting)
    for name in ("Mprobe", "Improbe", "mprobe", "improbe"):
        _patches.wrap(MPI.Comm, name, matching)
    for name in ("Probe", "Iprobe", "probe", "iprobe"):
        _patches.wrap(MPI.Message, name, matching_class)
    mpi_pickle.install()
    recorder_setup.blind_spots["mpi4py"] = list(_BLIND_SPOTS)
    recorder_setup.identities["mpi4py"] = mpi_tracer.identity_in_world


def uninstall() -> None:
    """Restore every method."""
    mpi_pickle.uninstall()
    _patches.undo()
    mpi_tracer.started.clear()
    mpi_tracer.ended.clear()
    native.ends()
    recorder_setup.compiled.discard("mpi4py")
    recorder_setup.blind_spots.pop("mpi4py", None)
    recorder_setup.identities.pop("mpi4py", None)

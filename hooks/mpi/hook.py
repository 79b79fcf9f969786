"""The hook of mpi4py: replaces every method that communicates, on the class that defines it.

mpi4py's classes are immutable extension types. Replacing their methods (`extension_types`) covers
every object, no matter when and by whom it is created, without subclasses or wrapper objects.
mpi4py's methods call MPI from C, not each other, so a call that pickles is recorded once.
"""

from __future__ import annotations

from functools import partial

from mpi4py import MPI

from commtrace.hooks import recorder_setup
from commtrace.hooks.native import compiled_wrappers as native
from commtrace.process_setup.setup_reader import library_facts
from commtrace.recording.session import session

from . import pickled_objects as mpi_pickle
from . import tracer as mpi_tracer
from . import wrappers
from .communicators import creations, handle_key
from .extension_types import ExtensionPatches, namespace
from .methods import METHODS

_BLIND_SPOTS = (
    "MPI calls of C or Fortran code, file input and output, and programs that use MPI sessions without initializing "
    "MPI are not observed",
    "a copied Request, or one made from a handle, does not show the end of its call",
)

_CREATORS = (
    (MPI.Comm, ("Clone", "Dup", "Dup_with_info", "Create", "Split", "Split_type")),
    (MPI.Intracomm, (
        "Create_group", "Create_cart", "Create_graph", "Create_dist_graph_adjacent", "Create_dist_graph",
        "Create_intercomm",
    )),
    (MPI.Cartcomm, ("Sub",)),
    (MPI.Intercomm, ("Merge",)),
)  # fmt: skip
"""Methods that create communicators."""

_patches = ExtensionPatches()


@_patches.installer
def install() -> None:
    """Hook mpi4py."""
    in_c = native.usable()
    for method in METHODS:
        if method.name in namespace(method.owner):
            wrapper = (
                wrappers.wrap_persistent_init(method) if method.returns == "prequest" else wrappers.wrap_call(method)
            )
            instead = partial(native.replacement, method) if in_c else None
            _patches.wrap(method.owner, method.name, wrapper, instead)
    if in_c:
        recorder_setup.libraries_with_compiled_wrappers.add("mpi4py")
        _patches.on_undo(recorder_setup.libraries_with_compiled_wrappers.discard, "mpi4py")
        _patches.on_undo(native.stop_recording)
        _patches.append(mpi_tracer.start_listeners, native.start_recording)
        _patches.append(session.end_listeners, native.stop_recording)
    for owner, names, wrapper in (
        (MPI.Request, ("Cancel", "cancel"), wrappers.wrap_cancel),
        (MPI.Request, ("Free",), wrappers.wrap_request_free),
        (MPI.Prequest, ("Start",), wrappers.wrap_start),
        (MPI.Prequest, ("Startall",), wrappers.wrap_startall),
        (MPI.Comm, ("Free", "Disconnect"), wrappers.wrap_handle_free),
        (MPI.Comm, ("Abort",), wrappers.wrap_abort),
        (MPI.Win, ("Free",), wrappers.wrap_handle_free),
        (MPI.Comm, ("Mprobe", "Improbe", "mprobe", "improbe"), wrappers.wrap_probe),
        (MPI.Message, ("Probe", "Iprobe", "probe", "iprobe"), wrappers.wrap_message_probe),
        *((MPI.Request, (name,), wrappers.wrap_completion(name)) for name in wrappers.COMPLETION_METHODS),
        *((MPI.Win, (name,), wrappers.wrap_synchronization(name)) for name in wrappers.SYNCHRONIZATIONS),
    ):
        for name in names:
            _patches.wrap(owner, name, wrapper)
    for owner, names in _CREATORS:
        for name in names:
            _patches.wrap(owner, name, creations.timed(lambda comm: handle_key(comm) if comm else None))
    library_version = {"mpi_version": MPI.Get_library_version()[:1000]}
    library_facts["mpi4py"] = lambda: {**creations.facts(), **library_version}
    _patches.on_undo(library_facts.pop, "mpi4py")
    _patches.include(mpi_pickle)
    recorder_setup.blind_spots["mpi4py"] = list(_BLIND_SPOTS)
    recorder_setup.identities["mpi4py"] = mpi_tracer.identity_in_world
    _patches.on_undo(recorder_setup.blind_spots.pop, "mpi4py")
    _patches.on_undo(recorder_setup.identities.pop, "mpi4py")


uninstall = _patches.undo

"""Every public method of mpi4py's classes is recorded, completes a request, or moves no data."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import mpi_launch  # noqa: F401  (MPI is not initialized in this process)
import pytest

pytest.importorskip("mpi4py.MPI", exc_type=(ImportError, RuntimeError))  # type: ignore[arg-type]

from mpi4py import MPI

from commtrace.hooks.mpi import hook
from commtrace.hooks.mpi.extension_types import namespace
from commtrace.hooks.mpi.methods import METHODS
from commtrace.hooks.mpi.wrappers import COMPLETION_METHODS
from commtrace.operations import OPERATIONS

CLASSES = (
    "Comm", "Intracomm", "Intercomm", "Topocomm", "Cartcomm", "Graphcomm", "Distgraphcomm", "Request", "Prequest",
    "Grequest", "Message", "Win",
)  # fmt: skip

SILENT = {
    "Comm": """
        Abort Ack_failed Agree Attach_buffer Call_errhandler Clone Compare Create Create_errhandler
        Create_keyval Delete_attr Detach_buffer Disconnect Dup Dup_with_info Flush_buffer Free Free_keyval
        Get_attr Get_errhandler Get_failed Get_group Get_info Get_name Get_parent Get_rank Get_size Get_topology
        Iagree Idup Idup_with_info Iflush_buffer Improbe Iprobe Is_inter Is_intra Is_revoked Ishrink Join Mprobe
        Probe Revoke Set_attr Set_errhandler Set_info Set_name Shrink Split Split_type f2py free fromhandle
        fromint improbe iprobe mprobe probe py2f toint
    """,
    "Intracomm": """
        Accept Cart_map Connect Create_cart Create_dist_graph Create_dist_graph_adjacent Create_from_group
        Create_graph Create_group Create_intercomm Graph_map Spawn Spawn_multiple
    """,
    "Intercomm": "Create_from_groups Get_remote_group Get_remote_size Merge",
    "Topocomm": "",
    "Cartcomm": "Get_cart_rank Get_coords Get_dim Get_topo Shift Sub",
    "Graphcomm": "Get_dims Get_neighbors Get_neighbors_count Get_topo",
    "Distgraphcomm": "Get_dist_neighbors Get_dist_neighbors_count",
    "Request": "Cancel Free cancel f2py free fromhandle fromint py2f toint",
    "Prequest": "Parrived Pready Pready_list Pready_range",
    "Grequest": "Complete Start complete",
    "Message": "Iprobe Probe f2py free fromhandle fromint iprobe probe py2f toint",
    "Win": """
        Allocate Allocate_shared Attach Call_errhandler Complete Create Create_dynamic Create_errhandler
        Create_keyval Delete_attr Detach Flush Flush_all Flush_local Flush_local_all Free Free_keyval Get_attr
        Get_errhandler Get_group Get_info Get_name Lock Lock_all Post Set_attr Set_errhandler Set_info Set_name
        Shared_query Start Sync Test Unlock Unlock_all Wait f2py free fromhandle fromint py2f toint tomemory
    """,
}
"""Methods that move no data, by class."""


def public_methods(name: str) -> set[str]:
    """Return the public methods that a class defines itself, without properties and constants."""
    members = namespace(getattr(MPI, name))
    return {method for method, value in members.items() if not method.startswith("_") and _is_method(value)}


def _is_method(value: Any) -> bool:
    return callable(value) or isinstance(value, (classmethod, staticmethod))


def recorded() -> dict[str, set[str]]:
    methods: dict[str, set[str]] = {name: set() for name in CLASSES}
    for method in METHODS:
        methods[method.owner.__name__].add(method.name)
    methods["Request"] |= set(COMPLETION_METHODS)
    methods["Prequest"] |= {"Start", "Startall"}
    return methods


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_method_is_recorded_or_on_the_list(name: str) -> None:
    silent = {*SILENT.get(name, "").split()}
    known = recorded()[name] | silent
    assert public_methods(name) - known == set(), "neither recorded nor said to move no data"
    assert recorded()[name] & silent == set(), "recorded, and said to move no data"
    assert silent - public_methods(name) == set(), "no such method"


def test_no_class_is_left_out() -> None:
    """CLASSES has every class of mpi4py that can communicate."""
    others = {
        name
        for name, value in vars(MPI).items()
        if isinstance(value, type) and issubclass(value, (MPI.Comm, MPI.Request, MPI.Message, MPI.Win))
    }
    assert {name for name in others if name.lower() != "internal"} == set(CLASSES)


def test_the_arguments_are_called_as_mpi4py_calls_them() -> None:
    for method in METHODS:
        original = namespace(method.owner).get(method.name)
        if original is not None:
            names = [name for name in inspect.signature(original).parameters if name != "self"]
            assert list(method.parameters) == names, f"{method.owner.__name__}.{method.name}"


def test_the_hook_replaces_and_restores_every_method() -> None:
    def everything() -> dict[tuple[str, str], Any]:
        return {
            (name, method): namespace(getattr(MPI, name))[method] for name in CLASSES for method in public_methods(name)
        }

    before = everything()
    hook.install()
    try:
        during = everything()
        replaced = {key for key in before if during[key] is not before[key]}
        assert {(m.owner.__name__, m.name) for m in METHODS if (m.owner.__name__, m.name) in before} <= replaced
    finally:
        hook.uninstall()
    assert all(everything()[key] is value for key, value in before.items())
    assert MPI.pickle.dumps([1]) == pickle.dumps([1], MPI.pickle.PROTOCOL)


def test_every_method_has_an_operation() -> None:
    messages = {message.op for method in METHODS for message in method.messages}
    assert {method.op for method in METHODS} | messages == {*OPERATIONS}

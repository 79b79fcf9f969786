"""Sizes of buffers that support only DLPack, with both kinds of capsules."""

from __future__ import annotations

from typing import Any

import mpi_launch  # noqa: F401  (MPI is not initialized in this process)
import numpy as np
import pytest

pytest.importorskip("mpi4py.MPI", exc_type=(ImportError, RuntimeError))  # type: ignore[arg-type]

from commtrace.hooks.mpi.buffers import Block, simple


class Exporter:
    """Memory that only DLPack describes."""

    def __init__(self, array: Any, version: tuple[int, int] | None) -> None:
        self._array, self._version = array, version
        self.name = ""

    def __dlpack__(self) -> Any:
        capsule = self._array.__dlpack__() if self._version is None else self._array.__dlpack__(max_version=(1, 0))
        self.name = repr(capsule).split('"')[1]
        return capsule

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


@pytest.mark.parametrize(("version", "name"), [(None, "dltensor"), ((1, 0), "dltensor_versioned")])
@pytest.mark.parametrize("dtype", ["float64", "int16", "complex64"])
def test_both_capsules_give_the_same_size(version: tuple[int, int] | None, name: str, dtype: str) -> None:
    array = np.zeros((3, 5), dtype)
    exporter = Exporter(array, version)
    assert simple(exporter) == Block(array.nbytes, dtype)
    assert exporter.name == name

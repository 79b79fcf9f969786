"""Services to which training programs send results: switched off by their own variables, or refused."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Final

_SWITCHES: Final = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
_REMOVED: Final = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI")  # without them, MLflow writes to local files
_LOCAL: Final = ("localhost", "127.", "::1", "[::1]", "0.0.0.0")
_METHODS: Final = ("PUT", "PATCH", "DELETE")
_POSTED: Final = ("/mlflow", "/commit/", "/preupload/", "/lfs/", "?uploads", "uploadid=", "?delete")
"""Parts of addresses of MLflow, the Hugging Face Hub and S3 to which a POST writes; others may only ask."""


class RefusedRequestError(PermissionError):
    """The program sends a request that changes something on another host."""


def switched_off(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which loggers send nothing."""
    return {**{name: value for name, value in environment.items() if name not in _REMOVED}, **_SWITCHES}


def refuse_request(host: object, data: object) -> None:
    """Raise RefusedRequestError if the beginning of an HTTP request changes something on another host."""
    if not isinstance(data, bytes | bytearray):
        return
    line = bytes(data[:2048]).split(b"\r\n", 1)[0].decode("latin-1")
    method, _, address = line.partition(" ")
    writes = method in _METHODS or (method == "POST" and any(part in address.lower() for part in _POSTED))
    if line.rpartition(" ")[2].startswith("HTTP/") and writes and not str(host).startswith(_LOCAL):
        raise RefusedRequestError(
            errno.EACCES, f"a dry run refuses to send {method} to {host}; leave it out, or use --writes allow"
        )

"""Environment variables that are copied to the log: those of launchers and communication libraries, without secrets.

Other variables are not read. A value that may be a secret is left out, and its name is kept: it shows that the variable
is set.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Final

IDENTITY_VARIABLES: Final = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID",
    "SLURM_NTASKS", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "PMIX_NAMESPACE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE",
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
)  # fmt: skip
"""Variables in which a launcher tells a process its place in the job. They are no settings."""

TRANSPORT_VARIABLES: Final = (
    "NCCL_", "TORCH_NCCL_", "RCCL_", "GLOO_", "UCX_", "UCC_", "FI_", "OFI_NCCL_", "OMPI_MCA_", "MPICH_", "MPIR_CVAR_",
    "I_MPI_", "OMP_",
)  # fmt: skip
"""Prefixes of variables that choose how messages travel, and how many threads compute."""

_FURTHER_SETTINGS: Final = (
    "NVSHMEM_", "HSA_", "CCL_", "PSM2_", "PSM3_", "MV2_", "MVP_", "HCOLL_", "SHARP_", "KMP_", "DS_",
    "TORCH_DISTRIBUTED_", "PYTORCH_",
)  # fmt: skip
_NAMED_SETTINGS: Final = (
    "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK", "GPU_MAX_HW_QUEUES",
)  # fmt: skip

# A name may end in any of these. UCX_IB_PKEY, the partition of a network, is no key.
_SECRET_NAME: Final = re.compile(
    r"TOKEN|SECRET|PASS(?![A-Z])|PASSW|PASSPHRASE|PASSCODE|(^|_)PWD?(_|$)|CRED|AUTH|COOKIE|PRIVATE|(?<!P)KEY|SIGNATURE"
    r"|BEARER|SALT|CERT|LICEN[SC]E|CONN(ECTION)?_?STR|WEBHOOK|(^|_)DSN(_|$)",
    re.I,
)
_SECRET_WORD: Final = re.compile(
    r"-----BEGIN|://[^/\s]*@|://[^\s]*[?&]|"
    r"(token|secret|passw(or)?d|passphrase|\bpass|\bpwd|api[-_]?key|access[-_]?key|credential|authorization|bearer"
    r"|signature|\bsig|\bauth|cookie)\w*\s*[=: ]|"
    r"\b(AKIA|ASIA|AIza|ya29\.|eyJ|xox[a-z]-|xapp-|gh[a-z]_|github_pat_|glpat-|hf_|sk-|sk_|pk_|rk_|npm_|pypi-|nvapi-"
    r"|dckr_pat_|shp[a-z]{2}_|SG\.|r8_|gsk_|ATATT|AGE-SECRET|ssh-(rsa|ed25519|dss)|basic )",
    re.I,
)
_USUAL_CHARACTERS: Final = re.compile(r"[\w.,:;=^~+/%*@<>(){}\[\]| -]{0,512}", re.ASCII)
_IDENTIFIER: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.I)
_DEVICE_IDENTIFIER: Final = re.compile(rf"(?:GPU|MIG)-(?:{_IDENTIFIER.pattern})", re.I)
_LONG_WORD: Final = re.compile(r"[A-Za-z0-9+]{16,}")


def read_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str | None]:
    """Return the variables that are recorded, sorted by name; None in place of a value that may be a secret."""
    names = {*IDENTITY_VARIABLES, *_NAMED_SETTINGS}
    prefixes = (*TRANSPORT_VARIABLES, *_FURTHER_SETTINGS)
    return {
        name: None if may_be_secret(name, value) else value
        for name, value in sorted(dict(environ).items())
        if name in names or name.startswith(prefixes)
    }


def read_transport_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that choose how messages travel, without those that may be secrets."""
    return {
        name: value
        for name, value in read_variables(environ).items()
        if value is not None and name.startswith(TRANSPORT_VARIABLES)
    }


def may_be_secret(name: str, value: str) -> bool:
    """Return whether the name or the value of a variable has a form that secrets have."""
    if _SECRET_NAME.search(name):
        return True
    if name.endswith("_VISIBLE_DEVICES"):
        value = _DEVICE_IDENTIFIER.sub("", value)
    elif name == "TORCHELASTIC_RUN_ID" and _IDENTIFIER.fullmatch(value):  # made by torchrun --standalone
        return False
    if not _USUAL_CHARACTERS.fullmatch(value) or _SECRET_WORD.search(value) or _IDENTIFIER.search(value):
        return True
    return any(_looks_random(word) for word in _LONG_WORD.findall(value))


def _looks_random(word: str) -> bool:
    """Return whether letters and digits, or letters of both cases, alternate more often than in names and numbers."""
    kinds = ["d" if c.isdigit() else "l" if c.islower() else "u" for c in word]
    changes = sum(a != b for a, b in pairwise(kinds))
    has_digits = "d" in kinds and len({*kinds}) > 1
    return (has_digits and changes >= 4) or changes >= len(word) / 3 or (has_digits and len(word) >= 40)

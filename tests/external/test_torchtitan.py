"""torchtitan's unmodified programs on CPU ranks: the purpose, phase and dimension of every call of a step.

    TORCHTITAN_CHECKOUT=/path/of/a/checkout pytest -m external tests/external/test_torchtitan.py

The expected calls are written from the programs: torchtitan at commit b64292ba1, its debug models. Its requirements
must be installed (tyro, datasets, tokenizers, safetensors, tensorboard, einops, pillow, spmd_types, grain, and
torchdata without dependencies), and the checkout must have `tests/assets/c4_test/data.json`, lines of `{"text": ...}`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import commtrace
from commtrace.schema import Purpose

VARIABLE = "TORCHTITAN_CHECKOUT"
CHECKOUT = Path(os.environ.get(VARIABLE, "."))
LAUNCHER = Path(__file__).parent / "frameworks" / "titan_on_cpu.py"

pytestmark = [
    pytest.mark.external,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} does not name a checkout of torchtitan"),
]

LAYERS = 6
LOSS_CHUNKS = 8
MICRO_BATCHES = 4
UNITS = LAYERS + 2
"""Units of FSDP2: embedding, layers, and the final norm with the head."""

Calls = Mapping[tuple[str, str, str, Purpose], int]
"""Operation, dimension, phase and purpose -> calls of rank 0 in the second step."""


class Program(NamedTuple):
    """A configuration, and what its second step does."""

    ranks: int
    arguments: str
    calls: Calls


GRADIENTS, GRADIENT_NORM, METRICS, TENSORS = Purpose.GRADIENTS, Purpose.GRADIENT_NORM, Purpose.METRICS, Purpose.TENSORS
REDUCE, GATHER, SCATTER, EXCHANGE = "all_reduce", "all_gather", "reduce_scatter", "all_to_all"
LLAMA = "--module llama3 --config llama3_debugmodel"
TENSOR = f"{LLAMA} --parallelism.tensor_parallel_degree 2 --activation_checkpoint.mode"
PIPELINE = (
    f"{LLAMA} --parallelism.pipeline_parallel_degree 2 --training.local_batch_size {MICRO_BATCHES} "
    "--parallelism.pipeline_parallel_schedule"
)
# The loss, its maximum, the number of tokens seen, and the number of the next step's tokens.
MEASURED: Calls = {(REDUCE, "data", "other", METRICS): 4}


def sharded(units: int, backward: int, *, head: int = 1) -> Calls:
    """Return the calls of FSDP2 with this many units, of which so many are gathered again in backward.

    The loss in chunks runs the head on its own, after the final norm: their unit is gathered again for it, and its
    gradients are reduced twice (`head`).
    """
    return {
        (GATHER, "data", "forward", Purpose.PARAMETERS_FORWARD): units + head,
        (GATHER, "data", "backward", Purpose.PARAMETERS_BACKWARD): backward,
        (SCATTER, "data", "backward", GRADIENTS): units + head,
        (REDUCE, "data", "other", GRADIENT_NORM): 1,
    }


def with_tensors(gathered: int, scattered: int = 0) -> Calls:
    """Return the calls of FSDP2 with tensor and sequence parallelism, and those that recompute activations."""
    return {
        **sharded(UNITS, UNITS),
        (SCATTER, "tensor", "forward", Purpose.ACTIVATIONS): 2 * LAYERS + 1,
        (GATHER, "tensor", "forward", Purpose.ACTIVATIONS): 2 * LAYERS,
        (GATHER, "tensor", "other", TENSORS): 1,  # before the chunks of the loss
        (REDUCE, "tensor", "forward", Purpose.LOSS): 3 * LOSS_CHUNKS,
        (GATHER, "tensor", "backward", Purpose.ACTIVATION_GRADIENTS): 2 * LAYERS + 1,
        (SCATTER, "tensor", "backward", Purpose.ACTIVATION_GRADIENTS): 2 * LAYERS,
        (GATHER, "tensor", "backward", Purpose.ACTIVATIONS_RECOMPUTED): gathered,
        (SCATTER, "tensor", "backward", Purpose.ACTIVATIONS_RECOMPUTED): scattered,
        (REDUCE, "tensor", "backward", GRADIENTS): 2 * LAYERS + 1,  # of norms, whose inputs are sharded
        (REDUCE, "tensor", "other", GRADIENT_NORM): 1,
        (REDUCE, "data", "other", METRICS): 2,  # the loss is a DTensor that is not reduced
    }


def staged(stages: int) -> Calls:
    """Return the messages of rank 0, the first of two, whose pipeline has this many stages."""
    sent, received = stages // 2 * MICRO_BATCHES, (stages // 2 - 1) * MICRO_BATCHES
    return {
        ("send", "pipeline", "forward", Purpose.PIPELINE_ACTIVATIONS): sent,
        ("recv", "pipeline", "forward", Purpose.PIPELINE_ACTIVATIONS): received,
        ("recv", "pipeline", "backward", Purpose.PIPELINE_GRADIENTS): sent,
        ("send", "pipeline", "backward", Purpose.PIPELINE_GRADIENTS): received,
        (REDUCE, "pipeline", "other", GRADIENT_NORM): 1,
    }


STAGE = LAYERS // 2 + 1
"""Units of the first of two stages: the embedding and half of the layers."""
PROGRAMS = {
    "fsdp2": Program(2, LLAMA, {**sharded(UNITS, UNITS), **MEASURED}),
    "never resharded": Program(
        2,
        f"{LLAMA} --parallelism.fsdp_reshard_after_forward never",
        {**sharded(UNITS, 1), **MEASURED},
    ),
    "hsdp": Program(
        4,
        f"{LLAMA} --parallelism.data_parallel_replicate_degree 2",
        {**sharded(UNITS, UNITS), **MEASURED, (REDUCE, "data", "backward", GRADIENTS): UNITS + 1},
    ),
    "tensor, selective": Program(4, f"{TENSOR} selective", with_tensors(2 * LAYERS)),
    "tensor, full": Program(4, f"{TENSOR} full", with_tensors(2 * LAYERS, 2 * LAYERS)),
    "tensor, none": Program(4, f"{TENSOR} none", with_tensors(0)),
    "1F1B": Program(2, f"{PIPELINE} 1F1B", staged(2)),
    "interleaved": Program(2, f"{PIPELINE} Interleaved1F1B", staged(4)),
    "zero-bubble": Program(2, f"{PIPELINE} InterleavedZeroBubble --activation_checkpoint.mode none", staged(4)),
    "1F1B, fsdp2": Program(4, f"{PIPELINE} 1F1B", {**sharded(STAGE, 0, head=0), **staged(2), **MEASURED}),
}


def train(program: Program, folder: Path, **variables: object) -> list[str]:
    """Train three steps, and return the checksums of the ranks' parameters."""
    folder.mkdir()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("COMMTRACE")}
    quiet = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    small = "--training.steps 3 --training.seq_len 128 --training.local_batch_size 2 --debug.seed 1"
    same = f"--debug.deterministic --training.mixed_precision_param float32 --dump_folder {folder}"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={program.ranks}"]
    told: dict[str, Any] = {"TITAN_BITS": folder / "bits", "PYTHONPATH": CHECKOUT, **variables}
    done = subprocess.run(
        [*launcher, str(LAUNCHER), *small.split(), *same.split(), *program.arguments.split()],
        env={**inherited, **quiet, **{name: str(value) for name, value in told.items()}},
        cwd=CHECKOUT, capture_output=True, text=True, timeout=1000,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return sorted((folder / "bits").read_text().splitlines())


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program(name: str, tmp_path: Path) -> None:
    program = PROGRAMS[name]
    log = tmp_path / "log"
    assert train(program, tmp_path / "traced", COMMTRACE=log) == train(program, tmp_path / "untraced")

    events = commtrace.open(log).events()
    assert {*events["step"]} == {-1, 0, 1, 2}
    assert not {*events["purpose"].astype(str)} & {"not recorded", "unknown"}
    assert not {*events["role"].astype(str)} & {"unknown"}
    second = events[(events["rank"] == 0) & (events["step"] == 1)]
    found = Counter(zip(*(second[column].astype(str) for column in ("op", "role", "phase", "purpose")), strict=True))
    assert found == Counter({(*call, purpose.value): number for (*call, purpose), number in program.calls.items()})


EXPERTS = "--module deepseek_v3 --config deepseek_v3_debugmodel --parallelism.expert_parallel_degree 2"


@pytest.mark.parametrize(
    ("ranks", "arguments", "recomputed"),
    [
        (2, "--activation_checkpoint.mode selective", 0),  # it keeps what was received
        (2, "--activation_checkpoint.mode full", 3),  # numbers of tokens, dispatch, combine
        (4, "--activation_checkpoint.mode full --parallelism.tensor_parallel_degree 2", 3),
    ],
)
def test_tokens_of_experts(ranks: int, arguments: str, recomputed: int, tmp_path: Path) -> None:
    """Five of six layers have experts. All their calls have the bytes that follow from the routing."""
    layers, log = LAYERS - 1, tmp_path / "log"
    program = Program(ranks, f"{EXPERTS} {arguments}", {})
    assert train(program, tmp_path / "traced", COMMTRACE=log) == train(program, tmp_path / "untraced")

    step = commtrace.open(log).table("step_by_purpose")
    calls = step.loc[(step["role"] == "expert") & (step["op"] == EXCHANGE)].set_index("purpose")
    expected = {
        Purpose.EXPERT_COUNTS: layers,
        Purpose.EXPERT_DISPATCH: layers,
        Purpose.EXPERT_COMBINE: layers,
        Purpose.EXPERT_GRADIENTS: 2 * layers,
        **({Purpose.ACTIVATIONS_RECOMPUTED: recomputed * layers} if recomputed else {}),
    }
    assert calls["calls"].to_dict() == {purpose.value: number for purpose, number in expected.items()}
    assert (calls["expected_calls"] == calls["calls"]).all()
    assert (calls["difference_bytes"] == 0).all()


def test_a_dry_run_of_llama3_8b_on_256_ranks(tmp_path: Path) -> None:
    """Rank 0 of the program for GPUs as it is: the calls of its second step, and their bytes."""
    model = f"--module llama3 --config llama3_8b --hf_assets_path {CHECKOUT / 'tests/assets/tokenizer'}"
    trained = f"-m torchtitan.train {model} --training.steps 2 --dataloader.dataset c4_test".split()
    simulated = f"dryrun --world-size 256 --ranks 0 --out {tmp_path} --timeout 300".split()
    done = subprocess.run(
        [sys.executable, "-m", "commtrace.cli", *simulated, sys.executable, *trained],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)}, cwd=CHECKOUT, capture_output=True, text=True, timeout=320,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]

    events = commtrace.open(tmp_path).events()
    second = events[events["step"] == 1]
    units, parameters, head = 32 + 2, 8_030_261_248, 128_256 * 4096 + 4096
    found = Counter(zip(*(second[column].astype(str) for column in ("op", "role", "phase", "purpose")), strict=True))
    expected = sharded(units, units)
    assert {key: found[(*key[:3], key[3].value)] for key in expected} == expected
    payloads = second.groupby("purpose", observed=True)["payload_bytes"].sum()
    assert payloads[Purpose.PARAMETERS_FORWARD.value] == 2 * (parameters + head)  # in bfloat16
    assert payloads[Purpose.PARAMETERS_BACKWARD.value] == 2 * parameters
    assert payloads[GRADIENTS.value] == 4 * parameters  # in float32, the head apart from the norm

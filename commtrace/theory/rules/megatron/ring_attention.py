"""Ring attention, context parallelism (arXiv 2310.01889): what ranks that share sequences send each other.

Keys and values go round, a message each: n-1 hops forward, n-1 hops backward, and n hops of their fp32 gradients, which
the last hop brings home. Gradients are reduced as those of data-parallel ranks, for each rank works on its own tokens.

Assumed, as for tensor parallelism: every micro-batch has the configured size and length.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Final

from commtrace.theory.closed_forms import ring_attention
from commtrace.theory.expected_calls import ExpectedCall, Prediction, WaterfallBar, level_bars, total_wire_bytes
from commtrace.theory.job import Job, NotPredictedError, element_size
from commtrace.theory.rules.deepspeed.engine import parameter_size
from commtrace.theory.rules.deepspeed.ulysses import recomputed_attention
from commtrace.theory.rules.registry import WORKLOAD, rule

from . import tensor_parallel as tensor

ROLE: Final = "context"
ROUND: Final = "keys and values passed round"
HOME: Final = "gradients of keys and values passed round"


def applies(job: Job) -> bool:
    """Whether ranks share sequences in a ring."""
    return job.context > 1


def extend_prediction(job: Job, data: Prediction) -> Prediction:
    """The prediction of a job, from what it does as if all of its ranks were data-parallel.

    Raises NotPredictedError where the model has experts as well, or ZeRO-3 cuts it.
    """
    if job.row.get("moe"):
        raise NotPredictedError("ring attention together with experts has no rules yet")
    own = (*keys_and_values(job), *key_value_gradients(job))
    form, bars = _bars(job, own)
    scheme = f"{data.scheme}, context-parallel over {job.context} (ring attention)"
    return tensor.combine_predictions(job, data, own, form, bars, scheme, {ROLE: job.context, "self": 1})


def _bars(job: Job, own: tuple[ExpectedCall, ...]) -> tuple[WaterfallBar, list[WaterfallBar]]:
    batch, length, hidden = tensor.batch_dimensions(job)
    layers, steps = int(job.model("num_layers")), tensor.micro_batches(job)
    form = layers * ring_attention(batch, length, hidden, job.context) * parameter_size(job)
    once = Fraction(2 * layers * _block(job) * (job.context - 1))  # keys and values, once round
    gradients = total_wire_bytes((one for one in own if one.cause == HOME), job.context) / steps
    exact = total_wire_bytes(own, job.context)
    levels = {
        "ring attention: gradients travel in fp32, one hop more": 2 * once * parameter_size(job) + gradients,
        "ring attention: activations recomputed": exact / steps,
        f"ring attention: in each of {steps} micro-batches": exact,
    }
    return WaterfallBar("ring attention: 6 L b s h (n-1)/n", Fraction(form)), level_bars(Fraction(form), levels)


def _block(job: Job) -> int:
    """Elements of a rank's keys."""
    batch, length, hidden = tensor.batch_dimensions(job)
    return batch * (length // job.context) * hidden


def _messages(job: Job, size: int, cause: str, hops: int) -> list[ExpectedCall]:
    """Of keys and of values, in each layer and micro-batch: sent on, and received from behind."""
    calls = 2 * hops * int(job.model("num_layers")) * tensor.micro_batches(job)
    return [ExpectedCall(op, _block(job) * size, cause, calls, role=ROLE) for op in ("send", "recv")]


# --- rules ----------------------------------------------------------------------------------------------------------


@rule("examples.gpt_neox.sequence._Ring.forward", WORKLOAD)
def keys_and_values(job: Job) -> list[ExpectedCall]:
    """Forward and backward, and forward again where activations are recomputed."""
    return _messages(job, parameter_size(job), ROUND, (job.context - 1) * (2 + recomputed_attention(job)))


@rule("examples.gpt_neox.sequence._Ring.backward", WORKLOAD)
def key_value_gradients(job: Job) -> list[ExpectedCall]:
    """Added up in fp32 on their way round."""
    return _messages(job, element_size("float32"), HOME, job.context)

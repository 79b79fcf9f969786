"""Ring attention, context parallelism (arXiv 2310.01889): calls among ranks that share sequences.

Keys and values pass around the ring, in one message each: n-1 hops forward, n-1 hops backward, and n hops of their fp32
gradients, which the last hop returns to their owner. Gradients of parameters are reduced as among data-parallel ranks,
because each rank has its own tokens.

Assumed, as for tensor parallelism: every micro-batch has the configured size and length.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Final

from commtrace.theory.expected_calls import ExpectedCall, Prediction, WaterfallBar, level_bars, total_wire_bytes
from commtrace.theory.job import Job, NotPredictedError, element_size
from commtrace.theory.rules.megatron import tensor_parallel as tensor
from commtrace.theory.rules.registry import WORKLOAD, rule

from .closed_forms import ring_attention
from .recomputation import recomputed_passes

ROLE: Final = "context"
FORWARD: Final = "keys and values around the ring"
BACKWARD: Final = "gradients of keys and values around the ring"


def extend_prediction(job: Job, data: Prediction) -> Prediction:
    """Add calls among ranks that share sequences.

    Raise NotPredictedError if the model has experts as well, or does not declare its architecture.
    """
    if job.has_experts:
        raise NotPredictedError("ring attention together with experts has no rules yet")
    own = (*keys_and_values(job), *key_value_gradients(job))
    batch, length, hidden = tensor.batch_dimensions(job)
    layers, steps = job.model.num_layers, job.micro_batches
    form = Fraction(layers * ring_attention(batch, length, hidden, job.context) * job.parameter_size)
    once_round = Fraction(2 * layers * _key_elements(job) * (job.context - 1))  # keys and values
    gradients = total_wire_bytes(own, job.context, BACKWARD) / steps
    exact = total_wire_bytes(own, job.context)
    levels = {
        "ring attention: gradients travel in fp32, one hop more": 2 * once_round * job.parameter_size + gradients,
        "ring attention: activations recomputed": exact / steps,
        f"ring attention: in each of {steps} micro-batches": exact,
    }
    closed_form = WaterfallBar("ring attention: 6 L b s h (n-1)/n", form)
    scheme = f"{data.scheme}, context-parallel over {job.context} (ring attention)"
    return tensor.combine_predictions(
        job, data, own, closed_form, level_bars(form, levels), scheme, {ROLE: job.context, "self": 1}
    )


def _key_elements(job: Job) -> int:
    """Return the elements of a rank's keys in one layer."""
    batch, length, hidden = tensor.batch_dimensions(job)
    return batch * (length // job.context) * hidden


def _hops(job: Job, size: int, cause: str, hops: int) -> list[ExpectedCall]:
    """Return a step's hops of keys and of values: messages sent to the next rank and received from the previous one."""
    calls = 2 * hops * job.model.num_layers * job.micro_batches
    return [ExpectedCall(op, _key_elements(job) * size, cause, calls, role=ROLE) for op in ("send", "recv")]


@rule("examples.gpt_neox.sequence._Ring.forward", WORKLOAD)
def keys_and_values(job: Job) -> list[ExpectedCall]:
    """Return the messages of keys and values: around the ring in forward, in backward and in recomputation."""
    return _hops(job, job.parameter_size, FORWARD, (job.context - 1) * (2 + recomputed_passes(job)))


@rule("examples.gpt_neox.sequence._Ring.backward", WORKLOAD)
def key_value_gradients(job: Job) -> list[ExpectedCall]:
    """Return the messages of the gradients of keys and values, which are summed in fp32 around the ring."""
    return _hops(job, element_size("float32"), BACKWARD, job.context)

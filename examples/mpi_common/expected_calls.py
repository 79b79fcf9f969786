"""Expected calls of the MPI examples `examples.mpi_sequence_parallel` and `examples.mpi_encoder`.

Every function returns the calls of **one rank in one iteration** (of the encoder: one training step), with payloads in
bytes as `commtrace.volume` defines them; `total_wire_bytes` of `commtrace.theory.expected_calls` gives the fewest
bytes that the rank sends for them. A single rank communicates nothing. `element`: bytes of an element. `backward`:
whether the iteration has a backward pass.

Letters: b batch, s sequence, h hidden (m, the encoder's model size), a heads, L layers, n ranks, e bytes per element.
"""

from __future__ import annotations

from commtrace.theory.expected_calls import ExpectedCall


def gathered_attention(
    batch: int, sequence: int, hidden: int, element: int, ranks: int, backward: bool
) -> list[ExpectedCall]:
    """Return the calls of attention with gathered keys and values.

    2 all_gathers of b s h e forward (transformer-sequence-parallelism, "Communication: 2 AllGathers per layer");
    backward, derived: the gradient of the gathered tensor is reduce_scattered.

    Wire: 2 b s h e (n-1)/n forward, the same backward. The payload does not depend on n.
    """
    if ranks == 1:
        return []
    size = batch * sequence * hidden * element
    forward = ExpectedCall("all_gather", size, "keys and values of the whole sequence", 2, role="sequence")
    back = ExpectedCall("reduce_scatter", size, "gradients of keys and values", 2, role="sequence")
    return [forward, back] if backward else [forward]


def ulysses_attention(
    batch: int, sequence: int, hidden: int, element: int, ranks: int, backward: bool
) -> list[ExpectedCall]:
    """Return the calls of Ulysses: 4 all_to_alls of b (s/n) h e forward, 4 backward (2309.14509, section 3).

    Wire: 4 b (s/n) h e (n-1)/n forward, the same backward: it falls with n.
    """
    if ranks == 1:
        return []
    size = batch * (sequence // ranks) * hidden * element
    cause = "queries, keys, values and the output, from tokens to heads and back"
    forward = ExpectedCall("all_to_all", size, cause, 4, role="sequence")
    back = ExpectedCall("all_to_all", size, f"gradients of {cause}", 4, role="sequence")
    return [forward, back] if backward else [forward]


def ring_attention(
    batch: int, sequence: int, hidden: int, element: int, ranks: int, backward: bool
) -> list[ExpectedCall]:
    """Return the calls of ring attention with blocks of B = 2 b (s/n) h e.

    n-1 sends and receives of B forward; backward n-1 of keys and values again, and n-1 of their gradients (2310.01889;
    derived: the gradient of a block starts one rank after the block's owner and reaches it after n-1 further hops).

    Wire: B (n-1) forward, 2 B (n-1) backward.
    """
    size = 2 * batch * (sequence // ranks) * hidden * element
    calls = []
    causes = ["keys and values", "keys and values again", "gradients of keys and values"]
    for cause in causes if backward else causes[:1]:
        calls += [ExpectedCall(op, size, cause, ranks - 1, role="sequence") for op in ("send", "recv")]
    return calls if ranks > 1 else []


SEQUENCE_PARALLEL = {"all_gather": gathered_attention, "ulysses": ulysses_attention, "ring": ring_attention}
"""Functions by the value of --attention."""


def layer_parameters(hidden: int, feed_forward: int) -> int:
    """Return the number of parameters of a layer: 12h² + 13h for f = 4h.

    They are four projections and the feed-forward with biases, and two norms.
    """
    return 4 * (hidden**2 + hidden) + (2 * hidden * feed_forward + feed_forward + hidden) + 4 * hidden


def sequence_parallel(
    attention: str, batch: int, sequence: int, hidden: int, feed_forward: int, element: int, ranks: int, backward: bool
) -> list[ExpectedCall]:
    """Return the calls of an iteration of the sequence-parallel layer.

    Its attention, and one all_reduce of all gradients (derived: every rank has all parameters, and the gradient of its
    own tokens only).
    """
    calls = SEQUENCE_PARALLEL[attention](batch, sequence, hidden, element, ranks, backward)
    if ranks > 1 and backward:
        size = layer_parameters(hidden, feed_forward) * element
        calls.append(ExpectedCall("all_reduce", size, "gradients of the parameters", role="sequence"))
    return calls


def tensor_parallel(
    layers: int, batch: int, sequence: int, model: int, heads: int, element: int, ranks: int,
    backward: bool, micro_batches: int = 1,
) -> list[ExpectedCall]:  # fmt: skip
    """Return the calls of a step of the encoder divided as in Megatron-LM (1909.08053, section 3).

    Per layer 2 all_reduces of S = b s m e forward and 2 backward (also of the first layer, because the gradient of the
    input is computed). Micro-batches divide S.

    Wire: 8 S (n-1)/n per layer. More ranks than heads: see `shared_heads`.
    """
    if ranks == 1:
        return []
    size = batch // micro_batches * sequence * model * element
    calls = 2 * layers * micro_batches
    forward = ExpectedCall("all_reduce", size, "outputs of attention and feed-forward", calls, role="tensor")
    back = ExpectedCall("all_reduce", size, "gradients of their inputs", calls, role="tensor")
    shared = shared_heads(layers, batch, sequence, heads, element, ranks, backward, micro_batches)
    return [*([forward, back] if backward else [forward]), *shared]


def model_parallel(
    layers: int, batch: int, sequence: int, model: int, heads: int, element: int, ranks: int,
    backward: bool, micro_batches: int = 1,
) -> list[ExpectedCall]:  # fmt: skip
    """Return the calls of a step of the encoder divided as by Xiao and Ren.

    The heads' outputs are gathered and multiplied with a matrix sharded by its outputs. Per layer, with S = b s m e:
    forward 2 all_gathers (heads; outputs), backward (derived) a reduce_scatter (gradient of the heads) and an
    all_reduce (of the input); the feed-forward as in `tensor_parallel`.

    Wire: 4 S (n-1)/n forward, as in `tensor_parallel`; 5 S (n-1)/n backward.
    """
    if ranks == 1:
        return []
    size = batch // micro_batches * sequence * model * element
    calls = layers * micro_batches
    expected = [
        ExpectedCall("all_gather", size, "heads put together, and outputs of attention", 2 * calls, role="tensor"),
        ExpectedCall("all_reduce", size, "outputs of the feed-forward", calls, role="tensor"),
    ]
    if backward:
        expected += [
            ExpectedCall("reduce_scatter", size, "gradients of the heads' outputs", calls, role="tensor"),
            ExpectedCall("all_reduce", size, "gradients of the sub-layers' inputs", 2 * calls, role="tensor"),
        ]
    return [*expected, *shared_heads(layers, batch, sequence, heads, element, ranks, backward, micro_batches)]


def shared_heads(
    layers: int, batch: int, sequence: int, heads: int, element: int, ranks: int, backward: bool, micro_batches: int = 1
) -> list[ExpectedCall]:
    """Return the additional calls if there are more ranks than heads (derived).

    c = n/a ranks share a head, each a c-th of its features, and sum its scores: per layer an all_reduce of b s² e among
    the c ranks forward, and one of the weights' gradient backward.

    Wire: 4 b s² e (c-1)/c per layer. Payload and group size do not shrink with n: c grows.
    """
    if ranks <= heads:
        return []
    size = batch // micro_batches * sequence**2 * element
    calls = layers * micro_batches
    forward = ExpectedCall("all_reduce", size, "scores of a head that ranks share", calls, role="tensor")
    back = ExpectedCall("all_reduce", size, "gradients of that head's weights", calls, role="tensor")
    return [forward, back] if backward else [forward]


def pipeline(
    batch: int, sequence: int, model: int, element: int, stages: int, stage: int, backward: bool, micro_batches: int
) -> list[ExpectedCall]:
    """Return the calls of a step of one stage, for GPipe and 1F1B (1811.06965, 2104.04473).

    For each of M micro-batches a message of (b/M) s m e to the next stage, and one back with its gradient; the first
    stage has no previous stage and the last no next one.

    Wire: an inner stage sends b s m e forward and as much backward; all stages together 2 b s m e (p-1).
    """
    size = batch // micro_batches * sequence * model * element

    def message(op: str, cause: str) -> ExpectedCall:
        return ExpectedCall(op, size, cause, micro_batches, role="pipeline")

    calls = []
    if stage > 0:
        calls.append(message("recv", "activations"))
        calls += [message("send", "gradients")] if backward else []
    if stage < stages - 1:
        calls.append(message("send", "activations"))
        calls += [message("recv", "gradients")] if backward else []
    return calls

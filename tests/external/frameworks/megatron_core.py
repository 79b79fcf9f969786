"""A GPT of Megatron-Core in its own training loop: megatron_core.py TENSOR PIPELINE [VIRTUAL [EXPERT]].

With EXPERT ranks for experts, each layer has four of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import cuda_on_cpu
import torch
import torch.distributed as dist

cuda_on_cpu.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

VOCABULARY, LENGTH, MICRO_BATCHES = 128, 16, 4


def chunks(config: TransformerConfig, virtual: int) -> Iterator[DistributedDataParallel]:
    """Build this rank's parts of the model."""
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    for chunk in range(virtual):
        stage = None if virtual == 1 else chunk
        model = GPTModel(
            config, get_gpt_layer_local_spec(num_experts=config.num_moe_experts), VOCABULARY, LENGTH, vp_stage=stage,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=virtual == 1, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=virtual == 1, vp_stage=stage),
            share_embeddings_and_output_weights=True,
        )  # fmt: skip
        yield DistributedDataParallel(config, ddp, model)


def batches() -> Iterator[dict[str, torch.Tensor]]:
    """Yield the same batches in every run."""
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    while True:
        tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=generator)
        yield {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss, and what to report."""
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}


def forward_step(iterator: Any, model: Any) -> Any:
    """Run the model on the next batch."""
    batch = next(iterator)
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5
    return model(batch["tokens"], positions, mask, labels=batch["labels"]), partial(loss_of)


def main() -> None:
    """Train three steps, and evaluate after the second."""
    degrees = [int(value) for value in sys.argv[1:]]
    tensor, pipeline, virtual, expert = (*degrees, *(1, 1)[len(degrees) - 2 :])
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tensor, pipeline, virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        expert_model_parallel_size=expert,
    )  # fmt: skip
    torch.manual_seed(7)
    cuda_on_cpu.install_in_megatron()
    config = TransformerConfig(
        num_layers=4, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True, hidden_dropout=0.0,
        attention_dropout=0.0, pipeline_dtype=torch.float32, tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline, virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        bias_activation_fusion=False, masked_softmax_fusion=False, bias_dropout_fusion=False,
        gradient_accumulation_fusion=False, expert_model_parallel_size=expert,
        num_moe_experts=4 if expert > 1 else None, moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none", add_bias_linear=expert == 1,
    )  # fmt: skip
    model = list(chunks(config, virtual))
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, clip_grad=1.0, use_distributed_optimizer=False), model)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    schedule = get_forward_backward_func()
    iterators = [batches() for _ in model]
    common = {
        "forward_step_func": forward_step, "model": model if virtual > 1 else model[0],
        "data_iterator": iterators if virtual > 1 else iterators[0],
        "num_microbatches": MICRO_BATCHES, "seq_length": LENGTH, "micro_batch_size": 2,
    }  # fmt: skip
    for step in range(3):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = schedule(**common, forward_only=False)
        optimizer.step()
        if (
            losses
            and parallel_state.get_data_parallel_rank() == 0
            and parallel_state.get_tensor_model_parallel_rank() == 0
        ):
            mean = sum(part["loss"].item() for part in losses) / len(losses)
            print(f"losses {mean}\n", end="")  # one write, because several ranks print
        if step == 1:
            with torch.no_grad():
                schedule(**common, forward_only=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

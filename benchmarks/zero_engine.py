"""An engine of DeepSpeed's ZeRO as benchmarks use it: silent, and with an optimizer of torch."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any


def zero_engine(model: Any, optimizer: Any, *, stage: int, samples: int, **config: Any) -> Any:
    """Return the engine of a model, on the process group that exists.

    Args:
        model: The model.
        optimizer: Its optimizer.
        stage: Stage of ZeRO.
        samples: Samples of a micro-batch.
        config: Further keys of DeepSpeed's configuration.
    """
    import deepspeed

    compatible: Any = deepspeed.ops.__compatible_ops__
    compatible["deepspeed_shm_comm"] = False  # would be compiled
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed requires it
    deepspeed.utils.logger.setLevel("ERROR")
    settings = {
        "train_micro_batch_size_per_gpu": samples, "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True, "steps_per_print": 1_000_000, **config,
    }  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it builds
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    return engine

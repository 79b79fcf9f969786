"""Record what theory predicts for each GPT-NeoX configuration file, and the parameter count of its model.

    cd CHECKOUT-OF-GPT-NEOX
    PYTHONPATH=$TESTS/external/gpt_neox_cpu DS_ACCELERATOR=cpu python $TESTS/external/gpt_neox_files.py \\
        $TESTS/support/recorded/gpt_neox_files.json

GPT-NeoX's own code makes the model on the meta device: one tensor-parallel rank's parameters of all stages.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Final

WORLD: Final = 64
WITH: Final = {"llama": "llama/train_config", "llama2": "llama/train_config", "mistral": "llama/train_config"}
"""Directory of files that describe only a model -> file that describes its training."""
WITHOUT_MODEL: Final = (
    "cpu_mock_config", "docker/pythia-paths", "eleutherai_cluster", "local_setup", "local_setup_comet",
    "local_setup_wandb", "prof", "slurm_local", "sparse", "text_generation",
)  # fmt: skip
"""Files with paths, a cluster or settings, which complete a model's file."""
MODEL: Final = "125M"
VOCABULARY: Final = 32_000
"""Vocabulary size for tokenizers that define it only in their own file: llama's."""
_GPU_SETTINGS: Final = (
    "scaled_upper_triang_masked_softmax_fusion", "scaled_masked_softmax_fusion", "bias_gelu_fusion", "layernorm_fusion",
    "rope_fusion", "rmsnorm_fusion", "use_flashattn_swiglu",
)  # fmt: skip
sys.path.insert(0, ".")
_ENVIRONMENT: Final = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}


def sets_of_files(configs: Path) -> list[tuple[str, ...]]:
    """Return for each file the names of the files to combine."""
    sets: list[tuple[str, ...]] = []
    for path in sorted(configs.rglob("*.yml")):
        name = str(path.relative_to(configs).with_suffix(""))
        if name in WITHOUT_MODEL:
            sets.append((MODEL, name))
        elif name not in WITH.values():
            folder = path.relative_to(configs).parts[0]
            sets.append((name, WITH[folder]) if folder in WITH else (name,))
    return sets


def predicted(files: list[str], vocabulary: int | None = None) -> dict[str, Any]:
    """Return the scheme and parameter count according to theory, or why it refuses the files."""
    from commtrace.theory import NotPredictedError, predict
    from commtrace.theory.configs.job_plan import plan_job
    from commtrace.theory.configs.plan_options import PlanError, PlanOptions

    try:
        plan = plan_job(files, WORLD, PlanOptions(vocabulary=vocabulary))
        rows = plan.rows
        scheme = predict(rows[0]).scheme
    except (PlanError, NotPredictedError) as error:
        if vocabulary is None and "--vocabulary" in str(error):
            return predicted(files, VOCABULARY)
        text = str(error).rpartition(".yml: ")[2]  # "KEY is VALUE; REASON", or "KEY: REASON"
        key = re.split(r" is |: ", text, maxsplit=1)[0]
        return {"refused": f"{key}: {text.removeprefix(f'{key}: ').rpartition('; ')[2]}"}
    copies = (parameter.name.startswith("tied") for row in rows[1:] for parameter in row.parameters)
    sizes = [parameter.elements for row in rows for parameter in row.parameters]
    first = len(rows[0].parameters)
    tied = sum(size for size, is_copy in zip(sizes[first:], copies, strict=True) if is_copy)
    return {"scheme": scheme, "parameters": sum(sizes) - tied}


class _Tracker:
    def fork(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def prepare() -> None:
    """Make GPT-NeoX build its models on the meta device, in a job of one process."""
    os.environ.update(_ENVIRONMENT, MASTER_PORT=str(20_000 + os.getpid() % 20_000))
    import_module("pkg_resources")  # it patches torch.cuda
    import torch

    torch.cuda.current_device = lambda: "meta"  # type: ignore[assignment,return-value]
    torch.nn.Module.to = lambda self, *arguments, **named: self  # type: ignore[method-assign]
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
    from megatron import mpu

    mpu.layers.get_cuda_rng_tracker = _Tracker
    mpu.initialize_model_parallel(1, topology=PipeModelDataParallelTopology(1, 1, 1))


def real_parameters(files: list[str]) -> int:
    """Return the parameter count of GPT-NeoX's model, or raise what GPT-NeoX raises."""
    import torch
    import yaml
    from megatron import mpu
    from megatron.model.gpt2_model import GPT2ModelPipe
    from megatron.neox_arguments import NeoXArgs

    from commtrace.theory.configs.gpt_neox.program_config import VOCABULARIES

    config: dict[str, Any] = {}
    for name in files:
        config |= {key.replace("-", "_"): value for key, value in yaml.safe_load(Path(name).read_text()).items()}
    tensor, stages = (max(1, config.get(key, 0)) for key in ("model_parallel_size", "pipe_parallel_size"))
    for key in ("hostfile", "train_batch_size", "sliding_window_width"):
        config.pop(key, None)
    kinds = json.dumps(config.get("attention_config", [[["global"], "all"]])).replace("flash", "global")
    config |= {"attention_config": json.loads(kinds), "global_num_gpus": tensor * stages}
    settings = NeoXArgs.from_dict({**config, **dict.fromkeys(_GPU_SETTINGS, False)})
    multiple = settings.make_vocab_size_divisible_by * tensor
    ids = VOCABULARIES.get(settings.tokenizer_type.lower(), VOCABULARY)
    settings.padded_vocab_size = -(-ids // multiple) * multiple
    settings.fp32_allreduce = False
    mpu.set_model_parallel_world_size(tensor)
    mpu.set_model_parallel_rank(0)
    with torch.device("meta"):
        model = GPT2ModelPipe(settings, topology=mpu.get_topology())
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    """Write the JSON file named by the first argument."""
    prepare()
    entries = {}
    for names in sets_of_files(Path("configs")):
        files = [f"configs/{name}.yml" for name in names]
        entry = predicted(files)
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                entry["real"] = real_parameters(files)
        except Exception as error:
            entry["fails"] = " ".join(f"{type(error).__name__}: {error}".split())[:100]
        entries[" + ".join(names)] = entry
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    today = datetime.datetime.now(datetime.timezone.utc).date()
    document = {"commit": commit, "date": str(today), "world_size": WORLD, "files": entries}
    Path(sys.argv[1]).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

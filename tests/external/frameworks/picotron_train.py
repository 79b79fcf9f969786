"""picotron's unedited trainer on CPU ranks: picotron_train.py TENSOR CONTEXT PIPELINE DATA [resume].

PICOTRON_CHECKOUT names the checkout.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import cuda_on_cpu
import datasets
import huggingface_hub
import torch
import transformers
from trainer import tiny_llama
from trl_sft import tokenizer

CHECKOUT = os.environ["PICOTRON_CHECKOUT"]
STEPS = 4
ABSENT = (
    "wandb", "flash_attn", "flash_attn.flash_attn_interface", "flash_attn.layers", "flash_attn.layers.rotary",
    "flash_attn.ops", "flash_attn.ops.triton", "flash_attn.ops.triton.layer_norm",
)  # fmt: skip
"""Modules that picotron imports, and does not use here."""


def texts(*_: Any, **__: Any) -> datasets.Dataset:
    """Return the same texts in every run."""
    return datasets.Dataset.from_dict(
        {"text": [" ".join(str((7 * row + 3 * word) % 400) for word in range(64)) for row in range(128)]}
    )


def configuration(sizes: list[int], *, resumes: bool) -> dict[str, Any]:
    """Return picotron's settings: its template, on CPUs, for a tiny Llama."""
    template: dict[str, Any] = json.loads(Path(CHECKOUT, "template/base_config.json").read_text())
    names = ("tp_size", "cp_size", "pp_size", "dp_size")
    template["distributed"].update(zip(names, sizes, strict=True), backend="gloo", use_cpu=True)
    template["model"].update(
        name="llama", num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, use_fused_adam=False,
        use_flash_attention=False,
    )  # fmt: skip
    template["training"].update(
        total_train_steps=2 * STEPS if resumes else STEPS, seq_length=32, micro_batch_size=2, num_samples=128,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    saved = Path("saved", str(STEPS))
    template["checkpoint"].update(save_dir="saved", save_frequency=STEPS, load_path=str(saved) if resumes else "")
    template["environment"].update(FLASH_ATTEN="0", HF_TOKEN="none")
    return template


def main() -> None:
    """Train, with a checkpoint at the end."""
    *sizes, word = (*sys.argv[1:], "") if "resume" not in sys.argv else sys.argv[1:]
    folder = Path(f"llama-{os.environ['RANK']}")
    if not folder.exists():
        tiny_llama().save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        with contextlib.suppress(OSError):  # each rank of a dry run needs the files, one of a real run makes them
            shutil.copytree(folder, weights := Path(f"weights-{os.environ['RANK']}"))
            weights.rename("hf_model_safetensors")
    settings = configuration([int(size) for size in sizes], resumes=bool(word))
    settings["model"]["name"] = str(folder)
    path = Path(f"settings-{os.environ['RANK']}.json")
    path.write_text(json.dumps(settings))
    for name in ABSENT:
        module: Any = ModuleType(name)
        module.flash_attn_func = module.apply_rotary_emb = module.layer_norm_fn = None
        sys.modules[name] = module
    datasets.load_dataset = texts
    hub: Any = huggingface_hub
    hub.snapshot_download = lambda *_, **__: None  # it is there
    # As in transformers 4, for which picotron was written.
    transformers.LlamaConfig.rope_theta = property(lambda config: config.rope_parameters["rope_theta"])
    transformers.PreTrainedTokenizerFast.batch_encode_plus = transformers.PreTrainedTokenizerFast.__call__
    torch.set_num_threads(1)
    cuda_on_cpu.install()
    library: Any = torch
    library.cuda.memory_reserved = lambda *_: 0
    sys.path.insert(0, CHECKOUT)
    sys.argv = ["train.py", "--config", str(path)]
    runpy.run_path(str(Path(CHECKOUT, "train.py")), run_name="__main__")


if __name__ == "__main__":
    main()

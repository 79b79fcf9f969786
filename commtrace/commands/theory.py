"""Predict what a training run will communicate, from its configuration alone.

CONFIG is a GPT-NeoX YAML file or the name of a built-in model (13B), a
DeepSpeed JSON file, a Hugging Face config.json, or the last two together. A
DeepSpeed JSON file alone does not describe the model: add --layers, --hidden
and --vocabulary. The command runs no training and needs neither torch nor
DeepSpeed, only the extra `theory` (PyYAML, pydantic):
`commtrace theory 13B --world-size 1024`.

The output has two predictions, the closed form and the expected calls of the
frameworks (with bounds, if payloads depend on the data), and the differences
between them.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .option_types import add_shared, positive_integer

if TYPE_CHECKING:
    from commtrace.theory.configs.plan_options import PlanOptions


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    help_text = "configuration file; later GPT-NeoX files override earlier ones"
    parser.add_argument("config", metavar="CONFIG", nargs="+", help=help_text)
    add_shared(parser, "--world-size", "--json")
    add_shared(parser, "--network", purpose="also predict communication times on a network")
    add_options(parser, parser.add_argument_group("model, if no file describes it"))


def run(arguments: argparse.Namespace) -> int:
    """Print the predictions."""
    import json

    from commtrace.network.networks import open_network
    from commtrace.theory.forecast.predicted_volumes import forecast, json_document
    from commtrace.theory.forecast.text_report import json_times, text_lines, text_times

    network = None if arguments.network is None else open_network(arguments.network)
    job = forecast(arguments.config, arguments.world_size, options_of(arguments))
    if arguments.json:
        times = {} if network is None else json_times(job, network)
        print(json.dumps({**json_document(job), **times}, indent=1))
    else:
        print(*text_lines(job), *(() if network is None else text_times(job, network)), sep="\n")
    return 0


def add_options(training: argparse._ActionsContainer, model: argparse._ActionsContainer) -> None:
    """Add the options that complete the configuration files: training settings and the shape of the model."""
    add = training.add_argument
    add("--engine", choices=("deepspeed", "ddp", "fsdp"),
        help="training engine (default: from the files; ddp for a Hugging Face file alone)")  # fmt: skip
    add("--zero-stage", type=int, choices=(0, 1, 2, 3), help="ZeRO stage")
    add("--precision", choices=("fp32", "bf16", "fp16"), help="precision of parameters and gradients")
    add("--micro-batch", metavar="N", type=positive_integer, help="sequences per rank in a micro-batch")
    add("--gradient-accumulation", metavar="N", type=positive_integer, dest="accumulation",
        help="micro-batches per step")  # fmt: skip
    add = model.add_argument
    add("--layers", metavar="N", type=positive_integer, help="number of transformer layers")
    add("--hidden", metavar="N", type=positive_integer, help="hidden size")
    add("--vocabulary", metavar="N", type=positive_integer, help="vocabulary size, including padding")
    add("--tied", action="store_true", help="tie the output layer's weight to the embedding")
    add(
        "--groups", type=int, choices=(1, 2), default=2,
        help="number of parameter groups of the optimizer; 2: biases and norms form a second group, without weight "
        "decay (default: %(default)s)")  # fmt: skip


def options_of(arguments: argparse.Namespace) -> PlanOptions:
    """Return the values of the options that `add_options` added, as PlanOptions."""
    from dataclasses import fields

    from commtrace.theory.configs.plan_options import PlanOptions

    return PlanOptions(**{field.name: getattr(arguments, field.name) for field in fields(PlanOptions)})

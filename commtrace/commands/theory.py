"""`commtrace theory`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from commtrace.theory.configs.job_plan import Options


class Command:
    """Predict what a training will communicate, from its configuration alone.

    CONFIG is a GPT-NeoX YAML file or the name of a shipped one (13B), a DeepSpeed JSON, a Hugging Face config.json, or
    the latter two together. A DeepSpeed JSON alone says nothing of the model: add --layers, --hidden and --vocabulary.
    Nothing is run, and neither torch nor DeepSpeed is needed: `commtrace theory 13B --world 1024`.

    Two predictions are shown: the closed form of the literature, and every call that the frameworks will make, with
    what leads from one to the other.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        parser.add_argument(
            "config", metavar="CONFIG", nargs="+", help="configuration files; of GPT-NeoX's later ones win"
        )
        parser.add_argument("--world", metavar="N", type=_whole, required=True, help="ranks of the whole job")
        parser.add_argument("--json", action="store_true", help="one JSON document with exact numbers")
        parser.add_argument(
            "--network",
            metavar="NET",
            help="times on this network, too: a file of commtrace bench or a description, or the name of a shipped one "
            "(slingshot-11, ndr-infiniband)",
        )
        add_options(parser, parser.add_argument_group("the model, where no file has it"))

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the predictions."""
        import json

        from commtrace.network.networks import open_network
        from commtrace.theory.forecast.predicted_volumes import document, forecast
        from commtrace.theory.forecast.text_report import lines, network_document, network_lines

        network = None if arguments.network is None else open_network(arguments.network)
        found = forecast(arguments.config, arguments.world, options_of(arguments))
        if arguments.json:
            print(
                json.dumps(
                    {**document(found), **({} if network is None else network_document(found, network))}, indent=1
                )
            )
        else:
            print(*lines(found), *(() if network is None else network_lines(found, network)), sep="\n")
        return 0


def add_options(general: argparse._ActionsContainer, figures: argparse._ActionsContainer) -> None:
    """What the files may leave open: settings, and the model's figures."""
    add = general.add_argument
    add(
        "--engine",
        choices=("deepspeed", "ddp", "fsdp"),
        help="what trains (as the files say; a Hugging Face file alone: ddp)",
    )
    add("--zero-stage", type=int, choices=(0, 1, 2, 3), help="ZeRO's stage")
    add("--precision", choices=("fp32", "bf16", "fp16"))
    add("--micro-batch", metavar="N", type=_whole, help="sequences of one rank in one micro-batch")
    add("--gradient-accumulation", metavar="N", type=_whole, help="micro-batches of one step")
    figures.add_argument("--layers", metavar="N", type=_whole)
    figures.add_argument("--hidden", metavar="N", type=_whole, help="width")
    figures.add_argument("--vocabulary", metavar="N", type=_whole, help="rows of the embedding, with padding")
    figures.add_argument("--tied", action="store_true", help="the head uses the embedding's matrix")
    figures.add_argument(
        "--groups",
        type=int,
        choices=(1, 2),
        default=2,
        help="groups of the optimizer; 2: biases and norms, which are not decayed, are one of their own (2)",
    )


def options_of(arguments: argparse.Namespace) -> Options:
    """Those of the command line."""
    from commtrace.theory.configs.job_plan import Options

    return Options(
        arguments.engine,
        arguments.zero_stage,
        arguments.precision,
        arguments.micro_batch,
        arguments.gradient_accumulation,
        arguments.layers,
        arguments.hidden,
        arguments.vocabulary,
        arguments.tied,
        arguments.groups,
    )


def _whole(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)

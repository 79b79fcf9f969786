"""`commtrace theory`: predictions from configuration files, and errors for wrong files and values."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml")

from commtrace.cli import main
from commtrace.theory.configs import hugging_face
from commtrace.theory.configs.gpt_neox import planning
from commtrace.theory.configs.gpt_neox.config import NeoxConfig
from commtrace.theory.configs.gpt_neox.program_config import ProgramConfig
from commtrace.theory.forecast import PlanError, PlanOptions, forecast
from commtrace.theory.forecast.predicted_volumes import (
    json_document,
    size_bin_rows,
    size_rows,
    volume_rows,
    waterfall_rows,
)
from commtrace.theory.model_shapes import ModelShape, ModuleSpec, gpt_neox_model, model_lists
from commtrace.theory.rules import schemes

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
}
ZERO_3 = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}


def write(folder: Path, content: Any, name: str = "config.json") -> str:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def count(model: ModuleSpec) -> int:
    total = 0
    for parameter in model_lists(model, "float32").parameters:
        product = 1
        for size in parameter.shape:
            product *= size
        total += product
    return total


# Parameter counts that the authors of the models publish, or that transformers prints.
@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (LLAMA, 6_738_415_616),
        (
            {**LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256},
            8_030_261_248,
        ),
        (
            {**LLAMA, "model_type": "mistral", "intermediate_size": 14336, "num_key_value_heads": 8},
            7_241_732_096,
        ),
        (
            {
                **LLAMA,
                "model_type": "qwen2",
                "hidden_size": 3584,
                "intermediate_size": 18944,
                "num_attention_heads": 28,
                "num_hidden_layers": 28,
                "num_key_value_heads": 4,
                "vocab_size": 152064,
            },
            7_615_616_512,
        ),
        (
            {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257},
            124_439_808,
        ),
        (
            {
                "model_type": "gpt_neox",
                "hidden_size": 6144,
                "intermediate_size": 24576,
                "num_attention_heads": 64,
                "num_hidden_layers": 44,
                "vocab_size": 50432,
            },
            20_554_567_680,
        ),
    ],
)
def test_models_have_the_parameters_that_they_are_known_for(config: dict[str, Any], parameters: int) -> None:
    assert count(hugging_face.model(config)) == parameters


@pytest.mark.parametrize(("tensor", "layers", "hidden", "vocabulary"), [(1, 6, 512, 50304), (2, 4, 64, 512)])
def test_gpt_neox_has_the_parameters_that_it_counts(tensor: int, layers: int, hidden: int, vocabulary: int) -> None:
    total = 2 * vocabulary * hidden + layers * (12 * hidden**2 + 13 * hidden) + 2 * hidden
    shared = layers * 6 * hidden + 2 * hidden  # norms, and the biases of row-parallel layers
    assert (
        count(gpt_neox_model(ModelShape(layers, hidden, vocabulary, tensor=tensor)))
        == (total - shared) // tensor + shared
    )
    tied = count(gpt_neox_model(ModelShape(layers, hidden, vocabulary, tied=True, tensor=tensor)))
    assert tied == (total - shared - vocabulary * hidden) // tensor + shared


def test_a_gpt_neox_file_by_hand() -> None:
    """19M in fp16, ZeRO-1: 70,426,624 parameters in one bucket, gathered in two groups padded to 2d elements."""
    predicted = forecast(["19M"], 8)
    rows = {row["op"]: row for row in volume_rows(predicted) if row["when"] == "steps from 0"}
    parameters = 70_426_624
    assert json_document(predicted)["parameters"] == parameters
    scalars = 1 + 2 * 4  # the overflow check, and a norm for each group of the optimizer
    assert rows["all_reduce"]["payload_bytes"] == 2 * parameters + scalars
    assert rows["all_gather"]["calls"] == 2
    assert 2 * parameters <= rows["all_gather"]["payload_bytes"] < 2 * parameters + 2 * 2 * 16
    assert rows["all"]["wire_bytes"] == pytest.approx(3 * 2 * parameters * 7 / 8, abs=200)
    assert rows["all"]["all_ranks_wire_bytes"] == pytest.approx(8 * rows["all"]["wire_bytes"])
    form = json_document(predicted)["closed_form"]
    assert form["wire_bytes"] == 2 * 2 * parameters * 7 / 8


CONFIGS: list[tuple[list[Any], PlanOptions]] = [
    (["tiny"], PlanOptions()),
    (["tiny"], PlanOptions(engine="ddp", precision="bf16")),
    (["tiny", {"model_parallel_size": 2}], PlanOptions(zero_stage=1, accumulation=3)),
    ([LLAMA], PlanOptions()),
    ([LLAMA, ZERO_3], PlanOptions()),
    ([ZERO_3], PlanOptions(layers=3, hidden=64, vocabulary=512)),
    ([ZERO_3], PlanOptions(layers=3, hidden=64, vocabulary=512, zero_stage=2, groups=1, tied=True)),
]


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_all_tables_say_the_same(number: int, tmp_path: Path) -> None:
    """Bytes by operation, by size and by bin have equal sums; the waterfall ends at the wire bytes of a steady step."""
    contents, options = CONFIGS[number]
    names = [
        content
        if isinstance(content, str)
        else write(tmp_path, content, f"{index}.{'yml' if index and contents[0] == 'tiny' else 'json'}")
        for index, content in enumerate(contents)
    ]
    predicted = forecast(names, 4, options)
    last = [row for row in volume_rows(predicted) if row["when"].startswith("steps from")]
    by_operation, total = last[:-1], last[-1]
    for name in ("calls", "payload_bytes"):
        assert sum(row[name] for row in by_operation) == total[name]
    assert sum(row["sum_bytes"] for row in size_rows(predicted)) == total["payload_bytes"]
    assert sum(row["sum_bytes"] for row in size_bin_rows(predicted)) == total["payload_bytes"]
    assert sum(row["calls"] for row in size_bin_rows(predicted)) == total["calls"]
    assert all(
        row["from_bytes"] <= row["sum_bytes"] / row["calls"] < row["below_bytes"] for row in size_bin_rows(predicted)
    )
    assert sum(row["wire_bytes"] for row in waterfall_rows(predicted)) == pytest.approx(total["wire_bytes"])
    json.dumps(json_document(predicted))


def test_the_trainer_s_auto(tmp_path: Path) -> None:
    """Hugging Face's Trainer replaces "auto" with sizes that follow from the hidden size of the model."""
    zero = {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    zero["stage3_param_persistence_threshold"] = "auto"
    auto = {**ZERO_3, "zero_optimization": zero, "gradient_clipping": "auto", "train_batch_size": "auto"}
    row = forecast([write(tmp_path, LLAMA, "a.json"), write(tmp_path, auto, "b.json")], 8).plan.row
    assert row.zero.reduce_bucket_size == 4096**2
    assert row.zero.prefetch_bucket_size == int(0.9 * 4096**2)
    assert row.zero.param_persistence_threshold == 40960
    assert row.gradient_clipping == 1.0


@pytest.mark.parametrize(
    ("contents", "options", "message"),
    [
        (
            [{"zero_optimization": {"stage": 1}}],
            PlanOptions(),
            "no file describes the model; add --layers, --hidden",
        ),
        ([LLAMA, LLAMA], PlanOptions(), "more than one Hugging Face model"),
        ([LLAMA], PlanOptions(layers=3), "leave out --layers"),
        ([{**LLAMA, "model_type": "t5"}], PlanOptions(), "models of type t5 have no rules yet"),
        ([{**LLAMA, "num_hidden_layers": 2.5}], PlanOptions(), "num_hidden_layers in the model's configuration is 2.5"),
        (["[]"], PlanOptions(), "an object of keys and values"),
        (["{"], PlanOptions(), "not readable as JSON"),
        ([LLAMA, {**ZERO_3, "train_batch_size": 7}], PlanOptions(), "train_batch_size 7 is not"),
        (
            [LLAMA, {"zero_optimization": {"stage": 1, "reduce_bucket_size": "x"}}],
            PlanOptions(),
            "reduce_bucket_size is 'x'",
        ),
        ([LLAMA, {"zero_optimization": {"stage": 5}}], PlanOptions(), "ZeRO's stages are 0 to 3"),
        ([LLAMA, {"zero_optimization": {"stage": 2, "overlap_comm": "auto"}}], PlanOptions(), '"auto"'),
        ([LLAMA, {"zero_optimization": 3}], PlanOptions(), "is a block of keys and values"),
        (
            [LLAMA, {**ZERO_3, "optimizer": {"type": "OneBitAdam"}}],
            PlanOptions(),
            "the optimizer OneBitAdam has no rules",
        ),
        (
            [LLAMA, {"fp16": {"enabled": True}, "bf16": {"enabled": True}}],
            PlanOptions(),
            "fp16 and bf16 are both enabled",
        ),
        (["tiny", LLAMA], PlanOptions(), "a GPT-NeoX file describes all"),
        (["nowhere.yml"], PlanOptions(), "nowhere.yml: no such file"),
        (
            [LLAMA, {"zero_optimization": {"stage": 3, "mics_shard_size": 8}}],
            PlanOptions(),
            "MiCS was removed from DeepSpeed; 0.19.8 rejects it",
        ),
    ],
)
def test_what_is_no_job_is_said(contents: list[Any], options: PlanOptions, message: str, tmp_path: Path) -> None:
    names = [
        content if isinstance(content, str) and content[0] not in "[{" else write(tmp_path, content, f"{index}.json")
        for index, content in enumerate(contents)
    ]
    with pytest.raises(PlanError) as error:
        forecast(names, 4, options)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("keys", "engine", "message"),
    [
        ({"context_parallel_size": 4}, "fsdp", "GPT-NeoX has no FSDP"),
        ({"context_parallel_size": 4}, "ddp", "no rules for context parallelism"),
        ({"sequence_parallel_size": 4}, "ddp", "sequence_parallel_size is DeepSpeed's"),
        ({"moe_num_experts": 4}, "ddp", "experts are DeepSpeed's"),
        ({"model_parallel_size": 2, "sequence_parallel": True}, "fsdp", "GPT-NeoX has no FSDP"),
        ({"fsdp": {"shard_size": 2}}, "fsdp", "leave out the block fsdp"),
    ],
)
def test_what_the_engine_cannot_train_is_not_predicted(
    keys: dict[str, Any], engine: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that the engine does not support are an error, because a prediction without them would be wrong."""
    # Other tests may have registered the rules of the example.
    monkeypatch.delitem(schemes.EXTENSIONS, "context", raising=False)
    monkeypatch.setitem(planning.ENGINE_ROWS, "fsdp", planning.EngineRows(NeoxConfig, planning._fsdp_rows))
    with pytest.raises(PlanError, match=message):
        forecast(["tiny", write(tmp_path, keys, "keys.yml")], 8, PlanOptions(engine=engine))


def test_a_gpt_neox_file_needs_no_settings_of_the_optimization(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(planning.ENGINE_ROWS, "deepspeed", planning.EngineRows(ProgramConfig, planning._program_rows))
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "pos_emb": "rotary"}
    given = write(tmp_path, {**sizes, "optimizer": {"type": "adam", "params": {"lr": "any"}}}, "sizes.yml")
    assert forecast([given], 4).prediction.scheme == "ZeRO-0"


def test_ranks_that_the_job_does_not_divide(tmp_path: Path) -> None:
    cut = write(tmp_path, {"model_parallel_size": 4}, "cut.yml")
    with pytest.raises(PlanError, match="model_parallel_size: 4 does not divide the 6 ranks"):
        forecast(["tiny", cut], 6)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["theory", "tiny", "--world-size", "4", "--zero-stage", "3"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("ZeRO-3 on 4 ranks: ")
    assert "equation 3: 3 P (d-1)/d" in text
    assert main(["theory", "tiny", "--world-size", "4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["scheme"], document["world_size"]) == ("ZeRO-1", 4)
    assert main(["theory", "nowhere.yml", "--world-size", "4"]) == 2
    assert capsys.readouterr().err.startswith("commtrace: nowhere.yml: no such file")


@pytest.mark.parametrize(
    "arguments", [["tiny"], ["--world-size", "2"], ["tiny", "--world-size", "0"], ["tiny", "--world-size", "x"]]
)
def test_wrong_arguments(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["theory", *arguments])
    assert exit_.value.code == 2


def test_neither_torch_nor_deepspeed_is_imported() -> None:
    code = (
        "import sys; from commtrace.cli import main; main(['theory', 'tiny', '--world-size', '2']);"
        "print(sorted({'torch', 'deepspeed'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=tempfile.gettempdir()
    )
    assert done.stdout.splitlines()[-1] == "[]"

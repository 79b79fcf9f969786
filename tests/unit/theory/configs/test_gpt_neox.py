"""GPT-NeoX configuration files as users write them, and errors in them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("yaml")
pytest.importorskip("torch")

from commtrace.theory.configs.gpt_neox.engine_settings import deepspeed_config
from commtrace.theory.configs.gpt_neox.yaml_files import BUILT_IN
from examples.gpt_neox import ConfigError, TrainingConfig, load_config
from examples.gpt_neox.options import arguments, overrides
from examples.gpt_neox.schedule import learning_rate


def write(folder: Path, text: str, name: str = "given.yml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def with_lines(folder: Path, *lines: str) -> TrainingConfig:
    """Return the tiny configuration, overridden by a file with these lines."""
    return load_config(["tiny", write(folder, "\n".join(lines))])


def test_dashes_and_underscores_are_the_same(tmp_path: Path) -> None:
    config = with_lines(tmp_path, '"num-layers": 3', '"gpt-j-residual": true')
    assert (config.num_layers, config.gpt_j_residual) == (3, True)
    assert config.unknown_keys == ()


@pytest.mark.parametrize(("written", "value"), [("1e-8", 1e-8), ("1e-08", 1e-8), ("1.0e-8", 1e-8), ('"1e-8"', 1e-8)])
def test_numbers_that_yaml_takes_for_text(tmp_path: Path, written: str, value: float) -> None:
    config = with_lines(tmp_path, f"layernorm_epsilon: {written}", f"optimizer: {{params: {{eps: {written}}}}}")
    assert config.layernorm_epsilon == value
    assert config.eps == value


def test_words_that_only_look_like_numbers_stay_words(tmp_path: Path) -> None:
    assert with_lines(tmp_path, "tokenizer_type: bytes", "run-name: 1e").unknown_keys == ("run_name",)


def test_whole_numbers_in_exponent_notation(tmp_path: Path) -> None:
    config = with_lines(tmp_path, "train_iters: 1e3", "zero_optimization: {reduce_bucket_size: 5e8}")
    assert config.train_iters == 1000
    assert config.zero_optimization["reduce_bucket_size"] == 5e8


def test_later_files_win_and_blocks_are_merged(tmp_path: Path) -> None:
    first = write(tmp_path, "num-layers: 3\nhidden_size: 128", "first.yml")
    second = write(tmp_path, "num_layers: 5\nzero_optimization: {stage: 3}", "second.yml")
    config = load_config(["tiny", first, second], {"hidden_size": 64, "seed": None})
    assert (config.num_layers, config.hidden_size, config.seed) == (5, 64, 1234)
    assert config.zero_stage == 3
    assert config.zero_optimization["overlap_comm"] is True


def test_options_are_settings() -> None:
    line = "--zero-stage 2 --train-iters 3 --seq-length 16 --checkpoint non-reentrant --vocab words --precision bf16"
    options = arguments().parse_args(["tiny", *line.split()])
    config = load_config(options.configs, overrides(options))
    assert (config.zero_stage, config.train_iters, config.lr_decay_iters, config.seq_length) == (2, 3, 3, 16)
    assert (config.checkpoint_activations, config.checkpoint_reentrant) == (True, False)
    assert (config.padded_vocab_size, config.precision) == (50304, "bf16")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("num_layers: many", ["num_layers", "'many'", "whole number"]),
        ("num_layers: 2.5", ["num_layers", "2.5", "whole number"]),
        ("hidden_size: 100\nnum_attention_heads: 8", ["hidden_size", "100", "multiple of num_attention_heads", "8"]),
        ("rotary_pct: 0.01", ["rotary_pct", "0.01", "even"]),
        ("max_position_embeddings: 8", ["max_position_embeddings", "8", "at least seq_length"]),
        ("norm: rmsnorm", ["norm", "rmsnorm", "layernorm"]),
        ("pos_emb: alibi", ["pos_emb", "alibi", "rotary"]),
        ("model_parallel_size: 3", ["model_parallel_size", "divide num_attention_heads", "4"]),
        ("model_parallel_size: 2\nattention_dropout: 0.1", ["attention_dropout", "0.1", "set it to 0"]),
        ("pipe-parallel-size: 3", ["pipe_parallel_size", "3", "num_layers is 2"]),
        ("pipe-parallel-size: 2\nzero_optimization: {stage: 3}", ["zero_optimization", "ZeRO-0 and ZeRO-1"]),
        ("pipe_partition_method: profile", ["pipe_partition_method", "profile", "uniform"]),
        ("model_parallel_size: 2\nsequence_parallel: true\nhidden_dropout: 0.1", ["hidden_dropout", "set it to 0"]),
        (
            "model_parallel_size: 2\nsequence_parallel: true\nseq_length: 31",
            ["sequence_parallel", "model_parallel_size, which is 2, must divide seq_length", "31"],
        ),
        ("sequence_parallel_size: 3", ["sequence_parallel_size", "divide seq_length", "32"]),
        ("sequence_parallel_size: 8", ["sequence_parallel_size", "divide num_attention_heads", "4"]),
        ("sequence_parallel_size: 2\nmodel_parallel_size: 2", ["sequence_parallel_size", "together with model_par"]),
        ("context_parallel_size: 5", ["context_parallel_size", "divide seq_length", "32"]),
        ("context_parallel_size: 2\nattention_dropout: 0.1", ["attention_dropout", "0.1", "set it to 0"]),
        ("moe_num_experts: 6\nmoe_expert_parallel_size: 4", ["moe_expert_parallel_size", "must divide", "6"]),
        ("num_experts: 2\nmoe_top_k: 3", ["moe_top_k", "num_experts", "2"]),
        ("moe_num_experts: 2\ncontext_parallel_size: 2", ["context_parallel_size", "together with experts"]),
        ("moe_num_experts: 2\nmoe_type: megablocks", ["moe_type", "deepspeed"]),
        ("pipe-parallel-size: 2\nsequence_parallel_size: 2", ["sequence_parallel_size", "pipe_parallel_size"]),
        ("zero_optimization: {stage: 4}", ["zero_optimization", "0, 1, 2 or 3"]),
        ("optimizer: {type: sm3}", ["optimizer.type", "sm3", "adam"]),
        ("optimizer: {params: {betas: 0.9}}", ["optimizer.params.betas", "0.9", "2 numbers"]),
        ("no_weight_tying: 1", ["no_weight_tying", "true or false"]),
        ("precision: int8", ["precision", "int8", "fp32"]),
        ("attention_config: [[[local], 2]]", ["attention_config", "causal"]),
        ("split: '0,1,1'", ["split", "must not be 0"]),
        ("warmup: .nan", ["warmup", "nan"]),
        ("num-layers: 1\nnum_layers: 2", ["num_layers", "twice"]),
    ],
)
def test_errors_name_file_key_value_and_mend(tmp_path: Path, line: str, expected: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        with_lines(tmp_path, line)
    for word in ["given.yml", *expected]:
        assert word in str(caught.value)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_layers is not set"):
        load_config([write(tmp_path, "pos_emb: rotary\ntrain_iters: 1")])


def test_a_missing_file_lists_the_shipped_ones() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yml.*125M\.yml"):
        load_config(["nowhere.yml"])


@pytest.mark.parametrize("text", ["- a\n- b", "{unclosed: 1", ""])
def test_files_that_are_no_settings(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"given\.yml"):
        load_config([write(tmp_path, text)])


def test_unknown_keys_are_listed(tmp_path: Path) -> None:
    config = with_lines(tmp_path, "save-interval: 10", "hostfile: /nowhere")
    assert config.unknown_keys == ("hostfile", "save_interval")


@pytest.mark.parametrize("path", sorted(BUILT_IN.glob("*.yml")), ids=lambda path: path.name)
def test_shipped_files_are_understood_completely(path: Path) -> None:
    assert load_config([str(path)]).unknown_keys == ()


def test_vocabulary_padding_for_tensor_parallel_ranks() -> None:
    config = load_config(["125M"])
    sizes = [config.model_copy(update={"model_parallel_size": mp}).padded_vocab_size for mp in (1, 2, 4, 8)]
    assert sizes == [50304, 50432, 50688, 51200]


@pytest.mark.parametrize(
    ("lines", "shape"),
    [
        (["train_micro_batch_size_per_gpu: null"], (1, 1)),
        (["gas: 3"], (4, 3)),
        (["train_batch_size: 16"], (4, 2)),
        (["train_micro_batch_size_per_gpu: null", "train_batch_size: 16"], (8, 1)),
    ],
)
def test_batch_sizes_complete_each_other(tmp_path: Path, lines: list[str], shape: tuple[int, int]) -> None:
    assert with_lines(tmp_path, *lines).batch_shape(2) == shape


def test_ranks_that_tensor_parallelism_does_not_divide(tmp_path: Path) -> None:
    config = with_lines(tmp_path, "model-parallel-size: 2")
    assert config.data_parallel(6) == 3
    with pytest.raises(ConfigError, match=r"given\.yml: model_parallel_size: 2 does not divide the 5 ranks"):
        config.data_parallel(5)


def test_batch_sizes_that_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"given\.yml: train_batch_size: 6"):
        with_lines(tmp_path, "train_batch_size: 6").batch_shape(2)


def test_what_deepspeed_gets() -> None:
    settings = deepspeed_config(load_config(["19M"]), 4, 2, verbose=False)
    assert settings["train_micro_batch_size_per_gpu"] == 4
    assert settings["gradient_accumulation_steps"] == 2
    assert settings["gradient_clipping"] == 1.0
    assert settings["zero_optimization"]["stage"] == 1
    assert settings["zero_optimization"]["reduce_bucket_size"] == 500_000_000
    assert settings["fp16"]["enabled"] is True
    assert settings["fp16"]["initial_scale_power"] == 12


def test_fp32_allreduce_reaches_deepspeed(tmp_path: Path) -> None:
    config = with_lines(tmp_path, "precision: bfloat16", "fp32_allreduce: true")
    settings = deepspeed_config(config, 1, 1, verbose=False)
    assert settings["communication_data_type"] == "fp32"
    assert settings["bf16"] == {"enabled": True}


def test_learning_rate_warms_up_and_decays(tmp_path: Path) -> None:
    config = with_lines(tmp_path, "train_iters: 100", "lr_decay_iters: 100", "warmup: 0.1", "min_lr: 0.0003")
    rates = [learning_rate(config, step) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.0003)
    assert max(rates) == rates[9] == pytest.approx(0.003)
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert min(rates) >= 0.0003

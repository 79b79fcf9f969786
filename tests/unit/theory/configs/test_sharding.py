"""Sharding in configurations, and installation and removal of the hooks for FSDP2 and DTensor."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("yaml")

from commtrace.theory.configs import torch_job_rows
from commtrace.theory.forecast import PlanError, PlanOptions, forecast
from commtrace.theory.forecast.predicted_volumes import volume_rows
from examples.gpt_neox import ConfigError, TrainingConfig, load_config
from examples.gpt_neox.theory import register

LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "vocab_size": 1000,
}


def write(folder: Path, content: Any, name: str = "given.yml") -> str:
    """Write a JSON file and return its path."""
    path = folder / name
    path.write_text(json.dumps(content))
    return str(path)


def configured(folder: Path, **keys: Any) -> TrainingConfig:
    """Return the tiny configuration with these keys."""
    return load_config(["tiny", write(folder, keys)])


def test_the_block_of_fsdp(tmp_path: Path) -> None:
    fsdp = configured(tmp_path, fsdp={"reshard_after_forward": 2, "shard_size": 4, "sequence_parallel": True}).fsdp
    assert (fsdp.reshard_after_forward, fsdp.shard_size, fsdp.sequence_parallel) == (2, 4, True)
    assert (fsdp.sync_every_micro_batch, fsdp.reshard_after_backward) == (False, True)
    assert fsdp.shards(8) == 4
    assert configured(tmp_path).fsdp.shards(8) == 8
    assert configured(tmp_path, fsdp={"reshard_after_forward": False}).fsdp.reshard_after_forward is False


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"shard_size": 3}, "fsdp.shard_size: 3 does not divide the 8 data-parallel ranks"),
        ({"reshard_after_forward": 3}, "fsdp.reshard_after_forward: 3 is neither true, nor false, nor a divisor"),
        ({"reshard_after_forward": 8}, "fsdp.reshard_after_forward: 8 is neither"),
        (
            {"reshard_after_forward": "often"},
            "fsdp.reshard_after_forward is 'often'; it must be true, false, or a whole number",
        ),
        ({"shards": 2}, "unknown keys: shards; leave them out"),
        (3, "it must be a block of keys and values"),
    ],
)
def test_what_the_block_cannot_be(block: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        configured(tmp_path, fsdp=block).fsdp.shards(8)
    assert message in str(error.value)


@pytest.mark.parametrize("key", ["mics_shard_size", "mics_hierarchical_params_gather"])
def test_mics_is_refused_in_deepspeed_s_words(key: str, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    from examples.gpt_neox.deepspeed_engine import check_zero_block

    config = configured(tmp_path, zero_optimization={"stage": 3, key: 2})
    with pytest.raises(ConfigError, match=f"MiCS ZeRO-3 sharding has been removed; 'zero_optimization.{key}'"):
        check_zero_block(config)


def test_quantization_without_a_gpu_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    import torch

    from examples.gpt_neox.deepspeed_engine import check_quantization

    config = configured(tmp_path, zero_optimization={"stage": 3, "zero_quantized_weights": True})
    with pytest.raises(ConfigError, match="zero_quantized_weights needs a GPU"):
        check_quantization(config, torch.device("cpu"))
    check_quantization(config, torch.device("cuda"))


@pytest.mark.parametrize(("torch", "reduced"), [((2, 14), 2), ((2, 15), 4)])
def test_a_hugging_face_model_under_fully_shard(
    torch: tuple[int, int], reduced: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computed by hand: four layers are gathered twice and the root module once, without padding.

    Gradients are reduced in bf16, and since torch 2.15 in the type of the parameters.
    """
    monkeypatch.setattr(torch_job_rows, "version_in_use", lambda *_: torch)
    layer = 4 * 512**2 + 3 * 512 * 1376 + 2 * 512
    root = 2 * 1000 * 512 + 512
    predicted = forecast([write(tmp_path, LLAMA, "config.json")], 8, PlanOptions(engine="fsdp", precision="bf16"))
    rows = {row["op"]: row for row in volume_rows(predicted) if row["when"] == "steps from 0" and row["op"] != "all"}
    assert {op: row["calls"] for op, row in rows.items()} == {"all_gather": 9, "reduce_scatter": 5}
    assert rows["all_gather"]["payload_bytes"] == 2 * (8 * layer + root)
    assert rows["reduce_scatter"]["payload_bytes"] == reduced * (4 * layer + root)
    assert predicted.prediction.closed_form.bytes == 3 * 4 * (4 * layer + root) * 7 / 8


def test_hpz_and_fsdp_of_a_gpt_neox_file(tmp_path: Path) -> None:
    hpz = write(tmp_path, {"zero_optimization": {"zero_hpz_partition_size": 4}})
    assert forecast(["13B", hpz], 1024, PlanOptions(zero_stage=3)).prediction.scheme == "ZeRO-3, hpZ within 4 ranks"
    register()
    cut = write(tmp_path, {"model_parallel_size": 8, "fsdp": {"shard_size": 16, "sequence_parallel": True}}, "cut.yml")
    prediction = forecast(["13B", cut], 1024, PlanOptions(engine="fsdp", precision="bf16")).prediction
    assert prediction.scheme == "HSDP, 8 copies, tensor-parallel along the sequence over 8"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"context_parallel_size": 4}, "ring attention is not available with --engine fsdp"),
        ({"model_parallel_size": 2, "sequence_parallel": True}, "use fsdp.sequence_parallel instead"),
    ],
)
def test_what_the_example_cannot_train_is_not_predicted(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    register()
    with pytest.raises(PlanError, match=message):
        forecast(["tiny", write(tmp_path, keys)], 8, PlanOptions(engine="fsdp"))


def test_a_sequence_that_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    from examples.gpt_neox.config import check_fsdp
    from examples.gpt_neox.train import notices

    odd = configured(tmp_path, model_parallel_size=2, seq_length=31, fsdp={"sequence_parallel": True})
    with pytest.raises(ConfigError, match="which is 2, must divide seq_length, which is 31"):
        check_fsdp(odd)
    assert "the block fsdp, ignored with --engine ddp" in notices(odd, "ddp")
    check_fsdp(configured(tmp_path, model_parallel_size=2, fsdp={"sequence_parallel": True}))
    assert not [notice for notice in notices(configured(tmp_path), "ddp") if "fsdp" in notice]


def test_hooks_put_everything_back() -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    from torch.distributed.tensor import parallel
    from torch.distributed.tensor.parallel import api

    from commtrace.hooks.torch import dtensor, fsdp2

    before = FSDPState._init_shared_state, api.parallelize_module, parallel.parallelize_module
    for hook in (fsdp2, dtensor):
        hook.install()
        hook.install()
    during = FSDPState._init_shared_state, api.parallelize_module, parallel.parallelize_module
    assert not any(function is hooked for function, hooked in zip(before, during, strict=True))
    replacement: Any = api.parallelize_module
    for hook in (fsdp2, dtensor):
        hook.uninstall()
    assert (FSDPState._init_shared_state, api.parallelize_module, parallel.parallelize_module) == before
    # As if the package had been imported while the hook was installed, and had the replacement.
    parallel.parallelize_module = replacement
    dtensor.install()
    dtensor.uninstall()
    assert parallel.parallelize_module is before[2]


class Group:
    """A parameter group of FSDP2 whose method gathers."""

    _training_state, _module_fqn = SimpleNamespace(_name_="FORWARD"), ""

    def gather(self) -> int:
        """Return the purpose of its calls."""
        from commtrace.hooks import purposes
        from commtrace.hooks.torch import fsdp2

        return int(purposes.marking_by(read=fsdp2._purpose_of_gathering, of_caller=True)(purposes.current)())


def test_a_hook_that_fails_is_not_felt(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from commtrace.hooks.torch import dtensor, dtensor_job, fsdp2

    def fails(*_: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(fsdp2, "describe", fails)
    monkeypatch.setattr(dtensor_job.parallelized_modules, "record_style", fails)
    module = torch.nn.Linear(1, 1)
    fsdp2._note_new_root(lambda state: None)(SimpleNamespace())  # as in a version of torch with other attributes
    group = Group()
    state = SimpleNamespace(
        _modules=[module], _state_ctx=SimpleNamespace(all_states=[SimpleNamespace(_fsdp_param_groups=[group])])
    )
    fsdp2._note_new_root(lambda state: None)(state)
    fsdp2._note_last_group(lambda group: None)(Group())
    assert fsdp2._new_roots
    fsdp2._note_last_group(lambda group: None)(group)
    assert not fsdp2._new_roots
    assert group.gather() == fsdp2._FORWARD[""]
    assert dtensor._record_style(lambda module, mesh, plan: module)(module, "mesh", "plan") is module
    dtensor_job.parallelized_modules.clear()


def test_a_model_cut_piece_by_piece_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search visits all modules, so steps must not repeat it."""
    import torch

    from commtrace.hooks.torch import captured_jobs as jobs
    from commtrace.hooks.torch import dtensor, dtensor_job

    searches: list[bool] = []

    def root() -> None:
        searches.append(True)

    monkeypatch.setattr(dtensor_job.parallelized_modules, "root", root)
    monkeypatch.setattr(jobs, "any_engine", lambda: False)
    pieces = [torch.nn.Linear(1, 1) for _ in range(3)]
    optimizer = torch.optim.SGD(pieces[0].parameters())
    dtensor_job.parallelized_modules.clear()
    dtensor._before_optimizer_step(optimizer)
    assert not searches  # no module is parallelized
    for piece in pieces[:2]:
        dtensor_job.parallelized_modules.record_style(piece, None, "style", None)
    with monkeypatch.context() as compiling:
        compiling.setattr(torch.compiler, "is_compiling", lambda: True)
        dtensor._before_optimizer_step(optimizer)
    assert not searches  # the hook does nothing while torch compiles
    for _ in range(3):
        dtensor._before_optimizer_step(optimizer)
    assert len(searches) == 1
    dtensor_job.parallelized_modules.record_style(pieces[2], None, "style", None)
    dtensor._before_optimizer_step(optimizer)
    assert len(searches) == 2
    assert [*dtensor_job.roles(pieces[0])] == []  # no mesh was given
    dtensor_job.parallelized_modules.clear()

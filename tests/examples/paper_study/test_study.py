"""The paper study: experiments that run once and are kept, and figures made from real dry runs."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pandas as pd
import processes
import pytest

pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytest.importorskip("plotly", reason="plotly is not installed")
pytest.importorskip("jinja2", reason="jinja2 is not installed")

from commtrace import cli
from commtrace.errors import CommtraceError
from commtrace.run import open_run
from examples.paper_study import experiments as kept
from examples.paper_study.__main__ import main
from examples.paper_study.claims import CONFIRMED, CONTRADICTED, REFINED, Claim, Measure, value_range
from examples.paper_study.document import replace_blocks
from examples.paper_study.experiments import ExperimentError, exclusive_lock, execute, find_done, run_missing
from examples.paper_study.parts import Experiment, Options
from examples.paper_study.volume import volume_claims, volume_part
from examples.paper_study.volume.dry_runs import DDP, ZERO_1, ZERO_3, DryRun, Plan, plan

LIMIT_SECONDS: Final = 240


def experiment(key: str, run: Callable[[Path], None], *, alone: bool = False) -> Experiment:
    """Return an experiment that calls `run`."""
    return Experiment(key, f"title of {key}", run, 1.0, alone, f"command of {key}")


class Counting:
    """Experiment that writes files and counts its runs."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.times, self.then = 0, then

    def __call__(self, folder: Path) -> None:
        self.times += 1
        assert not [*folder.iterdir()], "what an earlier attempt left is gone"
        (folder / "half.txt").write_text("half")
        self.then()
        (folder / "whole.txt").write_text("whole")


def fail() -> None:
    raise ExperimentError("ended with status 7\n    its last words")


# ---- experiments -----------------------------------------------------------------------------------------------------


def test_what_is_done_is_not_run_again_and_what_failed_is(tmp_path: Path) -> None:
    good, bad, last = Counting(), Counting(fail), Counting()
    experiments = [experiment("good", good), experiment("bad", bad), experiment("last", last, alone=True)]
    outcomes: list[tuple[str, str | None]] = []
    failures = run_missing(experiments, tmp_path, 2, lambda finished, why: outcomes.append((finished.key, why)))
    assert failures == {"bad": "ended with status 7\n    its last words"}
    assert dict(outcomes) == {"good": None, "bad": failures["bad"], "last": None}
    assert outcomes[-1][0] == "last", "what must be alone waits for the others"
    assert {*find_done(experiments, tmp_path)} == {"good", "last"}
    assert kept.read_facts(tmp_path / "good")["title"] == "title of good"

    bad.then = lambda: None
    assert run_missing(experiments, tmp_path, 1, lambda finished, why: None) == {}
    assert (good.times, bad.times, last.times) == (1, 2, 1)
    assert {*find_done(experiments, tmp_path)} == {"good", "bad", "last"}
    assert (tmp_path / "bad" / "whole.txt").read_text() == "whole"


def test_an_interrupted_study_goes_on_where_it_stopped(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    first, second = Counting(), Counting(interrupt)
    experiments = [experiment("a-first", first), experiment("b-second", second)]
    with pytest.raises(KeyboardInterrupt):
        run_missing(experiments, tmp_path, 1, lambda finished, why: None)
    assert {*find_done(experiments, tmp_path)} == {"a-first"}
    assert (tmp_path / ".b-second.part" / "half.txt").exists()
    second.then = lambda: None
    assert run_missing(experiments, tmp_path, 1, lambda finished, why: None) == {}
    assert (first.times, second.times) == (1, 2)


def test_a_fault_in_an_experiment_is_a_failure_of_that_one(tmp_path: Path) -> None:
    def fault() -> None:
        raise ValueError("no such thing")

    experiments = [experiment("faulty", Counting(fault)), experiment("good", Counting())]
    assert run_missing(experiments, tmp_path, 1, lambda finished, why: None) == {"faulty": "ValueError: no such thing"}
    assert {*find_done(experiments, tmp_path)} == {"good"}


@pytest.mark.long
def test_a_program_that_fails_is_told_with_the_end_of_its_output(tmp_path: Path) -> None:
    program = "import sys; print(*range(100), sep='\\n'); sys.exit('its last words')"
    with pytest.raises(ExperimentError, match=r"ended with status 1\n(.|\n)*    its last words$") as error:
        execute([sys.executable, "-c", program], tmp_path)
    assert "    50\n" not in str(error.value)
    assert "50\n" in (tmp_path / kept.OUTPUT).read_text()
    with pytest.raises(ExperimentError, match="not finished after 1 s"):
        execute([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path, limit_seconds=1)


def test_what_a_program_took_is_kept(tmp_path: Path) -> None:
    busy = "import time\nwhile time.process_time() < 0.3: pass"

    def run(folder: Path) -> None:
        execute([sys.executable, "-c", busy], folder)
        execute([sys.executable, "-c", busy], folder)

    assert not run_missing([experiment("busy", run)], tmp_path, 1, lambda finished, why: None)
    assert 0.6 <= kept.read_facts(tmp_path / "busy")["cpu_seconds"] < 60


def test_two_studies_do_not_write_to_one_place(tmp_path: Path) -> None:
    with exclusive_lock(tmp_path), pytest.raises(CommtraceError, match="another study"), exclusive_lock(tmp_path):
        pass


# ---- which dry runs --------------------------------------------------------------------------------------------------


def test_keys_tell_apart_what_differs_and_find_what_is_the_same() -> None:
    runs = plan(["19M", "125M", "1-3B", "13B"], quick=False).all
    keys = [run.key for run in runs]
    assert len({*keys}) == len(keys)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]{1,120}", key) for key in keys)
    assert DryRun("19M", 8, ZERO_1).key == DryRun("19M", 8, ZERO_1).key != DryRun("19M", 16, ZERO_1).key
    assert DryRun("19M", 8, ZERO_1).key != DryRun("19M", 8, ZERO_1, switches='{"gradient_clipping": 0}').key


def test_the_plan_has_the_papers_points_and_says_what_cannot_be() -> None:
    study_plan = plan(["19M", "125M", "1-3B", "13B"], quick=False)
    assert {(run.name, run.world) for run in study_plan.node} == {("19M", 8), ("125M", 8), ("1.3B", 8), ("13B", 16)}
    assert max(run.world for run in study_plan.all) == 1024
    lengths = {(run.division, run.settings.get("seq_length", 2048)) for run in study_plan.lengths}
    assert {length for _, length in lengths} == {512, 1024, 2048, 4096, 8192}
    # The paper's footnote 4: 12 heads cannot be divided by 8.
    impossible = {(run.name, run.pipeline, run.tensor): why for run, why in study_plan.impossible.items()}
    assert "num_attention_heads, which is 12" in impossible["125M", 1, 8]
    assert "num_layers is 6" in DryRun("19M", 8, pipeline=8).impossible()


def test_a_model_that_does_not_exist_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "s"), "--models", "7M"]) == 1
    assert "7M: no such file" in capsys.readouterr().err


# ---- a small study, from the command to the page ---------------------------------------------------------------------

ZERO: Final = DryRun("tiny", 2, ZERO_1)
STAGES: Final = DryRun("tiny", 2, pipeline=2)
FAILING: Final = DryRun("tiny", 4, DDP, switches='{"num_layers": "none"}', note="broken")


def small(**lists: tuple[DryRun, ...]) -> Plan:
    """Return a plan with only these dry runs."""
    names = ("node", "sizes", "scaled", "divided", "combined", "lengths", "switched", "alike", "batches")
    return Plan(**{name: lists.get(name, ()) for name in names}, impossible={})


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a study of two dry runs, after an attempt that included a third, which fails."""
    folder = tmp_path_factory.mktemp("study") / "results"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            volume_part, "plan", lambda models, quick: small(node=(ZERO,), divided=(STAGES,), scaled=(FAILING,))
        )
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            assert main([str(folder), "--part", "volume", "--models", "tiny"]) == 1
        (folder / "errors.txt").write_text(errors.getvalue())
        (folder / "study.html").rename(folder / "incomplete.html")
        patch.setattr(volume_part, "plan", lambda models, quick: small(node=(ZERO,), divided=(STAGES,)))
        before = (folder / "volume" / ZERO.key / kept.FACTS).read_text()
        assert main([str(folder), "--part", "volume", "--models", "tiny"]) == 0
        assert (folder / "volume" / ZERO.key / kept.FACTS).read_text() == before
    return folder


# The model of tiny.yml: 2 layers, hidden size 96, 256 ids, untied, fp32; micro-batches of 4 sequences of 32 ids.
HIDDEN, LAYERS, IDS, SEQUENCE, BATCH, ELEMENT = 96, 2, 256, 32, 4, 4
BYTES: Final = ELEMENT * (2 * IDS * HIDDEN + LAYERS * (12 * HIDDEN**2 + 13 * HIDDEN) + 2 * HIDDEN)


@pytest.mark.exhaustive
def test_the_figures_say_what_can_be_calculated_by_hand(study: Path) -> None:
    zero = pd.read_csv(study / "data" / "figure-08-step.csv").set_index("op")["payload_bytes"]
    assert zero["all_reduce"] - BYTES < 100, "all gradients, and a few norms"
    assert zero["all_reduce"] >= BYTES
    assert zero["all_gather"] == BYTES
    (against,) = pd.read_csv(study / "data" / "figure-10.csv").to_dict("records")
    assert against["closed_form_bytes"] == 2 * BYTES / 2, "equation 2 of two ranks"
    assert against["equal"] == "yes"
    assert 1.49 < against["times"] < 1.51
    (stages,) = pd.read_csv(study / "data" / "figure-13-pipeline.csv").to_dict("records")
    assert stages["closed_form_bytes"] == 2 * BATCH * SEQUENCE * HIDDEN * ELEMENT, "equation 4 of two stages"
    mask = 2 * SEQUENCE**2
    assert stages["recorded_bytes"] == stages["exact_bytes"] == stages["closed_form_bytes"] + mask
    assert "attention mask" in stages["why_not_closed_form"]


@pytest.mark.exhaustive
def test_the_page_shows_the_same_numbers_and_every_point(study: Path) -> None:
    page = (study / "study.html").read_text()
    figures = [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', page)]
    bars = {
        (figure["layout"]["title"]["text"], trace["name"]): trace
        for figure in figures
        for trace in figure["data"]
        if trace.get("name")
    }
    gathered = bars["Volume of each operation in a step", "all_gather"]
    assert values(gathered["x"]) == [BYTES / (1 << 20)]
    points = pd.read_csv(study / "data" / "points.csv")
    assert sorted(points["rank"]) == [0, 0, 1], "rank 0 of ZeRO-1, and both stages"
    assert set(points["equal"]) == {"yes"}
    assert (points["recorded_bytes"] == points["exact_bytes"]).all()
    assert "Without results" not in page
    claims = json.loads((study / "data" / "claims.json").read_text())["claims"]
    assert {claim["key"]: claim["verdict"] for claim in claims}["prediction"] == CONTRADICTED


def values(data: Any) -> list[float]:
    """Return a trace's values, which are a list or packed by plotly."""
    if isinstance(data, dict):
        import base64

        import numpy as np

        return [float(value) for value in np.frombuffer(base64.b64decode(data["bdata"]), data["dtype"])]
    return [float(value) for value in data]


@pytest.mark.exhaustive
def test_each_experiment_is_an_ordinary_log(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in (ZERO, STAGES):
        folder = study / "volume" / run.key
        assert not open_run(folder).notes
        assert cli.main(["check", str(folder)]) == 0
        assert cli.main(["report", str(folder)]) == 0
    assert "simulated" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_a_failed_experiment_is_named_and_the_page_says_what_is_missing(study: Path) -> None:
    error = " ".join((study / "errors.txt").read_text().split())
    assert f"failed: {FAILING.label}" in error
    assert "num_layers" in error, "the end of the program's output"
    assert f"failed: {FAILING.label}" in (study / "incomplete.html").read_text()
    assert FAILING.label not in (study / "study.html").read_text()


TABLES: Final = {
    file.stem: pd.read_csv(file) for file in (Path(__file__).parents[3] / "notebooks/study/data").glob("*.csv")
}
"""Tables of a complete study, which the notebook shows."""


def claims_of_a_complete_study() -> dict[str, Claim]:
    """Return the claims about volume, from the notebook's tables."""
    complete = plan(["19M", "125M", "1-3B", "13B"], quick=False)
    claims = [
        *volume_claims.operation_shares(TABLES["figure-07-step"], TABLES["figure-07-run"]),
        *volume_claims.volume_ratios(TABLES["figure-10"]),
        *volume_claims.message_sizes(TABLES["figure-09"]),
        *volume_claims.prediction(TABLES["figure-10"]),
        *volume_claims.indivisible_heads(complete),
        *volume_claims.model_parallel_operations(TABLES),
        *volume_claims.model_parallel_volumes(TABLES),
        *volume_claims.gathered_over_lengths(TABLES["figure-14"]),
        *volume_claims.volumes_over_lengths(TABLES),
    ]
    return {claim.key: claim for claim in claims}


def test_claims_follow_from_the_tables() -> None:
    claims = claims_of_a_complete_study()
    confirmed = {key for key, claim in claims.items() if claim.verdict == CONFIRMED}
    contradicted = {key for key, claim in claims.items() if claim.verdict == CONTRADICTED}
    assert confirmed == {"pipeline-all-reduce", "tensor-length"}
    assert contradicted == {"zero-1-volume", "zero-2-volume", "zero-3-volume", "prediction"}
    assert len(claims) == 17

    def values(key: str, number: int = 0) -> dict[str, float]:
        return {name: round(value, 3) for name, value in claims[key].measures[number].values.items()}

    assert values("all-reduce-share") == dict.fromkeys(("19M", "125M", "1.3B", "13B"), 0.5)
    assert values("broadcast-share", 2) == {"19M": 0.043, "125M": 0.043, "1.3B": 0.037, "13B": 0.031}
    assert values("zero-3-volume") == {"19M": 1, "125M": 1, "1.3B": 1.161, "13B": 1.466}
    assert values("message-sizes") == {"19M": 4, "125M": 6, "1.3B": 8, "13B": 7}
    assert values("prediction") == {"DDP": 1, "ZeRO-1": 1.5, "ZeRO-2": 1.5, "ZeRO-3": 0.667}
    assert values("heads") == {"tensor 2": 1, "tensor 4": 1, "tensor 8": 0}
    assert values("mixed-all-gather", 2) == {"least": 0.429, "most": 0.714}
    assert values("pipeline-extra") == dict.fromkeys(("19M", "125M", "1.3B", "13B"), 8 << 20)
    assert values("tensor-volume") == {"least": 1.004, "most": 1.027}
    assert values("all-gather-length")["pipeline 2 x tensor 2"] == 1.262
    assert values("send-length", 1) == {"least": 2.118, "most": 2.667}


def test_verdicts_change_with_the_numbers() -> None:
    same = TABLES["figure-10"].assign(recorded_bytes=1.0, times=1.0)
    verdicts = [claim.verdict for claim in volume_claims.volume_ratios(same)]
    assert verdicts == [CONFIRMED, CONFIRMED, CONTRADICTED]
    assert [claim.verdict for claim in volume_claims.prediction(same)] == [CONFIRMED]
    two = TABLES["figure-09"].loc[TABLES["figure-09"]["model"].isin(["19M", "125M"])]
    assert [claim.verdict for claim in volume_claims.message_sizes(two)] == [CONFIRMED, REFINED]


def test_measures_as_text() -> None:
    assert Measure("share", "share", {"a": 0.5, "b": 0.25, "c": 0.5}).text == "share: 50.0 % (a, c), 25.0 % (b)"
    assert Measure("share", "share", {"a": 0.5, "b": 0.5}).text == "share: 50.0 % (all)"
    assert value_range("sent", "bytes", [2048, 1024]).text == "sent: 1.00 KiB to 2.00 KiB"
    assert value_range("ratio", "ratio", [1.5, 1.5]).text == "ratio: 1.500"


def test_documents_keep_their_text_and_unknown_blocks() -> None:
    text = "a\n<!-- generated: one -->\nold\n<!-- end -->\nb\n<!-- generated: other -->\nkept\n<!-- end -->\n"
    assert replace_blocks(text, {"one": "new\n"}) == text.replace("old", "new")


@pytest.mark.long
def test_a_study_that_is_ended_ends_what_it_started(tmp_path: Path) -> None:
    arguments = [str(tmp_path / "s"), "--part", "volume", "--models", "tiny", "--quick", "--jobs", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "examples.paper_study", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + LIMIT_SECONDS
    while not [*(tmp_path / "s" / "volume").glob(f".*.part/{kept.OUTPUT}")]:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_SECONDS) == 128 + signal.SIGTERM
    processes.wait_for(lambda: not _running_commands(str(tmp_path)), 5)  # until killed processes are gone


def _running_commands(word: str) -> list[str]:
    """Return the commands of running processes that contain a word."""
    commands = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if word in command:
                commands.append(command)
    return commands


@pytest.mark.exhaustive
def test_the_quick_study_equals_theory_in_every_point(tmp_path: Path) -> None:
    assert main([str(tmp_path), "--part", "volume", "--models", "tiny", "--quick"]) == 0
    points = pd.read_csv(tmp_path / "data" / "points.csv")
    assert set(points["equal"]) == {"yes"}
    options = Options(("tiny",), quick=True)
    done = volume_part.results_of(
        options, find_done(volume_part.VolumePart().experiments(options), tmp_path / "volume")
    )
    assert {run.scheme for run in done.recorded} >= {DDP, ZERO_1, ZERO_3}

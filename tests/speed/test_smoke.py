"""The benchmark runs, on models too small to learn anything about speed; counts may not grow."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import autogram
from tests.speed import choices, limits, ranks, tasks
from tests.speed.__main__ import main
from tests.speed.gpu import counted, measured
from tests.speed.gpu.models import TINY
from tests.speed.gpu.steps import STEPS
from tests.speed.host import count_objects, measure
from tests.speed.measure import Timing, gramian_error
from tests.speed.process import TrainingProcess
from tests.speed.report import Outcome
from tests.speed.training import ENGINES
from tests.speed.visited import look
from tests.speed.workloads import WORKLOADS


@pytest.mark.slow
def test_benchmark_prints_a_table_and_writes_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One round of each of two launches, on the smallest model."""
    path = tmp_path / "results.json"
    quick = ["--model", "mlp", "--launches", "2", "--rounds", "1", "--no-torchjd"]
    main([*quick, "--profile", "--json", str(path)])
    printed = capsys.readouterr().out
    assert "| MLP, 8 layers of width 512, B = 64 |" in printed
    assert "gramian" in printed
    (line,) = json.loads(path.read_text())["lines"]
    assert line["outcomes"]["autogram"]["ratio"]["median"] > 0
    assert line["outcomes"]["autogram"]["error"] < 1e-10


@pytest.mark.slow
def test_ranks_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    """One round of two processes, which send each other something."""
    ranks.main(["--model", "mlp", "--world", "2", "--rounds", "1"])
    found = re.findall(r"\| ([\d.]+) MB \|", capsys.readouterr().out)
    assert len(found) == 2
    assert min(map(float, found)) > 0


@pytest.mark.slow
def test_compiled_models_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    """One round on the smallest model."""
    main(["--compiled", "--model", "mlp", "--launches", "1", "--rounds", "1"])
    times, firsts = capsys.readouterr().out.strip().splitlines()[-1:-8:-4]
    assert times.count(" s, ") == firsts.count(" to ") + 1 == 5


def test_steps_of_tasks_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each step on each trunk has a time."""
    tasks.main(["--rounds", "1", "--repeats", "1"])
    found = re.findall(
        r"^\| (\w+) \| ([\w ]+) \| ([\d.]+) \|", capsys.readouterr().out, re.MULTILINE
    )
    names = ["SGD", "torchjd", "fused", "two passes", "representation"]
    assert [(size, name) for size, name, _ in found] == [(s, n) for s in tasks.SIZES for n in names]
    assert all(float(time) > 0 for *_, time in found)


def test_weightings_and_whole_steps_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each weighting has a time, but those that need another package."""
    main(["--weightings", "--largest", "16"])
    printed = capsys.readouterr().out
    cells = dict(re.findall(r"^\| (\S+) .*\| ([\w.]+) \|$", printed, re.MULTILINE))
    assert float(cells["`UPGrad`"]) > 0
    assert float(cells["`UPGradWeighting`"]) > 0
    steps = re.findall(r"^  (.+): ([\d.]+)$", printed, re.MULTILINE)
    assert [name for name, _ in steps] == [
        *("SGD", "Gramian, mean", "UPGrad", "UPGrad, 32 samples", "torchjd")
    ]
    rows = re.findall(
        r"^\| (\w+) \| (\d+) \| 16 \|.* \| ([\d.]+) \| (\S+) \|$", printed, re.MULTILINE
    )
    assert len(rows) == 6
    assert all(float(ratio) > 0 and float(error) <= 1e-3 for *_, ratio, error in rows)


def test_choices_and_limits_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    """Both ways to a Gramian have a time, and a smaller limit has more pieces."""
    (line, other) = choices.lines("cpu", 1, [choices.Layer(4, 2, 8, 8)])
    assert line[2:4] == other[2:4] == ["factors", "rows"]
    assert all(float(cell) >= 0 for cell in line[4:])
    block = choices.block_of(choices.Layer(4, 8, 32, 32), torch.float32, "cpu")
    pieces = [int(re.findall(r"\d+", limits.line(block, n, "cpu")[1])[0]) for n in (2**20, 2**9)]
    assert pieces[0] == 1 < pieces[1]
    limits.main(["--tiny"])
    assert "pieces" in capsys.readouterr().out


def test_steps_are_counted_without_a_gpu() -> None:
    """Launches, bytes, flops and memory of the three steps."""
    sgd, two_passes, fused = (counted.count(TINY["mlp"], x, "TF32") for x in counted.KINDS)
    assert 0 < sgd.launches < min(fused.launches, two_passes.launches)
    assert 0 < sgd.moved < two_passes.moved
    assert sgd.flops.total() == 6 * 2 * 4 * 8 * 8 - 2 * 4 * 8 * 8  # inputs need no gradient
    assert 0 < sgd.peak <= two_passes.peak


OPERATORS: list[Any] = [
    pytest.param(lambda x, y, z: torch.mm(x, y, out=z), (32 + 32, 16), id="out"),
    pytest.param(lambda x, *_: x.new_zeros(3), (0, 3), id="new"),
    pytest.param(lambda x, *_: torch.ones_like(x), (0, 32), id="like"),
    pytest.param(lambda x, y, _: x.copy_(y.mT), (32, 32), id="copy"),
    pytest.param(lambda x, *_: x.add_(1), (32, 32), id="in place"),
]


@pytest.mark.parametrize(("operate", "elements"), OPERATORS)
def test_elements_that_are_not_read_are_not_counted(
    operate: Callable[..., Tensor], elements: tuple[int, int]
) -> None:
    """What an operator only writes is counted as written."""
    tensors = torch.zeros(4, 8), torch.zeros(8, 4), torch.zeros(4, 4)
    with counted.Counts() as counts:
        operate(*tensors)
    assert (counts.launches, counts.moved) == (1, sum(elements) * torch.float32.itemsize)


@pytest.mark.slow
def test_everything_that_is_measured_on_a_gpu_runs() -> None:
    """By its command, on a tiny model, and on a CPU, where nothing is captured."""
    command = [sys.executable, "-m", "tests.speed.gpu", "--tiny", "--device", "cpu", "--errors"]
    command += ["--precision", "float32", "--model", "mlp"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    times = re.findall(r"^\| MLP 2 x 8, B = 4 \| [\d.]+ ms.* \|$", printed, re.MULTILINE)
    assert len(times) == 1
    assert "Error" not in times[0]
    errors = re.findall(r"^\| MLP 2 x 8, B = 4 \| (\S+) \|", printed, re.MULTILINE)
    assert float(errors[-1]) < 1e-12


@pytest.mark.slow
def test_an_error_ends_the_process_that_it_was_in() -> None:
    """The next step is measured in another one."""
    try:
        with pytest.raises(KeyError):
            measured.apart(("mlp", True, "float32", "cpu", "eager"), "no such step")
        assert measured._WORKERS == []
        found = measured.apart(("mlp", True, "float32", "cpu", "eager"), "SGD")
        assert found.milliseconds > 0
    finally:
        measured.stop()


def test_steps_of_a_gpu_run_in_half_precision() -> None:
    """All of them, also those of others, whose gradients have the dtype of the parameters."""
    for name in STEPS:
        found = measured.measure_case(("mlp", True, "bf16 autocast", "cpu", "eager"), name)
        assert found.milliseconds > 0


def test_host_time_is_measured() -> None:
    """A call without parameters costs less than one with them."""
    found = measure(repeats=20)
    assert 0 < found.call < found.use
    assert found.part > 0


def test_no_more_objects_live_than_did() -> None:
    """The collector of Python runs the more often, the more objects a step has alive."""
    forward, step = count_objects()
    assert 0 < forward <= 17
    assert forward < step <= 34


# Functions of the library, and calls of them: what Python costs in each step, on every machine.
MOST_VISITED = {
    "F.linear": (13, 16),
    "one cotangent": (31, 117),
    "compute_gramian": (125, 285),
    "one large cotangent": (33, 99),
}


def test_calls_visit_no_more_than_they_did() -> None:
    for name, found in look().items():
        functions, calls = MOST_VISITED[name]
        assert len(found) <= functions, (name, found)
        assert sum(found.values()) <= calls, (name, found)


# With a slower step than the present package's, of which the warm-up takes 33.
SLOWER = """
import time

class Engine(Engine):
    def compute_gramian(self, losses):
        time.sleep(0.1)
        return super().compute_gramian(losses)
"""


@pytest.mark.slow
def test_two_packages_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The one in another folder is imported from there: what is slower there is seen to be so."""
    shutil.copytree(Path(autogram.__file__).parent, tmp_path / "autogram")
    with (tmp_path / "autogram" / "__init__.py").open("a") as file:
        file.write(SLOWER)
    path = tmp_path / "results.json"
    quick = ["--model", "mlp", "--launches", "1", "--rounds", "1", "--json", str(path)]
    main(["--against", str(tmp_path), *quick])
    assert "width 512, B = 64 | two passes |" in capsys.readouterr().out
    two_passes, fused = json.loads(path.read_text())["lines"]
    assert two_passes["ratio"]["median"] < 0.7
    assert fused["ratio"]["median"] > 0
    assert two_passes["seconds"] > 0.1


def test_a_folder_without_a_package_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--against", str(tmp_path)])
    assert "no package `autogram`" in capsys.readouterr().err


# torchjd maps over attention, which has no batching rule on a CPU.
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.slow
def test_both_engines_can_be_compared() -> None:
    """torchjd is called as it wants to be called."""
    for make_engine in ENGINES.values():
        assert gramian_error(WORKLOADS["vit"], make_engine) < 1e-10


def test_ratios_are_of_one_round_and_order() -> None:
    """Twice the time in every round is a ratio of two, however slow some rounds were."""
    ratio = Timing([2.0, 20.0], [4.0, 40.0]).over(Timing([1.0, 10.0], [2.0, 20.0]))
    assert (ratio.low, ratio.median, ratio.high, ratio.by_order) == (2, 2, 2, (2, 2))


def test_wrong_gramians_and_failures_are_named() -> None:
    """A table must not show a wrong engine as a fast one."""
    assert Outcome(error=0.1, remark="why").error_cell == "**wrong**: 1e-01 (why)"
    assert "wrong" not in Outcome(error=1e-12).error_cell
    assert Outcome(failure="ValueError: no").error_cell == "ValueError: no"
    assert Outcome(failure="ValueError: no").time_cell == "does not run"


@pytest.mark.slow
def test_failures_in_other_processes_are_known_here() -> None:
    """An engine that does not run is a line of the table, and no silence."""
    with (
        closing(TrainingProcess("mlp", "none")) as process,
        pytest.raises(RuntimeError, match="KeyError: 'none'"),
    ):
        process.visit(1)

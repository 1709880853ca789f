"""The benchmark measures what it says, and its command writes it down. Nothing here asserts a time."""

import json
import re

import pytest
import torch

import palimpsest as pal
from palimpsest import bench as benchmark
from palimpsest.bench import Effort, Shape, steps
from palimpsest.cli.main import main
from palimpsest.errors import InvalidInputError
from palimpsest.execution.processes import Processes
from palimpsest.runs.reconstruct import NODES, ReconstructOptions
from palimpsest.runs.train import TrainOptions
from palimpsest.solver import memory

CPU, TINY, BRIEF = torch.device("cpu"), Shape((1, 4, 4), (8,), 3), Effort(turns=1, seconds=0.001)


def test_all_contenders_are_compared_in_one_run():
    rows = benchmark.ratios(benchmark.measure(TINY, CPU, BRIEF))
    names = [row["name"] for row in rows]
    assert names == ["published float64", "published float32", "any network, eager", "eager", "floor"]
    assert rows[-1]["of the floor"] == 1
    assert all(row["milliseconds"] > 0 for row in rows)
    assert all(re.match("[a-z]", key) for key in rows[0])


def test_the_published_method_computes_the_same_gradients(monkeypatch):
    """The contender is no straw man: it goes down the gradient of the same loss, and of its own penalties."""
    moved = []
    monkeypatch.setattr(torch.optim.SGD, "step", lambda rule: moved.extend(rule.param_groups[0]["params"]))
    shape = Shape((1, 3, 3), (6,), 4)
    steps._published(shape, CPU, torch.float64)(1)
    x, λ = (t.detach() for t in moved)
    initial, final = steps._networks(shape, CPU)
    objective = pal.NTK(final.double(), initial.double().state_dict(), at=1.0, sharpness=steps.β)
    dx, dλ = objective.gradients(x, λ[:, 0])
    assert torch.allclose(moved[0].grad, dx + 2 * (x.abs() - 1).relu() * x.sign())
    assert torch.allclose(moved[1].grad[:, 0], dλ)


def test_a_cpu_times_the_problem_of_the_demo():
    options, shape = ReconstructOptions(), Shape.usual(CPU)
    objective, space = steps._problem(shape, CPU)
    assert (shape.candidates, shape.nodes) == (options.candidates, len(NODES["ntk"]))
    assert shape.hidden == TrainOptions().hidden
    assert space.shape == (40,)  # images of the demo
    assert len(objective.within(space).tangents) == 2
    assert Shape.usual(torch.device("cuda")).span == 0


def test_a_sweep_varies_one_number_at_a_time():
    base = Shape()
    varied = benchmark.variations(base)
    assert list(varied["candidates k"]) == [20, 40, 80, 160, 320]
    assert list(varied["input size d"].values())[2].image == (1, 50, 50)
    for shapes in varied.values():
        assert base in shapes.values()
    different = {"candidates k": "candidates", "width m": "hidden", "hidden layers": "hidden", "input size d": "image"}
    for respect, shapes in varied.items():
        for shape in shapes.values():
            changed = {field for field in ("image", "hidden", "candidates") if vars(shape)[field] != vars(base)[field]}
            assert changed <= {different[respect]}


def test_the_bar_ends_where_the_benchmark_does():
    told = []
    results = benchmark.compare(TINY, CPU, BRIEF, tick=told.append)
    assert len(told) == benchmark.ticks(TINY, CPU, BRIEF)
    assert set(results["sweep"]) == set(benchmark.variations(TINY))


def test_the_estimate_of_memory_is_that_of_the_chunks():
    shape = Shape(candidates=1000)
    objective, _ = steps._problem(shape, CPU)
    gigabytes = steps.estimated_megabytes(shape) / 1e3
    x = torch.zeros(1000, *shape.image)
    assert memory.chunk_size(objective, x, 1.001 * gigabytes, Processes(), len(x)) is None
    assert memory.chunk_size(objective, x, 0.999 * gigabytes, Processes(), len(x)) == 512


def test_shapes_and_efforts_that_make_no_sense():
    for wrong in ({"candidates": 0}, {"hidden": ()}, {"image": (1, 0, 5)}, {"nodes": 0}, {"span": -1}):
        with pytest.raises(InvalidInputError):
            Shape(**wrong)
    for wrong in ({"turns": 0}, {"seconds": 0.0}):
        with pytest.raises(InvalidInputError):
            Effort(**wrong)


# --- the command ----------------------------------------------------------------------------------


def bench(folder, *arguments) -> int:
    small = ["--image", "1,4,4", "--hidden", "8", "--candidates", "3", "--turns", "1", "--seconds", "0.001"]
    return main(["bench", "--out", str(folder), "--device", "cpu", *small, *arguments])


def test_the_command_writes_numbers_and_a_picture(tmp_path, capsys):
    folder = tmp_path / "new" / "bench"
    assert bench(folder) == 0
    printed = capsys.readouterr().out
    name = "16–8–1, k = 3, span 40, nodes 2"
    assert name in printed
    assert "published float64" in printed
    results = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    assert results["versions"]["torch"] == torch.__version__
    assert results["threads"] == torch.get_num_threads()
    assert results["shape"]["image"] == [1, 4, 4]
    assert [row["name"] for row in results["steps"][name]][-1] == "floor"
    assert [point["value"] for point in results["sweep"]["hidden layers"]] == [1, 2, 3, 4]
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")

    assert bench(folder, "--no-sweep") == 0
    assert json.loads((folder / "bench.json").read_text(encoding="utf-8"))["sweep"] == {}
    assert not (folder / "bench.png").exists()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--image", "25x25"], "25x25"),
        (["--image", "3,0,32"], "image"),
        (["--candidates", "-1"], "candidates"),
        (["--turns", "0"], "turns"),
    ],
)
def test_wrong_use_is_one_line_that_names_the_option(arguments, name, tmp_path, capsys):
    assert bench(tmp_path / "bench", *arguments) == 2
    message = capsys.readouterr().err
    assert name in message
    assert message.count("\n") == 1
    assert not (tmp_path / "bench").exists()


def test_memory_that_was_measured_is_drawn_as_such():
    from palimpsest.bench import figure

    points = [{"estimated megabytes": 3.0, "timings": [{"name": "floor", "megabytes": m}]} for m in (1.0, 2.0)]
    assert figure._memory(points) == {"floor": [1.0, 2.0]}
    points[1]["timings"][0]["megabytes"] = None
    assert figure._memory(points) == {figure.ESTIMATE: [3.0, 3.0]}

"""When compiling pays, what is compiled already, and that no folder of kernels can break a run."""

import os

import pytest
import torch

import palimpsest as pal
from palimpsest import execution
from palimpsest.cli import shared
from palimpsest.execution import TIMED, Executor, fusion, kernels
from palimpsest.execution.graph import Graph

STEP = 0.296e-3  # seconds of a graph step on an H200: 3072–1000–1000–1, k = 200
TENSORS = {"a": torch.zeros(1)}


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """Nothing is compiled yet, and kernels are kept in a new folder."""
    monkeypatch.setattr(kernels, "_compiled", {})
    monkeypatch.setenv(kernels.FOLDER, str(tmp_path))
    monkeypatch.delenv(kernels.DISK, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("steps", "step", "cost", "expected"),
    [
        (4_000, STEP, kernels.COMPILING, False),
        (20_000, STEP, kernels.COMPILING, False),  # 5.9 s as a graph; compiling alone takes longer
        (20_000, STEP, kernels.AGAIN * kernels.COMPILING, True),
        (200_000, STEP, kernels.LOADING, True),
        (400_000, STEP, kernels.COMPILING, True),
        (4_000, 100 * STEP, kernels.COMPILING, True),  # few steps, but long ones
        (0, STEP, 0.1, False),
        (-100, STEP, 0.1, False),  # a training that takes longer than most
    ],
)
def test_compiling_pays_if_it_saves_more_than_it_costs(steps, step, cost, expected):
    assert kernels.pays(steps, step, cost) == expected


def test_no_choice_costs_more_than_both_modes_would():
    """Whatever the run: the time is at most that of the plain graph."""
    for steps in (10**n for n in range(1, 8)):
        for cost in (kernels.COMPILING, kernels.LOADING, 0.1):
            compiled = cost + steps * (1 - kernels.GAIN) * STEP
            assert (compiled if kernels.pays(steps, STEP, cost) else steps * STEP) <= steps * STEP


def test_kernels_are_new_then_in_this_process_then_on_disk():
    name = kernels.signature("ntk", TENSORS)
    assert kernels.cost(name) == kernels.COMPILING
    kernels.remember(name, 30.0)
    assert kernels.cost(name) == kernels.AGAIN * 30.0  # a guess
    kernels.remember(name, 0.7)
    assert kernels.cost(name) == 0.7  # measured
    kernels._compiled.clear()  # as in the next process
    assert kernels.cost(name) == kernels.LOADING
    kernels.forget(name)
    assert kernels.cost(name) == kernels.COMPILING


def test_operations_are_named_by_the_numbers_and_the_engine_that_kernels_hold():
    torch.manual_seed(0)
    nets = [pal.networks.MLP(4, hidden=(8,)) for _ in range(3)]
    start = nets[0].state_dict()
    plain, other = (pal.NTK(net, start).operations() for net in nets[1:])
    assert repr(plain) == repr(other)
    auto, other = (pal.NTK(net, start, weights="auto") for net in nets[1:])
    assert auto.weights != other.weights
    names = [repr(each) for each in (plain, auto.operations(), other.operations())]
    names.append(repr(pal.NTK(nets[1], start).by_autograd().operations()))
    assert len(set(names)) == len(names)


def test_torch_that_keeps_nothing_on_disk_is_known(monkeypatch, fresh):
    name = kernels.signature("ntk", TENSORS)
    for variable, value in ((kernels.FOLDER, ""), (kernels.DISK, "0")):
        kernels.remember(name, 30.0)
        kernels._compiled.clear()
        assert kernels.cost(name) == kernels.LOADING
        monkeypatch.setenv(variable, value)
        assert kernels.cost(name) == kernels.COMPILING
        monkeypatch.setenv(kernels.FOLDER, str(fresh))


def test_a_signature_tells_problems_shapes_and_precisions_apart(monkeypatch):
    tensors = [{"a": torch.zeros(1)}, {"a": torch.zeros(2)}, {"b": torch.zeros(1)}, {"a": torch.zeros(1).double()}]
    names = [kernels.signature(problem, t) for problem in ("ntk", "kkt") for t in tensors]
    assert len(set(names)) == len(names)
    assert kernels.signature("ntk", {"a": torch.ones(1)}) == names[0]
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert kernels.signature("ntk", TENSORS) != names[0]


@pytest.mark.parametrize("damage", ["a file", "a marker that is a folder", "a file in place of the markers"])
def test_a_damaged_folder_is_left_alone(damage, fresh, monkeypatch):
    name = kernels.signature("ntk", TENSORS)
    if damage == "a file":
        (fresh / "file").touch()
        monkeypatch.setenv(kernels.FOLDER, str(fresh / "file"))
    elif damage == "a marker that is a folder":
        (fresh / "palimpsest" / name).mkdir(parents=True)
    else:
        (fresh / "palimpsest").touch()
    kernels.cost(name)
    kernels.remember(name, 30.0)
    assert kernels.cost(name) == kernels.AGAIN * 30.0
    kernels.forget(name)


# --- the folder of the command line ---------------------------------------------------------------


def test_the_command_line_keeps_kernels_in_the_users_cache(tmp_path):
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    kernels.keep_on_disk(environment)
    folder = tmp_path / "palimpsest" / "kernels"
    assert environment[kernels.FOLDER] == str(folder)
    assert folder.stat().st_mode & 0o077 == 0
    assert list(folder.iterdir()) == []


def test_a_folder_that_the_user_named_is_respected(tmp_path):
    environment = {"XDG_CACHE_HOME": str(tmp_path), kernels.FOLDER: "elsewhere"}
    kernels.keep_on_disk(environment)
    assert environment[kernels.FOLDER] == "elsewhere"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_or_written_is_not_used(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    environment = {"XDG_CACHE_HOME": str(tmp_path / "file")}
    kernels.keep_on_disk(environment)
    assert kernels.FOLDER not in environment

    def refused(*_, **__):
        raise PermissionError

    monkeypatch.setattr(kernels.tempfile, "TemporaryFile", refused)
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    kernels.keep_on_disk(environment)
    assert kernels.FOLDER not in environment


def test_on_a_cpu_the_environment_stays_as_it_is(monkeypatch):
    monkeypatch.delenv(kernels.FOLDER)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shared.torch_device("auto")
    assert kernels.FOLDER not in os.environ


# --- the decision in a run ------------------------------------------------------------------------


class Timed(Graph):
    """A graph on a machine whose steps take no time, but for those of the test's clock."""

    def run(self, tensors, plan, schedule):
        self.captures += not self.captures
        if fusion._fusing and Timed.failure is not None:
            raise Timed.failure
        Timed.now += 20.0 * (self.captures == 1 and not hasattr(self, "ran")) + STEP * len(plan)  # capturing is slow
        self.ran = True
        return {"a": tensors["a"] + len(plan)}, []


@pytest.fixture
def clock(monkeypatch):
    Timed.now, Timed.failure = 0.0, None
    monkeypatch.setattr(execution, "Graph", Timed)
    monkeypatch.setattr(execution.time, "perf_counter", lambda: Timed.now)


def modes(left: int, executor: Executor | None = None) -> list[str]:
    """The mode after each of four calls, of which the first captures and the second and third are timed."""
    executor = executor or Executor({}, "graph", may_fall_back=True, may_compile=True)
    found, tensors = [], TENSORS
    for _ in range(4):
        tensors, _ = executor.run(tensors, ["step"] * (TIMED // 2), left=left)
        found.append(executor.mode)
    assert tensors["a"] == 2 * TIMED  # every step was done, and once
    return found


def test_a_long_run_compiles_after_its_first_steps(clock):
    assert modes(left=20_000) == ["graph"] * 4
    assert modes(left=400_000) == ["graph", "graph", "compiled-graph", "compiled-graph"]


def test_kernels_that_are_there_are_used_in_shorter_runs(clock):
    modes(left=400_000)
    assert modes(left=20_000)[-1] == "compiled-graph"  # in the same process
    kernels._compiled.clear()
    assert modes(left=20_000)[-1] == "graph"  # 1.8 s to gain, and more to load
    assert modes(left=200_000)[-1] == "compiled-graph"


def test_an_executor_that_may_not_compile_does_not(clock):
    assert modes(10**9, Executor({}, "graph", may_fall_back=True)) == ["graph"] * 4


@pytest.mark.parametrize("failure", [RuntimeError("no kernel"), SyntaxError("damaged"), PermissionError("not yours")])
def test_a_run_goes_on_without_kernels_that_fail(failure, clock, caplog):
    Timed.failure = failure
    assert modes(left=400_000) == ["graph", "graph", "compiled-graph", "graph"]
    assert len(caplog.records) == 1
    assert "graph" in caplog.records[0].getMessage()


def test_a_compiled_graph_that_was_asked_for_fails_openly(clock):
    Timed.failure = RuntimeError("no kernel")
    with pytest.raises(RuntimeError, match="no kernel"):
        Executor({}, "compiled-graph", may_fall_back=False).run(TENSORS, ["step"])


def test_memory_that_runs_out_is_not_taken_for_a_failure_of_the_mode(clock):
    Timed.failure = torch.OutOfMemoryError("full")
    with pytest.raises(torch.OutOfMemoryError):
        Executor({}, "compiled-graph", may_fall_back=True).run(TENSORS, ["step"])

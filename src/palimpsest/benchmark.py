"""How fast a step is, against the method as published and against the least that the hardware must do.

All contenders are timed in one run, in turns, so that what slows the machine slows them all; only ratios of such a run
mean anything.

    published   autograd through autograd with gradients for the parameters too, one step of an optimiser, and a look at
                the loss on every step, as the known implementations do it
    ours        Palimpsest's whole step, priors and optimiser included, in every mode; "any network" leaves out the
                path for dense layers
    floor       only the matrix products that a step needs, of the same shapes, factors and precision
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import palimpsest as pal
from palimpsest.execution import MODES, Execution
from palimpsest.fusion import available
from palimpsest.parametrisation import Everywhere
from palimpsest.smoothing import Smoothed
from palimpsest.solver import Settings, Solver

β = 20.0
Run = Callable[[int], None]


@dataclass(frozen=True)
class Shape:
    """A perceptron d–m–…–m–1 for images, and k candidates."""

    image: tuple[int, ...] = (1, 25, 25)
    hidden: tuple[int, ...] = (500, 500)
    candidates: int = 80

    @property
    def name(self) -> str:
        widths = [torch.Size(self.image).numel(), *self.hidden, 1]
        return f"{'–'.join(map(str, widths))}, k = {self.candidates}"


@dataclass(frozen=True)
class Timing:
    """One contender."""

    name: str
    milliseconds: float
    """Median over the turns."""
    fastest: float
    megabytes: float | None
    """Peak memory of a step on CUDA."""


def measure(shape: Shape, device: torch.device, *, turns: int = 7, seconds: float = 0.25) -> list[Timing]:
    """Time every contender, in turns."""
    runs = contenders(shape, device)
    counts, memory = {}, {}
    for name, run in runs.items():
        run(5)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        pace = _seconds(run, 5, device) / 5
        memory[name] = torch.cuda.max_memory_allocated(device) / 1e6 if device.type == "cuda" else None
        counts[name] = max(3, int(seconds / pace))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(turns):
        for name, run in runs.items():
            times[name].append(1e3 * _seconds(run, counts[name], device) / counts[name])
    return [Timing(name, statistics.median(t), min(t), memory[name]) for name, t in times.items()]


def ratios(timings: list[Timing]) -> list[dict[str, Any]]:
    """Each contender with its time relative to the floor and to the published method."""
    of = {t.name: t.milliseconds for t in timings}
    rows = []
    for timing in timings:
        row = asdict(timing)
        row["of the floor"] = timing.milliseconds / of["floor"]
        for reference in ("published float64", "published float32"):
            row[f"faster than {reference}"] = of[reference] / timing.milliseconds
        rows.append(row)
    return rows


def contenders(shape: Shape, device: torch.device, *, only: Sequence[str] | None = None) -> dict[str, Run]:
    """By name, functions that do so many steps."""
    torch.manual_seed(0)
    model = pal.networks.MLP(shape.image, shape.hidden).to(device)
    modes = [mode for mode in MODES if _possible(mode, device)]
    makers: dict[str, Callable[[], Run]] = {
        "published float64": partial(_published, model, shape, torch.float64),
        "published float32": partial(_published, model, shape, torch.float32),
        "any network, eager": partial(_ours, model, shape, "eager", dense=False),
        "any network, graph": partial(_ours, model, shape, "graph", dense=False),
        **{mode: partial(_ours, model, shape, mode) for mode in modes},
        "floor": partial(_floor, model, shape),
    }
    if "graph" not in modes:
        del makers["any network, graph"]
    return {name: make() for name, make in makers.items() if only is None or name in only}


def _possible(mode: Any, device: torch.device) -> bool:
    return (device.type == "cuda" or "graph" not in mode) and ("compiled" not in mode or available(device))


def _seconds(run: Run, steps: int, device: torch.device) -> float:
    _wait(device)
    began = time.perf_counter()
    run(steps)
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- the contenders ---------------------------------------------------------------------------------


def _ours(model: nn.Module, shape: Shape, mode: Any, *, dense: bool = True) -> Run:
    settings = Settings(candidates=shape.candidates, steps=10**9, record_every=10**9)
    execution = Execution(mode=mode)
    objective = pal.KKT(model) if dense else pal.KKT(model).by_autograd()
    solver = Solver(objective, Everywhere(shape.image), settings, execution)
    state = solver.init()

    def run(steps: int) -> None:
        nonlocal state
        with execution.numbers(state.x.device):
            state = solver.descend(state, steps)

    return run


def _published(model: nn.Module, shape: Shape, dtype: torch.dtype) -> Run:
    """∇ of ‖θ − Σ λ_i y_i ∇_θ Φ(x_i)‖² plus penalties by autograd, for the candidates and the parameters alike."""
    network = pal.networks.MLP(shape.image, shape.hidden).to(next(model.parameters()).device, dtype)
    network.load_state_dict(model.state_dict())
    k, like = shape.candidates, next(network.parameters())
    x = (0.2 * torch.randn(k, *shape.image)).to(like).requires_grad_()
    λ = torch.rand(k, 1).to(like).requires_grad_()
    y = torch.where(torch.arange(k) % 2 == 0, 1.0, -1.0)[:, None].to(like)
    rules = [torch.optim.SGD([x], lr=1e-6, momentum=0.9), torch.optim.SGD([λ], lr=1e-6, momentum=0.9)]

    def run(steps: int) -> None:
        for _ in range(steps):
            for rule in rules:
                rule.zero_grad()
            with Smoothed(β):
                values = network(x)
            parameters = list(network.parameters())
            gradients = torch.autograd.grad(values, parameters, λ * y, create_graph=True, retain_graph=True)
            loss = sum((p.detach() - g).pow(2).sum() for p, g in zip(parameters, gradients, strict=True))
            loss = loss + (0.05 - λ).relu().pow(2).sum() + (x.abs() - 1).relu().pow(2).sum()
            if torch.isnan(loss):
                raise AssertionError("the published method diverged")
            loss.backward()
            for rule in rules:
                rule.step()

    return run


def _floor(model: nn.Module, shape: Shape) -> Run:
    """The products of palimpsest.objectives.dense, with factors and results in memory of their own, as in a step."""
    W = [layer.weight.detach() for layer in model.layers]  # type: ignore[union-attr]
    k = shape.candidates
    R, V = [torch.randn_like(w) for w in W], [torch.empty_like(w) for w in W]
    widths = [W[0].shape[1], *(w.shape[0] for w in W)]

    def activations() -> list[Tensor]:
        return [torch.randn(k, width).to(W[0]) for width in widths]

    h, δ, ḣ, z̄, out = (activations() for _ in range(5))
    last = len(W) - 1

    def step() -> None:
        for j, w in enumerate(W):
            torch.mm(h[j], w.T, out=out[j + 1])  # z
        for j in range(last, 0, -1):
            torch.mm(δ[j + 1], W[j], out=out[j])  # u
        for j in range(last + 1):
            torch.mm(δ[j + 1].T, h[j], out=V[j])
            torch.mm(h[j], R[j].T, out=out[j + 1])  # ż
            if j:
                out[j + 1].addmm_(ḣ[j], W[j].T)
        for j in range(last, -1, -1):
            torch.mm(δ[j + 1], R[j], out=out[j])  # h̄
            if j < last:
                out[j].addmm_(z̄[j + 1], W[j])

    if not W[0].is_cuda:
        return partial(_repeat, step)
    with Execution().numbers(W[0].device):
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()

    def replay(memory_of: Callable[[], None] = step) -> None:  # the graph does not keep its tensors alive
        graph.replay()

    return partial(_repeat, replay)


def _repeat(step: Callable[[], None], steps: int) -> None:
    for _ in range(steps):
        step()

"""One step of each contender."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn

import palimpsest as pal
from palimpsest.errors import InvalidInputError
from palimpsest.execution import MODES, Execution, Mode, fusion
from palimpsest.objectives import Objective
from palimpsest.objectives.smoothing import Smoothed
from palimpsest.objectives.spaces import Everywhere, Parametrisation, Subspace
from palimpsest.solver import memory
from palimpsest.solver.loop import Solver
from palimpsest.solver.settings import Settings

β = 20.0
ENDLESS = 10**9  # steps: a run without records
Run = Callable[[int], None]
"""Runs this number of steps."""


@dataclass(frozen=True)
class Shape:
    """A perceptron d–m–…–m–1 for images, and k candidates for the NTK method.

    >>> Shape().name
    '625–500–500–1, k = 80'
    >>> Shape(span=40, nodes=2).name
    '625–500–500–1, k = 80, span 40, nodes 2'
    """

    image: tuple[int, ...] = (1, 25, 25)
    hidden: tuple[int, ...] = (500, 500)
    candidates: int = 80
    span: int = 0  # the dimensions of the subspace in which candidates are searched, or 0 for all of image space
    nodes: int = 1  # the number of tangent points

    def __post_init__(self) -> None:
        positive = (*self.image, *self.hidden, self.candidates, self.nodes, self.span + 1)
        if not self.image or not self.hidden or min(positive) < 1:
            raise InvalidInputError("image, hidden, candidates, nodes or span is too small; give positive numbers")

    @classmethod
    def usual(cls, device: torch.device) -> Self:
        """The demo's own problem on a CPU, a thousand candidates of CIFAR-10 on CUDA."""
        return cls((3, 32, 32), (1000, 1000), 1000) if device.type == "cuda" else cls(span=40, nodes=2)

    @property
    def inputs(self) -> int:
        """d."""
        return math.prod(self.image)

    @property
    def name(self) -> str:
        search = f", span {self.span}" * (self.span > 0) + f", nodes {self.nodes}" * (self.nodes > 1)
        return f"{'–'.join(map(str, (self.inputs, *self.hidden, 1)))}, k = {self.candidates}{search}"


def contenders(shape: Shape, device: torch.device) -> dict[str, Callable[[], Run]]:
    """A function for each name that prepares the contender."""
    cuda, fused = device.type == "cuda", fusion.available(device)
    modes = [mode for mode in MODES if (cuda or "graph" not in mode) and (fused or "compiled" not in mode)]
    plain = [mode for mode in modes if "compiled" not in mode]
    return {
        "published float64": partial(_published, shape, device, torch.float64),
        "published float32": partial(_published, shape, device, torch.float32),
        **{f"any network, {mode}": partial(_ours, shape, device, mode, dense=False) for mode in plain},
        **{mode: partial(_ours, shape, device, mode) for mode in modes},
        "floor": partial(_floor, shape, device),
    }


def automatic(device: torch.device) -> Mode:
    """The mode of a long run."""
    return "compiled-graph" if fusion.available(device) else Execution().resolved(device)


def estimated_megabytes(shape: Shape) -> float:
    """The memory of a step's intermediate results, by the estimate that chooses the size of chunks."""
    objective, space = _problem(shape, torch.device("cpu"))
    x = torch.zeros(shape.candidates, *space.shape)
    return shape.candidates * memory.bytes_per_candidate(objective.within(space), x) / 1e6


def _networks(shape: Shape, device: torch.device) -> tuple[nn.Module, nn.Module]:
    """Before and after training."""
    torch.manual_seed(0)
    initial, final = (pal.networks.MLP(shape.image, shape.hidden).to(device) for _ in range(2))
    return initial, final


def _problem(shape: Shape, device: torch.device) -> tuple[Objective, Parametrisation]:
    """The objective, and the space in which its candidates are searched."""
    initial, final = _networks(shape, device)
    at = [(s + 0.5) / shape.nodes for s in range(shape.nodes)]
    objective = pal.NTK(final, initial.state_dict(), at=at if shape.nodes > 1 else 0.5, sharpness=β)
    if shape.span == 0:
        return objective, Everywhere(shape.image)
    basis = torch.linalg.qr(torch.randn(shape.inputs, min(shape.span, shape.inputs)))[0].T
    return objective, Subspace(torch.zeros(shape.image), basis.reshape(-1, *shape.image)).to(device)


def _ours(shape: Shape, device: torch.device, mode: Mode, *, dense: bool = True) -> Run:
    settings = Settings(candidates=shape.candidates, steps=ENDLESS, record_every=ENDLESS)
    execution = Execution(mode=mode)
    objective, space = _problem(shape, device)
    solver = Solver(objective if dense else objective.by_autograd(), space, settings, execution)
    state = solver.init()

    def run(steps: int) -> None:
        nonlocal state
        with execution.matrix_precision(state.x.device):
            state = solver.descend(state, steps)

    return run


def _published(shape: Shape, device: torch.device, dtype: torch.dtype) -> Run:
    """∇ of ‖θ − θ_0 − Σ λ_i ∇_θ Φ(x_i)‖² plus a box by autograd, for the candidates and the parameters alike.

    One node, at the final weights, everywhere.
    """
    initial, network = (network.to(dtype) for network in _networks(shape, device))
    T = [(θ - θ_0).detach() for θ, θ_0 in zip(network.parameters(), initial.parameters(), strict=True)]
    k = shape.candidates
    x = (0.2 * torch.randn(k, *shape.image)).to(T[0]).requires_grad_()
    λ = torch.randn(k, 1).to(T[0]).requires_grad_()
    rules = [torch.optim.SGD([x], lr=1e-6, momentum=0.9), torch.optim.SGD([λ], lr=1e-6, momentum=0.9)]

    def run(steps: int) -> None:
        for _ in range(steps):
            for rule in rules:
                rule.zero_grad()
            with Smoothed(β):
                values = network(x)
            parameters = list(network.parameters())
            gradients = torch.autograd.grad(values, parameters, λ, create_graph=True, retain_graph=True)
            loss = sum((t - g).pow(2).sum() for t, g in zip(T, gradients, strict=True))
            loss = loss + (x.abs() - 1).relu().pow(2).sum()
            if torch.isnan(loss):
                raise AssertionError("the published method diverged")
            loss.backward()
            for rule in rules:
                rule.step()

    return run


def _floor(shape: Shape, device: torch.device) -> Run:
    """The products of palimpsest.objectives.dense, with separate memory for factors and results, as in a step."""
    objective, space = _problem(shape, device)
    objective, k = objective.within(space), shape.candidates
    W = [[w for w in θ.values() if w.ndim == 2] for θ in objective.tangents]
    R = [torch.randn_like(w) for w in W[0]]
    V, last = [torch.empty_like(w) for w in R], len(R) - 1
    widths = [R[0].shape[1], *(w.shape[0] for w in R)]
    coordinates = [torch.randn(n, *space.shape).to(R[0]) for n in (k, widths[0])]  # c, and the basis

    def activations() -> list[Tensor]:
        return [torch.randn(k, width).to(R[0]) for width in widths]

    h, δ, ḣ, z̄, out = (activations() for _ in range(5))

    def step() -> None:
        if shape.span:
            torch.mm(coordinates[0], coordinates[1].T, out=out[0])  # x
        for W_s in W:
            for j, w in enumerate(W_s):
                torch.mm(h[j], w.T, out=out[j + 1])  # z
            for j in range(last, 0, -1):
                torch.mm(δ[j + 1], W_s[j], out=out[j])  # u
            for j in range(1, last + 1):
                torch.mm(δ[j + 1].T, h[j], out=V[j])
                torch.mm(h[j], R[j].T, out=out[j + 1])  # ż
                out[j + 1].addmm_(ḣ[j], W_s[j].T)
                torch.mm(δ[j + 1], R[j], out=out[j])  # h̄
                if j < last:
                    out[j].addmm_(z̄[j + 1], W_s[j])
            out[0].addmm_(z̄[1], W_s[0])  # x̄
        torch.mm(δ[1].T, h[0], out=V[0])  # the nodes share what is linear in δ_1
        torch.mm(h[0], R[0].T, out=out[1])
        torch.mm(δ[1], R[0], out=out[0])
        if shape.span:
            torch.mm(h[0], coordinates[1], out=coordinates[0])  # x̄, in coordinates

    if not R[0].is_cuda:
        return partial(_repeat, step)
    with Execution().matrix_precision(device):
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

"""One step, as each contender does it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import palimpsest as pal
from palimpsest.errors import InvalidInputError
from palimpsest.execution import MODES, Execution, Mode
from palimpsest.execution.fusion import available
from palimpsest.objectives.smoothing import Smoothed
from palimpsest.objectives.spaces import Everywhere
from palimpsest.solver import memory
from palimpsest.solver.loop import Settings, Solver

β = 20.0
ENDLESS = 10**9  # steps: a run so long that the automatic mode is the fastest, and nothing is recorded
Run = Callable[[int], None]
"""Does so many steps."""


@dataclass(frozen=True)
class Shape:
    """A perceptron d–m–…–m–1 for images, and k candidates.

    >>> Shape().name
    '625–500–500–1, k = 80'
    """

    image: tuple[int, ...] = (1, 25, 25)
    hidden: tuple[int, ...] = (500, 500)
    candidates: int = 80

    def __post_init__(self) -> None:
        if not self.image or not self.hidden or min(*self.image, *self.hidden, self.candidates) < 1:
            raise InvalidInputError("sides of the image, hidden layers and candidates must be at least 1")

    @classmethod
    def usual(cls, device: torch.device) -> Shape:
        """What a device is there for: the demo on a CPU, a thousand candidates of CIFAR-10 on CUDA."""
        return cls((3, 32, 32), (1000, 1000), 1000) if device.type == "cuda" else cls()

    @property
    def inputs(self) -> int:
        """d."""
        return math.prod(self.image)

    @property
    def name(self) -> str:
        return f"{'–'.join(map(str, (self.inputs, *self.hidden, 1)))}, k = {self.candidates}"


def contenders(shape: Shape, device: torch.device) -> dict[str, Callable[[], Run]]:
    """What makes each of them ready, by name."""
    torch.manual_seed(0)
    model = pal.networks.MLP(shape.image, shape.hidden).to(device)
    modes = [mode for mode in MODES if _possible(mode, device)]
    return {
        "published float64": partial(_published, model, shape, torch.float64),
        "published float32": partial(_published, model, shape, torch.float32),
        **{
            f"any network, {mode}": partial(_ours, model, shape, mode, dense=False)
            for mode in modes
            if "compiled" not in mode
        },
        **{mode: partial(_ours, model, shape, mode) for mode in modes},
        "floor": partial(_floor, model, shape),
    }


def automatic(device: torch.device) -> Mode:
    """The contender that a long run takes by itself."""
    return Execution().resolved(device, ENDLESS)


def estimated_megabytes(shape: Shape) -> float:
    """What the intermediate results of our step are reckoned to take when the size of chunks is chosen."""
    objective = pal.KKT(pal.networks.MLP(shape.image, shape.hidden), sharpness=β)
    x = torch.zeros(shape.candidates, *shape.image)
    return shape.candidates * memory.bytes_per_candidate(objective, x) / 1e6


def _possible(mode: Mode, device: torch.device) -> bool:
    return (device.type == "cuda" or "graph" not in mode) and ("compiled" not in mode or available(device))


# --- the contenders ---------------------------------------------------------------------------------


def _ours(model: nn.Module, shape: Shape, mode: Mode, *, dense: bool = True) -> Run:
    settings = Settings(candidates=shape.candidates, steps=ENDLESS, record_every=ENDLESS)
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

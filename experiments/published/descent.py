"""Gradient descent as the authors run it, for up to a million steps: several networks at once, in one CUDA graph.

The networks are stacks of dense layers with ReLUs, and all of one shape. With the images X = S Qᵀ as rows, the first
layer sees S alone and moves in the columns of Q alone, so that it is trained in these coordinates:

    W_1 = W_1(0) + (A − A(0)) Qᵀ,    A(0) = W_1(0) Q.

Weight decay δ also shrinks the part of W_1(0) outside of Q, by 1 − ηδ in each step.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, one_hot, pad

from palimpsest.files.storage import load_tensors, save_tensors
from palimpsest.training import LossName

SAVE_EVERY = 60.0  # seconds
UNROLLED = 10  # steps in one CUDA graph
ALIGNED = 8  # numbers in a row: tensor cores work on multiples of it
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Span:
    """X = S Qᵀ, with the signs that make it unique, so that a file of A can be read on another machine."""

    S: Tensor
    Q: Tensor

    @classmethod
    def of(cls, images: Tensor) -> Span:
        X = images.flatten(1).double()
        Q, R = torch.linalg.qr(X.T)
        size = R.diagonal().abs()
        Q = (Q * R.diagonal().sign())[:, size > 1e-9 * size.max()]  # centred images sum to zero: the last adds nothing
        return cls(X @ Q, Q)


@dataclass
class Descent:
    """B networks that are trained at once. Their weights are added up in float64, whatever the products use.

    Args:
        starts: the networks before training.
        images: of each network, as it sees them.
        labels: ±1, or classes.
        loss: the mean over images of (Φ − y)², log(1 + e^{−yΦ}), or the cross-entropy.
        rate: η.
        momentum: μ in v ← μv − η∇L, θ ← θ + v.
        decay: δ in L + ½δ‖θ‖².
        stop: the loss at which a network stays as it is. It is looked at when a record is made.
        dtype: of products; float32 may be TF32, as the caller sets it.
    """

    starts: Sequence[nn.Module]
    images: Sequence[Tensor]
    labels: Sequence[Tensor]
    loss: LossName
    rate: float
    momentum: float = 0.0
    decay: float = 0.0
    stop: float = 0.0
    dtype: torch.dtype = torch.float64
    step: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.momentum and self.decay:
            raise ValueError("no recipe has both momentum and weight decay; decay would have to enter the velocity")
        layers = [[layer for layer in start.modules() if isinstance(layer, nn.Linear)] for start in self.starts]
        self.device = layers[0][0].weight.device
        self.spans = [Span.of(images.to(self.device)) for images in self.images]
        rank = max(span.S.shape[1] for span in self.spans)
        rank += -rank % ALIGNED
        S = torch.stack([pad(span.S, (0, rank - span.S.shape[1])) for span in self.spans])
        self._S = S.to(self.dtype)
        first = [
            pad(of[0].weight.double() @ s.Q, (0, rank - s.Q.shape[1])) for of, s in zip(layers, self.spans, strict=True)
        ]
        self.W = [torch.stack(first).detach()]
        self.W += [torch.stack([of[at].weight.detach().double() for of in layers]) for at in range(1, len(layers[0]))]
        self.b = [
            None if layers[0][at].bias is None else torch.stack([of[at].bias.detach().double()[None] for of in layers])
            for at in range(len(layers[0]))
        ]
        self._A = self.W[0].clone()
        outputs = layers[0][-1].out_features
        y = torch.stack([labels.to(self.device) for labels in self.labels])
        self._y = (y[..., None] if outputs == 1 else one_hot(y.long(), outputs)).to(self.dtype)
        self._moving = torch.ones(len(layers), 1, 1, dtype=torch.float64, device=self.device)
        self._v = [torch.zeros_like(p) for p in self._parameters()] if self.momentum else []
        self._graph: torch.cuda.CUDAGraph | None = None

    def _parameters(self) -> list[Tensor]:
        return [*self.W, *(b for b in self.b if b is not None)]

    # --- one step -------------------------------------------------------------------------------

    def _forward(self, W: list[Tensor], b: list[Tensor | None]) -> list[Tensor]:
        """S, and what each layer makes of it; the last are the outputs Φ."""
        h = [self._S]
        for at, (weight, bias) in enumerate(zip(W, b, strict=True)):
            z = torch.bmm(h[-1], weight.mT) if bias is None else torch.baddbmm(bias, h[-1], weight.mT)
            h.append(z.relu_() if at < len(W) - 1 else z)
        return h

    def _pull(self, Φ: Tensor) -> Tensor:
        """∂L/∂Φ."""
        n = Φ.shape[1]
        if self.loss == "squared":
            return 2 * (Φ - self._y) / n
        if self.loss == "logistic":
            return -self._y * torch.sigmoid(-self._y * Φ) / n
        return (torch.softmax(Φ, 2) - self._y) / n

    def _once(self) -> None:
        W = [p.to(self.dtype) for p in self.W]
        b = [None if p is None else p.to(self.dtype) for p in self.b]
        h = self._forward(W, b)
        δ = self._pull(h[-1]) * (-self.rate * self._moving).to(self.dtype)  # −η times the gradient, from here on
        changes: list[Tensor] = []
        of_biases: list[Tensor] = []
        for at in reversed(range(len(W))):
            changes.insert(0, torch.bmm(δ.mT, h[at]))
            if self.b[at] is not None:
                of_biases.insert(0, δ.sum(1, keepdim=True))
            if at:
                δ = torch.bmm(δ, W[at]).mul_(h[at] > 0)
        for number, (p, change) in enumerate(zip(self._parameters(), [*changes, *of_biases], strict=True)):
            if self.decay:
                p.mul_(1 - self.rate * self.decay * self._moving)
            if self.momentum:
                v = self._v[number]
                p.add_(v.mul_(self.momentum * self._moving).add_(change))
            else:
                p.add_(change)

    def run(self, steps: int) -> None:
        """So many steps more."""
        whole = 0
        if self.device.type == "cuda":
            if self._graph is None:
                kept = [p.clone() for p in (*self._parameters(), *self._v)]
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for _ in range(3):
                        self._once()
                torch.cuda.current_stream().wait_stream(side)
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph):
                    for _ in range(UNROLLED):
                        self._once()
                for p, before in zip((*self._parameters(), *self._v), kept, strict=True):
                    p.copy_(before)
            whole = steps // UNROLLED
            for _ in range(whole):
                self._graph.replay()
        for _ in range(steps - whole * UNROLLED):
            self._once()
        self.step += steps

    # --- from outside ---------------------------------------------------------------------------

    @torch.no_grad()
    def train(
        self,
        steps: int,
        *,
        record_every: int,
        tell: Callable[[int, list[float]], object],
        also: Collection[int] = (),
        checkpoint: Path | None = None,
    ) -> None:
        """All steps, with a record of the losses now and then; goes on from the checkpoint if there is one.

        Records are made every so many steps, and after the steps ``also``.
        """
        if checkpoint is not None and checkpoint.exists():
            self._load(checkpoint)
        saved = time.monotonic()
        while self.step < steps and bool(self._moving.any()):
            regular = self.step - self.step % record_every + record_every
            self.run(min([steps, regular, *(step for step in also if step > self.step)]) - self.step)
            losses = self.losses()
            self._moving.mul_((losses > self.stop).to(self._moving)[:, None, None])
            tell(self.step, losses.tolist())
            if checkpoint is not None and time.monotonic() > saved + SAVE_EVERY:
                self._save(checkpoint)
                saved = time.monotonic()

    @torch.no_grad()
    def losses(self) -> Tensor:
        """L of each network, in the precision of the products."""
        Φ = self._forward(
            [p.to(self.dtype) for p in self.W], [None if p is None else p.to(self.dtype) for p in self.b]
        )[-1]
        if self.loss == "squared":
            return (Φ - self._y).square().sum(2).mean(1).double()
        if self.loss == "logistic":
            return -logsigmoid((self._y * Φ).double()).mean((1, 2))
        return -(torch.log_softmax(Φ.double(), 2) * self._y).sum(2).mean(1)

    def changes(self, number: int) -> Weights:
        """What a file keeps of one network: A − A(0), and the other layers whole."""
        rank = self.spans[number].S.shape[1]
        layers = {f"W{at + 1}": p[number].clone() for at, p in enumerate(self.W)}
        layers |= {f"b{at + 1}": p[number, 0].clone() for at, p in enumerate(self.b) if p is not None}
        return layers | {"W1": (self.W[0] - self._A)[number, :, :rank].clone()}

    def _state(self) -> Weights:
        return {f"p{i}": p for i, p in enumerate((*self._parameters(), *self._v))} | {"moving": self._moving}

    @property
    def _identity(self) -> str:
        """Of the recipe, the starts and the images: a file of another training is not continued."""
        recipe = [self.loss, self.rate, self.momentum, self.decay, self.stop, str(self.dtype), *self._A.shape]
        digest = hashlib.sha256(repr(recipe).encode())
        for t in (self._A, self._S, self._y):
            digest.update(t.cpu().numpy().tobytes())
        return digest.hexdigest()

    def _save(self, file: Path) -> None:
        save_tensors(file, self._state(), {"step": self.step, "identity": self._identity})

    def _load(self, file: Path) -> None:
        tensors, description = load_tensors(file)
        if description["identity"] != self._identity:
            raise ValueError(f"{file} belongs to another training; delete it")
        for name, p in self._state().items():
            p.copy_(tensors[name])
        self.step = description["step"]


@torch.no_grad()
def put_into(model: nn.Module, images: Tensor, kept: Weights, *, shrinkage: float = 1.0) -> None:
    """Give a network at its start the weights after training that `Descent.changes` kept.

    ``shrinkage`` is (1 − ηδ)^steps, for the part of W_1 that the images do not move.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    for number, layer in enumerate(layers, 1):
        W, p = kept[f"W{number}"].to(layer.weight.device).double(), layer.weight
        if number == 1:
            Q = Span.of(images.to(p.device)).Q
            start = p.double()
            W = start + W @ Q.T + (shrinkage - 1) * (start - start @ Q @ Q.T)
        p.copy_(W)
        if layer.bias is not None:
            layer.bias.copy_(kept[f"b{number}"].to(p.device))

"""Rounds of federated learning: the weights that a server sent, and the change that came back.

``--updates`` names files, folders or patterns. Each round has the global weights and the answers of its clients. The
names say which is which; the suffix is that of any format that Palimpsest reads:

=============================  ==========================================================================
round-03-global.safetensors    the weights that the clients received
round-03-client.safetensors    a client's weights after its training, or
round-03-delta.safetensors     its change: the client's weights minus the global weights
=============================  ==========================================================================

Several clients are ``round-03-client-a``, ``round-03-client-b`` and so on, or the same with ``delta``. The target is
the mean of their changes. Answers may leave out buffers and frozen parameters.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from palimpsest.errors import WeightsError
from palimpsest.files import weights
from palimpsest.files.series import Sources, gathered

NAME = re.compile(r"round[-_]?(?P<number>[0-9]+)[-_](?P<kind>global|client|delta)([-_][^.]+)?(\.\w+)?(\.index\.json)?")


@dataclass(frozen=True)
class FederatedRound:
    """One round: θ, and T, the mean change of the clients' weights."""

    number: int
    weights: dict[str, Tensor]
    """θ, the global state dict, by the network's names."""
    change: dict[str, Tensor]
    """T, by the names of the trainable parameters."""
    clients: int
    sources: tuple[str, ...]
    """The files, with remarks on how they were read."""


def rounds(model: nn.Module, sources: Sources, *, key: str | None = None) -> list[FederatedRound]:
    """Read the rounds of federated learning, in order, with the network's names and in its precision.

    Args:
        model: the network. It does not change.
        sources: files, folders or patterns; the names of the files follow the convention above.
        key: the entry of each file that holds the weights.

    Examples:
        >>> import tempfile
        >>> folder, model = Path(tempfile.mkdtemp()), nn.Linear(2, 1)
        >>> for name, value in {"global": 1.0, "client-a": 3.0, "client-b": 2.0}.items():
        ...     torch.save({"weight": torch.full((1, 2), value), "bias": torch.ones(1)}, folder / f"round-1-{name}.pt")
        >>> [(each.number, each.clients, each.change["weight"].tolist()) for each in rounds(model, folder)]
        [(1, 2, [[1.5, 1.5]])]
    """
    by_number: dict[int, dict[str, list[Path]]] = defaultdict(lambda: defaultdict(list))
    for path in gathered(sources):
        if (name := NAME.fullmatch(path.name)) is None:
            raise WeightsError(f"{path} is not named like round-03-global.safetensors; rename it, or leave it out")
        by_number[int(name["number"])][name["kind"]].append(path)
    return [_round(model, number, by_number[number], key) for number in sorted(by_number)]


def _round(model: nn.Module, number: int, paths: Mapping[str, list[Path]], key: str | None) -> FederatedRound:
    """θ, and T = (1/c) Σ_client (θ_client − θ), or the mean of the clients' own changes."""
    given = {kind: paths.get(kind, []) for kind in ("global", "client", "delta")}
    if len(given["global"]) != 1 or bool(given["client"]) == bool(given["delta"]):
        held = ", ".join(path.name for each in given.values() for path in each)
        raise WeightsError(f"round {number} has {held}; give one global file, and either client or delta files")
    start = weights.find(given["global"][0], key)
    θ = weights.fitted(model, start.tensors, what=f"the weights of {start.source}")
    base = θ if given["client"] else {name: torch.zeros_like(t) for name, t in θ.items()}
    answers = [weights.find(path, key) for path in given["client"] or given["delta"]]
    trained = [_complete(model, answer, base) for answer in answers]
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    T = {name: torch.stack([each[name] - base[name] for each in trained]).mean(0) for name in names}
    if not any(t.any() for t in T.values()):
        raise WeightsError(f"the clients of round {number} do not change a parameter; check {answers[0].source}")
    return FederatedRound(number, θ, T, len(answers), tuple(map(str, (start, *answers))))


def _complete(model: nn.Module, answer: weights.Found, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A client's answer. Buffers and frozen parameters that it leaves out are those of the base."""
    needed = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    partial = any(name in base for name in answer.tensors)
    left_out = {name: t for name, t in base.items() if name not in needed} if partial else {}
    return weights.fitted(model, left_out | answer.tensors, what=f"the weights of {answer.source}")

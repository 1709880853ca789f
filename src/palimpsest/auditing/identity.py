"""Which audit a folder holds: its options, its network, its weights and its images.

Weights and images are known by their checksum. A network is known by its outputs on a fixed probe, because weights
alone do not tell a ReLU from a tanh, and code may change without changing what it computes.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from palimpsest.auditing.subject import Factory, Subject
from palimpsest.auditing.truth import Truth
from palimpsest.errors import RunFolderError
from palimpsest.runs.folder import RunFolder
from palimpsest.runs.journal import note

PROBES, PROBED = 2, 64  # images by which a network is known again, and outputs of each
ALIKE = 1e-3  # of the largest output: more than another machine's rounding, less than another network's difference


def claim(
    folder: RunFolder, examined: Subject, network: str | Factory, asked: Mapping[str, Any], truth: Truth | None
) -> None:
    """Make the folder this audit's; refuse it if it is another's."""
    mine = {"options": dict(asked), "image_shape": list(examined.image_shape), "identity": _identity(examined, truth)}
    code, outputs = _code(network), _outputs(examined)
    if not (folder.path / "config.json").exists():
        folder.write_config({"audit": mine | {"network": {"code": code, "outputs": outputs}}})
    other: Any = folder.config.get("audit")
    if what := _what_differs(other, mine, outputs):
        raise RunFolderError(f"{folder.path} holds another run ({what}); choose another folder, or repeat its command")
    if other["network"]["code"] != code:
        note("the code of the network changed, but it gives the same outputs")


def _what_differs(other: Any, mine: Mapping[str, Any], outputs: list[float]) -> str:
    """In what the audit that a folder holds is another one; nothing if it is this one."""
    if not isinstance(other, dict) or other.keys() != {*mine, "network"}:
        return "it is no audit"
    names = [name for name, value in mine["options"].items() if other["options"].get(name) != value]
    names += [] if other["identity"] == mine["identity"] else ["weights or images"]
    names += [] if _alike(other["network"]["outputs"], outputs) else ["network"]
    if names:
        return f"with other {', '.join(names)}"
    return "" if {name: other[name] for name in mine} == mine else "of another version"


def _code(network: str | Factory) -> dict[str, str | None]:
    """The name of the network's code, and a checksum of it where it can be read."""
    name = network if isinstance(network, str) else getattr(network, "__qualname__", type(network).__qualname__)
    place = name.rpartition(":")[0]
    try:
        if not isinstance(network, str):
            source = inspect.getsource(network).encode()
        else:
            source = Path(place if place.endswith(".py") else inspect.getfile(sys.modules[place])).read_bytes()
    except (OSError, TypeError, KeyError):  # made in a console, or compiled
        return {"name": name, "sha256": None}
    return {"name": name, "sha256": hashlib.sha256(source).hexdigest()}


def _outputs(examined: Subject) -> list[float]:
    """What the network says to a fixed probe: weights alone do not tell a ReLU from a tanh."""
    probe = 0.2 * torch.randn(PROBES, *examined.image_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return examined.model(probe).reshape(PROBES, -1)[:, :PROBED].flatten().tolist()


def _alike(before: list[float], now: list[float]) -> bool:
    """Compared by how the probes differ from each other: a large bias, which they share, says little."""
    a, b = (torch.tensor(x).double() for x in (before, now))
    if a.shape != b.shape:
        return False
    a, b = (x.view(PROBES, -1) - x.view(PROBES, -1).mean(0) for x in (a, b))
    spread = float(torch.where(b.isfinite(), b, 0.0).abs().max())
    rounding = torch.finfo(torch.float32).eps * max(map(abs, now), default=0.0)
    return torch.allclose(a, b, rtol=0, atol=ALIKE * spread + 16 * rounding, equal_nan=True)


def _identity(examined: Subject, truth: Truth | None) -> str:
    digest = hashlib.sha256()
    tensors = [*examined.model.state_dict().values(), *(examined.initial or {}).values()]
    if truth is not None:
        tensors += [truth.seen, truth.labels, *([] if truth.held_out is None else [truth.held_out])]
    for t in tensors:
        digest.update(f"{t.dtype} {tuple(t.shape)}".encode() + t.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()

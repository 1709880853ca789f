"""Which audit a folder holds: its options, its network, its weights and its images.

Weights and images are recognised by their checksum. A network is recognised by its outputs on a fixed probe: weights
alone do not distinguish a ReLU from a tanh, and code may change without changing the outputs.
"""

import hashlib
import inspect
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from tokenize import TokenError
from typing import Any

import torch

from palimpsest.auditing.options import Options
from palimpsest.auditing.subject import PROBES, Factory, Subject, probe
from palimpsest.auditing.truth import Truth
from palimpsest.errors import RunFolderError
from palimpsest.runs.folder import RunFolder
from palimpsest.runs.journal import note

MOST_OUTPUTS = 64  # per probe
TOLERANCE = 1e-3  # of the largest output: above the rounding of other machines, below the difference of other networks


def claim(folder: RunFolder, examined: Subject, network: str | Factory, options: Options, truth: Truth | None) -> None:
    """Make the folder this audit's, or refuse it if it holds another run."""
    asked = json.loads(json.dumps({name: value for name, value in asdict(options).items() if name != "minutes"}))
    mine = {"options": asked, "image_shape": list(examined.image_shape), "identity": _checksum(examined, truth)}
    with torch.no_grad():
        outputs = examined.model(probe(examined.image_shape)).reshape(PROBES, -1)[:, :MOST_OUTPUTS].flatten().tolist()
    code = code_of(network)
    if not (folder.path / "config.json").exists():
        folder.write_config({"audit": mine | {"network": {"code": code, "outputs": outputs}}})
    other: Any = folder.config.get("audit")
    if difference := _difference(other, mine, outputs):
        raise RunFolderError(
            f"{folder.path} holds another run ({difference}); choose another folder, or repeat its command"
        )
    if other["network"]["code"] != code:
        note("the code of the network changed, but it gives the same outputs")


def _difference(other: Any, mine: Mapping[str, Any], outputs: list[float]) -> str:
    """How the audit in a folder differs from this one; empty if it does not."""
    if not isinstance(other, dict) or other.keys() != {*mine, "network"}:
        return "not an audit"
    names = [name for name, value in mine["options"].items() if other["options"].get(name) != value]
    if other["identity"] != mine["identity"]:
        names.append("weights or images")
    elif not _close(other["network"]["outputs"], outputs):  # other weights have other outputs anyway
        names.append("network")
    if names:
        return f"with other {', '.join(names)}"
    return "" if {name: other[name] for name in mine} == mine else "of another version"


def code_of(network: str | Factory) -> dict[str, str | None]:
    """The name of the network's code, and its checksum if it can be read."""
    name = network if isinstance(network, str) else getattr(network, "__qualname__", type(network).__qualname__)
    place = name.rpartition(":")[0]
    try:
        if not isinstance(network, str):
            source = inspect.getsource(network).encode()
        else:
            source = Path(place if place.endswith(".py") else inspect.getfile(sys.modules[place])).read_bytes()
    except (OSError, TypeError, KeyError, SyntaxError, TokenError):  # made in a console or a page, or compiled
        return {"name": name, "sha256": None}
    return {"name": name, "sha256": hashlib.sha256(source).hexdigest()}


def _close(before: list[float], now: list[float]) -> bool:
    """Whether outputs differ between the probes in the same way. A large bias, which all share, is left out."""
    a, b = (torch.tensor(x).double() for x in (before, now))
    if a.shape != b.shape:
        return False
    a, b = (x.view(PROBES, -1) - x.view(PROBES, -1).mean(0) for x in (a, b))
    spread = float(torch.where(b.isfinite(), b, 0.0).abs().max())
    rounding = torch.finfo(torch.float32).eps * max(map(abs, now), default=0.0)
    return torch.allclose(a, b, rtol=0, atol=TOLERANCE * spread + 16 * rounding, equal_nan=True)


def _checksum(examined: Subject, truth: Truth | None) -> str:
    checksum = hashlib.sha256()
    states = [examined.model.state_dict(), examined.initial, examined.moment]
    states += [state for segment in examined.segments for state in segment]
    tensors = [t for state in states for t in (state or {}).values()]
    if truth is not None:
        tensors += [truth.seen, truth.labels, *([] if truth.held_out is None else [truth.held_out])]
    for t in tensors:
        checksum.update(f"{t.dtype} {tuple(t.shape)}".encode() + t.detach().cpu().contiguous().numpy().tobytes())
    return checksum.hexdigest()

"""What is audited: any network, made by its author's own code, with the weights that are to be published."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from palimpsest import smoothing, weights
from palimpsest.errors import InvalidInputError, PalimpsestError

Factory = Callable[[], nn.Module]
PROBE_SHARPNESS = 10.0  # any will do: a network that can be smoothed at one sharpness can be at all


@dataclass(frozen=True)
class Subject:
    """A trained network in evaluation mode, its start if known, and the shape of what it sees."""

    model: nn.Module
    initial: dict[str, Tensor] | None
    image_shape: tuple[int, ...]
    outputs: int
    fresh: Factory
    """Another network of the same kind, newly initialised: the material of controls."""


def subject(
    network: str | Factory,
    trained: Path | str | Mapping[str, Tensor],
    *,
    initial: Path | str | Mapping[str, Tensor] | None = None,
    image_shape: Sequence[int],
) -> Subject:
    """The network with its weights, refused by the layer's name if no method can differentiate it."""
    if len(image_shape) != 3 or min(image_shape) < 1:
        raise InvalidInputError(f"the shape is {tuple(image_shape)}; give channels, height and width, such as 1,28,28")
    fresh = guarded(factory(network) if isinstance(network, str) else network)
    model = fresh()
    weights.fit_into(model, _weights(trained))
    start = None if initial is None else _fitted(fresh(), _weights(initial))
    shape = tuple(image_shape)
    return Subject(model, start, shape, _outputs(model, shape), fresh)


def factory(specification: str) -> Factory:
    """The function that ``package.module:factory`` or ``path/to/file.py:factory`` names."""
    place, _, name = specification.rpartition(":")
    if not place or not name.isidentifier():
        raise InvalidInputError(f"{specification!r} names no factory; write package.module:factory or file.py:factory")
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    except PalimpsestError:
        raise
    except (Exception, SystemExit) as error:  # it is the user's code: it may raise anything
        raise InvalidInputError(f"importing {place} failed with {_told(error)}; run it by itself first") from error
    made = getattr(module, name, None)
    if not callable(made):
        raise InvalidInputError(f"{place} has no function {name}; name one that returns the network")
    return made


def guarded(make: Factory) -> Factory:
    """The factory, its failures told in one sentence and its networks in evaluation mode and single precision."""

    def fresh() -> nn.Module:
        try:
            model = make()
        except (Exception, SystemExit) as error:
            raise InvalidInputError(
                f"the factory failed with {_told(error)}; it must work when called without arguments"
            ) from error
        if not isinstance(model, nn.Module):
            raise InvalidInputError(f"the factory returned a {type(model).__name__}; it must return an nn.Module")
        return model.eval().float()

    return fresh


def _import_file(path: Path):
    if not path.is_file():
        raise InvalidInputError(f"there is no file {path}; check the path of the network")
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.path.insert(0, str(path.parent.resolve()))  # the file may import its neighbours
    sys.modules[path.stem] = module
    specification.loader.exec_module(module)
    return module


def _import_module(name: str):
    sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def _told(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _weights(source: Path | str | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return source if isinstance(source, Mapping) else weights.load(source)


def _fitted(model: nn.Module, start: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The initial weights as the network holds them, after checking that they are weights of this network."""
    weights.fit_into(model, start)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _outputs(model: nn.Module, shape: tuple[int, ...]) -> int:
    """How many outputs the network has; raises the named reason if it cannot be read."""
    probe = 0.2 * torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    try:
        smoothing.check(model, probe, PROBE_SHARPNESS)
        with torch.no_grad():
            return math.prod(model(probe).shape[1:])
    except PalimpsestError:
        raise
    except Exception as error:
        shown = ",".join(map(str, shape))
        raise InvalidInputError(f"the network does not take images of shape {shown}: {_told(error)}") from error

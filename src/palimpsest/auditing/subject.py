"""The network that is audited: made by its author's code, with the weights that are to be published."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from palimpsest.auditing.relation import check_one_training
from palimpsest.errors import InvalidInputError, PalimpsestError, UnsupportedNetworkError
from palimpsest.files import weights
from palimpsest.files.series import InMemory, Sources, series
from palimpsest.files.updates import rounds
from palimpsest.methods import moments
from palimpsest.methods.trail import better_order, spread
from palimpsest.objectives import smoothing
from palimpsest.runs.problems import Rule

Factory = Callable[..., nn.Module]
Weights = Mapping[str, Tensor]
PROBE_SHARPNESS = 10.0  # a network that can be smoothed at one sharpness can be smoothed at all
PROBES = 2  # images that a network is tried on
NOT_READ = "the optimiser's state is not read"
MOST_SEGMENTS = 4  # between checkpoints
MOST_CHANNELS = 4  # of an image whose channels are taken to come last


@dataclass(frozen=True)
class Subject:
    """A trained network in evaluation mode, its initial weights if known, and the shape of its input."""

    model: nn.Module
    initial: dict[str, Tensor] | None
    image_shape: tuple[int, ...]
    outputs: int
    fresh: Factory
    """Makes another network of the same kind, newly initialised, for controls."""
    remarks: tuple[str, ...] = ()
    """Remarks on how the network and its weights were read."""
    segments: tuple[tuple[Weights, Weights], ...] = ()
    """The weights before and after each segment of the training, if some on the way are known."""
    moment: Weights | None = None
    """The first moment in the optimiser's state, if the file of the final weights holds one."""
    optimiser: Mapping[str, Any] | None = None
    """The state dict that holds this moment."""
    start_given: bool = True
    """Whether `initial` was given itself. If not, it is the first checkpoint."""
    doubts: tuple[str, ...] = ()
    """Signs that a wrong file was given."""
    rule: Rule | None = None
    """The optimiser of the training, if the file of the final weights holds its state."""
    continues: bool = True
    """Whether each segment continues the training of the last one. Federated clients begin again in each round."""

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process, the network goes as its weights and the factory that makes it."""
        others = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "model"}
        return _received, (self.model.state_dict(), others)


def _received(trained: Weights, others: Mapping[str, Any]) -> Subject:
    model = others["fresh"]()
    model.load_state_dict(trained)
    return Subject(model, **others)


def subject(
    network: str | Factory,
    trained: Path | str | Mapping[str, Tensor],
    *,
    network_args: Mapping[str, Any] | None = None,
    initial: Path | str | Mapping[str, Tensor] | None = None,
    image_shape: Sequence[int],
    key: str | None = None,
    initial_key: str | None = None,
    checkpoints: Sources | InMemory | None = None,
    updates: Sources | None = None,
) -> Subject:
    """Load weights into the network that is to be audited.

    A network that cannot be differentiated twice is refused, with the name of the layer.

    Args:
        network: a function that makes the network, or its place, as for `pal.audit`.
        trained: the final weights, a state dict or a file that holds one.
        network_args: keyword arguments of that function.
        initial: the weights before training, if known.
        image_shape: channels, height and width of the network's input.
        key: the entry of the file that holds the weights.
        initial_key: the same for the file of the initial weights.
        checkpoints: weights on the way, as for `pal.audit`.
        updates: rounds of federated learning, as for `pal.audit`.

    Examples:
        >>> from palimpsest.networks import MLP
        >>> examined = subject(lambda: MLP((1, 4, 4), (3,)), MLP((1, 4, 4), (3,)).state_dict(), image_shape=(1, 4, 4))
        >>> examined.outputs, examined.initial is None
        (1, True)
    """
    if len(image_shape) != 3 or min(image_shape) < 1:
        raise InvalidInputError(f"the shape is {tuple(image_shape)}; give channels, height and width, such as 1,28,28")
    if min(image_shape[:2]) > MOST_CHANNELS and image_shape[2] in (1, 3, 4):
        meant = ",".join(map(str, (image_shape[2], *image_shape[:2])))
        given = ",".join(map(str, image_shape))
        raise InvalidInputError(f"the shape is {given}, with its channels last; did you mean {meant}?")
    if isinstance(network, nn.Module):
        raise InvalidInputError("the network is a module; give a function that makes it, such as lambda: network")
    shape = tuple(image_shape)
    make = factory(network) if isinstance(network, str) else network
    fresh = Guarded(partial(make, **(network_args or {})), shape)
    model = fresh()
    end = _fitted(model, trained, key, "the final weights")
    start = None if initial is None else _fitted(model, initial, initial_key, "the initial weights")
    model.load_state_dict(end.tensors)
    with _refusing_failures(shape):
        smoothing.check(model, probe(shape), PROBE_SHARPNESS)
    outputs = math.prod(_outputs(model, shape).shape[1:])
    remarks = [f"the final weights are those of {end}"]
    remarks += [] if start is None else [f"the initial weights are those of {start}"]
    segments, more, order = _segments(model, start, end, checkpoints, updates, key)
    moment, about = _moment(model, end.optimiser)
    first = segments[0][0] if checkpoints is not None and start is None else None if start is None else start.tensors
    known = None if first is None else dict(first)
    told = (*remarks, *more, *about)
    optimiser = moment and end.optimiser
    return Subject(
        model, known, shape, outputs, fresh, told, tuple(segments), moment, optimiser, start is not None,
        doubts=(*_later(start, end), *order), rule=None if updates else _rule(end.optimiser), continues=updates is None,
    )  # fmt: skip


def _fitted(model: nn.Module, source: Path | str | Mapping[str, Tensor], key: str | None, what: str) -> weights.Found:
    """Weights for the network, apart from the caller's."""
    found = weights.find(source, key)
    fitted = weights.fitted(model, found.tensors, what=f"{what} ({found.source})")
    return replace(found, tensors={name: t.clone() for name, t in fitted.items()})


def _later(start: weights.Found | None, end: weights.Found) -> tuple[str, ...]:
    """A doubt if the initial weights come from a later step or epoch than the final ones."""
    for name, step in () if start is None else start.counters.items():
        if step > end.counters.get(name, step):
            count = f"{name} is {step:g} in the initial weights and {end.counters[name]:g} in the final ones"
            return (f"the files --weights and --initial may be swapped: {count}",)
    return ()


def _segments(
    model: nn.Module,
    start: weights.Found | None,
    end: weights.Found,
    checkpoints: Sources | InMemory | None,
    updates: Sources | None,
    key: str | None,
) -> tuple[list[tuple[Weights, Weights]], list[str], list[str]]:
    """(θ_{j−1}, θ_j) between checkpoints, or before and after the client's training in each round; remarks; doubts."""
    if checkpoints is not None and updates is not None:
        raise InvalidInputError("there are checkpoints and updates; audit either --checkpoints or --updates")
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    if checkpoints is not None:
        way = series(model, checkpoints, key=key, initial=start, trained=end)
        check_one_training([(found.source, found.tensors) for found in way], names)
        states = [{name: found.tensors[name] for name in names} for found in way]
        order = [Path(way[j].source).name for j in better_order(states)]
        doubts = [f"the checkpoints may be in another order: by their weights, {', '.join(order)}"] if order else []
        chosen = spread(states, MOST_SEGMENTS)
        remarks = [f"checkpoint {j + 1} of {len(way)} is {way[j]}" for j in chosen]
        if len(chosen) < len(way):
            remarks += [f"the audit uses these {len(chosen)}: more checkpoints take longer and read little more"]
        return list(pairwise(way[j].tensors for j in chosen)), remarks, doubts
    every = [] if updates is None else rounds(model, updates, key=key)
    remarks = [f"round {each.number} is {', '.join(each.sources)}" for each in every]
    after = [{name: t + each.change.get(name, 0) for name, t in each.weights.items()} for each in every]
    for each, θ in zip(every, after, strict=True):
        check_one_training([(each.sources[0], each.weights), (f"the clients of round {each.number}", θ)], names)
    sent = [(each.sources[0], each.weights) for each in every]
    check_one_training([*sent, (end.source, end.tensors)] if sent else [], names)
    return [(each.weights, θ) for each, θ in zip(every, after, strict=True)], remarks, []


def _rule(optimiser: Mapping | None) -> Rule | None:
    """By the settings of Adam and AdamW, or of SGD, in the optimiser's state."""
    settings = {name for group in (optimiser or {}).get("param_groups", ()) for name in group}
    if {"betas", "amsgrad"} <= settings:
        return "adam"
    return "sgd" if {"momentum", "nesterov"} <= settings else None


def _moment(model: nn.Module, optimiser: Mapping | None) -> tuple[Weights | None, list[str]]:
    """The first moment that the optimiser kept, and a remark on it."""
    if optimiser is None:
        return None, []
    try:
        moment = moments(model, optimiser)
    except InvalidInputError as error:
        return None, [f"{NOT_READ}: {error}"]
    if not any(bool(m.any()) for m in moment.values()):
        return None, [f"{NOT_READ}: its first moment is zero"]
    return moment, ["the file of the final weights also holds the optimiser's state"]


# --- the author's code ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Located:
    """A function of the author's code. Another process imports it from the same place."""

    place: str
    folder: Path
    function: Factory

    def __call__(self, **arguments: Any) -> nn.Module:
        with _first_on_path(self.folder):
            return self.function(**arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return factory, (self.place, self.folder)


def factory(specification: str, folder: Path | None = None) -> Located:
    """The function that ``package.module:factory`` or ``path/to/file.py:factory`` names.

    Its code may import from ``folder``: if not given, that of the file, or the current one.
    """
    place, _, name = specification.rpartition(":")
    if not place or not name.isidentifier():
        raise InvalidInputError(
            f"{specification!r} does not name a factory; write package.module:factory or file.py:factory"
        )
    folder = folder or (Path(place).resolve().parent if place.endswith(".py") else Path.cwd())
    try:
        with _first_on_path(folder):
            module = _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except PalimpsestError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise InvalidInputError(
            f"importing {place} failed with {_first_line(error)}; run it by itself first"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise InvalidInputError(f"{place} does not have a function {name}; name one that returns the network")
    where = Path(place).resolve() if place.endswith(".py") else place
    return Located(f"{where}:{name}", folder, function)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InvalidInputError(f"there is no file {path}; check the path of the network")
    name = f"{__name__} {path.resolve()}"  # a name of no other module, because the file may be called random.py
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    try:
        specification.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    """Let the network's code import its neighbours: before everything else now, and after everything else later."""
    place = str(folder.resolve())
    if place not in sys.path:
        sys.path.append(place)
    sys.path.insert(0, place)
    try:
        yield
    finally:
        with suppress(ValueError):  # the network's code may have removed it
            sys.path.remove(place)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# --- the networks that it makes ------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Guarded:
    """The factory with its failures in one sentence.

    Its networks are copies, on the processor, in evaluation mode and single precision, and return tensors. If a factory
    returns one network several times, the layers of each further copy are initialised again.
    """

    make: Factory
    image_shape: tuple[int, ...]
    originals: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)

    def __call__(self) -> nn.Module:
        try:
            original = self.make()
            model = copy.deepcopy(original)
        except (Exception, SystemExit) as error:
            raise InvalidInputError(
                f"the factory failed with {_first_line(error)}; it must work with the arguments in --network-args alone"
            ) from error
        if not isinstance(model, nn.Module):
            raise InvalidInputError(f"the factory returned a {type(model).__name__}; it must return an nn.Module")
        if original in self.originals:
            model.apply(_initialise)
        self.originals.add(original)
        model.cpu().eval().float()
        outputs = _outputs(model, self.image_shape)
        if _logits(outputs) is not None:
            model.register_forward_hook(lambda module, images, outputs: _logits(outputs))
        elif not isinstance(outputs, Tensor):
            raise UnsupportedNetworkError(
                "", f"returns a {type(outputs).__name__}; wrap it in a module whose forward returns one tensor"
            )
        return model

    def __reduce__(self) -> tuple[Any, ...]:
        return Guarded, (self.make, self.image_shape)


def _initialise(module: nn.Module) -> None:
    """By the module's own method or, if it does not have one, by noise of the same size."""
    if callable(reset := getattr(module, "reset_parameters", None)):
        reset()
        return
    for p in module.parameters(recurse=False):
        nn.init.normal_(p, std=float(p.detach().square().mean().sqrt()))


def probe(image_shape: tuple[int, ...]) -> Tensor:
    """Fixed images of noise."""
    return 0.2 * torch.randn(PROBES, *image_shape, generator=torch.Generator().manual_seed(0))


def _outputs(model: nn.Module, image_shape: tuple[int, ...]) -> Any:
    """The network's outputs for the probe. Lazy layers take their shapes from it."""
    with _refusing_failures(image_shape), torch.no_grad():
        return model(probe(image_shape))


@contextmanager
def _refusing_failures(image_shape: tuple[int, ...]) -> Iterator[None]:
    try:
        yield
    except PalimpsestError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        shape = ",".join(map(str, image_shape))
        reason = f"the network does not take images of shape {shape} ({_first_line(error)})"
        raise InvalidInputError(f"{reason}; check the shape") from error


def _logits(outputs: Any) -> Tensor | None:
    """The logits among several named outputs, as models of Hugging Face return them."""
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    return logits if isinstance(logits, Tensor) else None

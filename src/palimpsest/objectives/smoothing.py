"""Smooth the ReLUs of any network without changing the network.

A ReLU network's φ is piecewise linear in x, so its splitting matrix S is zero almost everywhere. An objective therefore
replaces every ReLU, in the forward pass and in every derivative, by

    softplus_β(z) = log(1 + e^{βz}) / β  →  max(z, 0)   as the sharpness β → ∞.

The replacement intercepts calls to torch, not modules. It sees `nn.ReLU`, `F.relu`, `torch.relu`, `x.relu_()` and
`x.clamp(min=0)` alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from palimpsest.errors import InvalidInputError, NonFiniteError, PalimpsestError, UnsupportedNetworkError
from palimpsest.execution.resources import out_of_memory

Smoother = Callable[[Tensor], Tensor]

REACH = 40.0  # beyond ±40 softplus equals max(z, 0) in float64, and e^z does not overflow
_GUARD = 1e-3  # clamps at smaller bounds guard a division or a logarithm; they are not activations


def softplus(z: Tensor, sharpness: float | Tensor) -> Tensor:
    """softplus_β(z) = log(1 + e^{βz}) / β, with all derivatives exact and free of overflow and underflow.

    The far tail is cut off at e⁻⁴⁰ on CPUs, which are many times slower on subnormal numbers.

    >>> softplus(torch.tensor([-1.0, 0.0, 1.0]), 100.0)
    tensor([0.0000, 0.0069, 1.0000])
    """
    y = z * sharpness
    if y.is_cuda:
        return F.softplus(y, beta=1, threshold=REACH) / sharpness
    return torch.where(y > -REACH, F.softplus(y, beta=1, threshold=REACH), 0.0) / sharpness


class _Rectified(torch.autograd.Function):
    """max(z, 0), with the derivative σ(βz) in place of its own."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, sharpness: float | Tensor) -> Tensor:
        ctx.save_for_backward(z)
        ctx.sharpness = sharpness
        return z.clamp_min(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (z,) = ctx.saved_tensors
        return gradients[0] * (z * ctx.sharpness).sigmoid(), None


def exact_forward(z: Tensor, sharpness: float | Tensor) -> Tensor:
    """max(z, 0) in the forward pass, σ(βz) for its derivative, βσ(1 − σ) for its second one (Haim et al. 2022).

    The derivative is that of softplus_β, but the value is exact.

    >>> z = torch.zeros(1, requires_grad=True)
    >>> y = exact_forward(z, 10.0)
    >>> y.detach(), torch.autograd.grad(y, z)[0]
    (tensor([0.]), tensor([0.5000]))
    """
    return _Rectified.apply(z, sharpness)


def _clamp(σ: Smoother, z: Tensor, min: Any = None, max: Any = None) -> Tensor:
    if all(bound is None or (isinstance(bound, float) and 0 < abs(bound) < _GUARD) for bound in (min, max)):
        return torch.clamp(z, min, max)
    low = z if min is None else min + σ(z - min)
    return low if max is None else low - σ(z - max)


def _prelu(σ: Smoother, z: Tensor, weight: Tensor) -> Tensor:
    slope = weight if weight.numel() == 1 else weight.reshape(-1, *([1] * (z.ndim - 2)))
    return slope * z + (1 - slope) * σ(z)


# Every piecewise-linear activation is a combination of ReLUs; σ stands for the smooth one.
_SMOOTHED: dict[str, Callable[..., Tensor]] = {
    "relu": lambda σ, z: σ(z),
    "relu6": lambda σ, z: σ(z) - σ(z - 6),
    "leaky_relu": lambda σ, z, negative_slope=0.01: negative_slope * z + (1 - negative_slope) * σ(z),
    "prelu": _prelu,
    "hardtanh": lambda σ, z, min_val=-1.0, max_val=1.0: min_val + σ(z - min_val) - σ(z - max_val),
    **dict.fromkeys(("abs", "absolute"), lambda σ, z: σ(z) + σ(-z)),
    **dict.fromkeys(("maximum", "fmax", "max"), lambda σ, z, other: other + σ(z - other)),
    **dict.fromkeys(("minimum", "fmin", "min"), lambda σ, z, other: z - σ(z - other)),
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": lambda σ, z, min: _clamp(σ, z, min=min),
    "clamp_max": lambda σ, z, max: _clamp(σ, z, max=max),
}
_KINKED = (
    "rrelu threshold hardshrink softshrink hardswish hardsigmoid selu sign sgn heaviside round floor ceil "
    "trunc fix frac remainder fmod rnn_relu"
).split()
_COMPARISONS = "gt ge lt le greater greater_equal less less_equal __gt__ __ge__ __lt__ __le__".split()
_REFUSED = {
    name: f"uses {name}, whose kinks or jumps cannot be smoothed; use ReLU, GELU or tanh in its place"
    for name in _KINKED
} | dict.fromkeys(
    _COMPARISONS,
    "compares activations, which hides a kink from every derivative; write it with torch.relu or torch.maximum",
)


class Smoothed(TorchFunctionMode):
    """While active, torch computes softplus_β in place of every ReLU.

    >>> with Smoothed(10.0):
    ...     torch.relu(torch.zeros(1))
    tensor([0.0693])
    """

    def __init__(self, sharpness: float | Tensor, rectifier: Callable[..., Tensor] = softplus) -> None:
        super().__init__()
        if not isinstance(sharpness, Tensor) and not 0 < sharpness < float("inf"):
            raise InvalidInputError(f"sharpness is {sharpness}; give a positive number, or None for plain ReLUs")
        self.sharpness, self.rectifier = sharpness, rectifier
        self.layers: list[str] = []  # the modules being run, which `check` keeps

    def _softplus(self, z: Tensor) -> Tensor:
        return self.rectifier(z, self.sharpness)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "input" in kwargs:
            args = (kwargs.pop("input"), *args)
        name = getattr(func, "__name__", "")
        stem = name if name.startswith("__") else name.strip("_")
        floats = [a for a in args if isinstance(a, Tensor) and a.is_floating_point()]
        if not floats or (stem in ("max", "min") and len(floats) < 2 and "other" not in kwargs):
            return func(*args, **kwargs)  # the largest element of a tensor is a selection, like max-pooling
        if stem in _SMOOTHED:
            in_place = kwargs.pop("inplace", False) or (stem != name and name.endswith("_"))
            z, *rest = args
            smooth = _SMOOTHED[stem](self._softplus, z.clone() if in_place else z, *rest, **kwargs)
            return z.copy_(smooth) if in_place else smooth
        if stem in _REFUSED:
            raise UnsupportedNetworkError(self.layers[-1] if self.layers else "", _REFUSED[stem])
        return func(*args, **kwargs)


def _fails(why: str) -> PalimpsestError:
    return UnsupportedNetworkError("", f"fails with {why}; make it work on every image, one or many at a time")


@contextmanager
def failures_named(error: Callable[[str], PalimpsestError] = _fails) -> Iterator[None]:
    """Within it, any error of a network's own code, even sys.exit(), becomes an error that names it."""
    try:
        yield
    except PalimpsestError:
        raise
    except (Exception, SystemExit) as failure:
        if out_of_memory(failure):
            raise
        lines = str(failure).strip().splitlines()
        raise error(f"{type(failure).__name__}: {lines[0]}" if lines else type(failure).__name__) from failure


def check(model: nn.Module, x: Tensor, sharpness: float | Tensor | None, *, live: bool = False) -> None:
    """Refuse a network that an objective cannot differentiate, and name the layer.

    Activations must be smooth or smoothable, and outputs must be deterministic. Unless batch normalisation is live, no
    layer may mix the candidates of a batch, because f(x_i) would then depend on x_j. Max-pooling is accepted: it
    selects among smooth functions.
    """
    mode = Smoothed(sharpness) if sharpness is not None else nullcontext()
    shape = ",".join(map(str, x.shape[1:]))

    def refused(why: str) -> PalimpsestError:
        return InvalidInputError(f"the network does not take images of shape {shape} ({why}); check image_shape")

    layers: list[str] = getattr(mode, "layers", [])
    hooks = []
    probe = torch.stack([x[0], x[-1] + 0.1, x[0] - 0.1])
    try:
        for name, module in model.named_modules():
            _refuse_by_kind(name, module, live=live)
            hooks.append(module.register_forward_pre_hook(lambda m, args, name=name: layers.append(name)))
            hooks.append(module.register_forward_hook(lambda m, args, output: layers.__delitem__(-1)))
        with failures_named(refused), torch.no_grad(), mode:
            together, again = model(probe), model(probe)
            alone = None if live else model(probe[:1])
    finally:
        for hook in hooks:
            hook.remove()
    if not isinstance(together, Tensor) or together.ndim < 1 or together.shape[0] != len(probe):
        raise UnsupportedNetworkError("", "must return a tensor with one row of outputs per image")
    if together.dtype not in (torch.float32, torch.float64):
        raise UnsupportedNetworkError("", f"returns {together.dtype}; let it return its outputs as float32 or float64")
    if not bool(together.isfinite().all()):
        raise NonFiniteError("the network's outputs are NaN or infinite; check its weights and the scale of its images")
    if not torch.equal(together, again):
        raise UnsupportedNetworkError("", "gives different outputs for the same input; switch off its randomness")
    if alone is not None and not torch.allclose(
        together[:1], alone, rtol=1e-3, atol=1e-3 * float(together.abs().max())
    ):
        raise UnsupportedNetworkError("", "mixes the images of a batch; give it layers that see one image at a time")


def _refuse_by_kind(name: str, module: nn.Module, *, live: bool) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedNetworkError(name, "is TorchScript, which hides its activations; pass the Python module")
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None and not live:
        raise UnsupportedNetworkError(
            name,
            "mixes candidates by batch statistics; train it with running statistics (in Python,"
            " objective.with_live_batch_norm() reads it as it is)",
        )

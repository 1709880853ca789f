"""Safe reading of weights: nothing in a file is ever executed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from palimpsest.errors import InvalidInputError


def load(path: Path | str) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of a state dict that torch saved."""
    path = Path(path)
    if not path.is_file():
        raise InvalidInputError(f"there is no file {path}; check the path")
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files make their readers raise anything at all
        raise InvalidInputError(f"{path} holds no weights that are safe to read; save a state dict") from error
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise InvalidInputError(f"{path} is not a plain state dict; save model.state_dict()")
    return dict(content)


def fit_into(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Put weights into a network that must have exactly these names and shapes."""
    try:
        model.load_state_dict(dict(weights))
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise InvalidInputError(f"the weights do not fit the network: {reason}") from error

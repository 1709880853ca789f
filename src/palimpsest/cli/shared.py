"""Helpers that several commands share."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from tqdm import tqdm

from palimpsest.errors import InvalidInputError, PalimpsestError
from palimpsest.execution import kernels
from palimpsest.execution.processes import launched, place
from palimpsest.files.storage import parse_json

Device = Literal["auto", "cpu", "cuda"]
began = time.monotonic()  # when this command began


class CommandFailedError(PalimpsestError):
    """The command was right but could not be finished: exit status 1."""


@contextmanager
def resumable() -> Iterator[None]:
    """Ctrl-C during work that the same command continues."""
    try:
        yield
    except KeyboardInterrupt:
        sentence = "interrupted; the state is saved, so run the same command again to continue"
        raise CommandFailedError(sentence) from None


def torch_device(choice: Device) -> torch.device:
    """The device to compute on, whose kernels are kept. Each process that torchrun started on a host gets a GPU."""
    if choice == "cuda" and not torch.cuda.is_available():
        raise InvalidInputError("there is no CUDA device; use --device cpu")
    if choice == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    kernels.keep_on_disk()
    if launched() == 1:
        return torch.device("cuda")
    if (number := place()[1]) >= torch.cuda.device_count():
        raise InvalidInputError(f"this host has {torch.cuda.device_count()} GPUs; start at most one process for each")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def image_shape(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() for part in parts):
        raise InvalidInputError(f"the shape is {text!r}; give channels, height and width, such as 3,32,32")
    return tuple(map(int, parts))


def json_object(text: str, option: str) -> dict[str, Any]:
    try:
        return parse_json(text)
    except ValueError as error:
        raise InvalidInputError(f"{option} is not a JSON object; write it like '{{\"name\": 10}}'") from error


def bar(total: int, **options: object) -> tqdm:
    """A progress bar, shown only on a terminal."""
    return tqdm(total=total, disable=not sys.stderr.isatty(), **options)

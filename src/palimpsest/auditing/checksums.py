"""The files that an audit was given, by name and checksum, so that a reader can check which files were audited."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from palimpsest.auditing.identity import code_of
from palimpsest.auditing.subject import Factory
from palimpsest.auditing.truth import Truth
from palimpsest.files import formats
from palimpsest.files.series import InMemory, Sources, gathered
from palimpsest.files.storage import file_digest, folder_digest, tensor_digest

Checksums = Mapping[str, Mapping[str, str]]  # the SHA-256 of each file, by kind and name
IN_MEMORY = "tensors in memory"


def checksums(
    network: str | Factory,
    trained: Path | str | Mapping[str, Tensor],
    *,
    initial: Path | str | Mapping[str, Tensor] | None,
    checkpoints: Sources | InMemory | None,
    updates: Sources | None,
    truth: Truth | None,
) -> Checksums:
    """Checksums of everything that an audit uses. Kinds that were not given are left out.

    A file has the SHA-256 that `sha256sum` gives. A folder of images has one for all its files (`folder_digest`), and
    tensors in memory have that of their names and values (`tensor_digest`).
    """
    code = code_of(network)
    name = str(code["name"])
    place, _, function = name.rpartition(":")
    found = {
        "code of the network": {f"{Path(place).name}:{function}" if place else name: code["sha256"] or "unknown"},
        "final weights": _checksums([trained]),
        "initial weights": {} if initial is None else _checksums([initial]),
        "checkpoints": {} if checkpoints is None else _checksums(_each(checkpoints)),
        "updates": {} if updates is None else _checksums(_each(updates)),
    }
    if truth is not None:
        sources = (*truth.sources, *(None, None))[:2]
        pixels = {"images": truth.images, "labels": truth.labels}
        found["training images"] = _checksums([sources[0] or pixels])
        if truth.held_out is not None:
            found["held-out images"] = _checksums([sources[1] or {"images": truth.held_out}])
    return {kind: table for kind, table in found.items() if table}


def _each(sources: Sources | InMemory) -> list[Path | Mapping[str, Tensor]]:
    if isinstance(sources, list | tuple) and any(isinstance(each, Mapping) for each in sources):
        return list(sources)
    return list(gathered(sources))  # type: ignore[arg-type]


def _checksums(sources: Iterable[Path | str | Mapping[str, Tensor]]) -> dict[str, str]:
    """SHA-256 by name. A name that occurs twice gets a number."""
    found: dict[str, str] = {}
    for name, checksum in (pair for source in sources for pair in _named(source)):
        number = sum(known.split(" — ")[0] == name for known in found)
        found[f"{name} — {number + 1}" if number else name] = checksum
    return found


def _named(source: Path | str | Mapping[str, Tensor]) -> list[tuple[str, str]]:
    if isinstance(source, Mapping):
        return [(IN_MEMORY, tensor_digest(dict(_tensors(source))))]
    path = Path(source).expanduser()
    if path.is_dir():
        return [(f"{path.resolve().name}/", folder_digest(path))]
    files = [path, *(formats.listed(path)[1] if path.name.endswith(formats.INDEX) else [])]
    return [(file.name, file_digest(file, follow=True)) for file in files]


def _tensors(content: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors in nested mappings, such as a training checkpoint in memory."""
    for name, value in content.items():
        if isinstance(value, Tensor):
            yield f"{above}{name}", value.detach().cpu().contiguous()
        elif isinstance(value, Mapping):
            yield from _tensors(value, f"{above}{name}.")

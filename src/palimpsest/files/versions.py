"""The versions that a result was made with."""

import platform
from importlib import metadata
from pathlib import Path

import palimpsest
from palimpsest import __version__
from palimpsest.files.storage import folder_digest


def versions() -> dict[str, str]:
    """The versions of Python, Palimpsest and its main dependencies, by name."""
    names = ("torch", "numpy", "scipy", "scikit-image")
    ours = {"python": platform.python_version(), "palimpsest": __version__}  # which need not be installed
    return ours | {name: metadata.version(name) for name in names}


def source_digest() -> str:
    """SHA-256 of Palimpsest's own files, without compiled ones."""
    return folder_digest(Path(palimpsest.__file__).parent, skip=".pyc")

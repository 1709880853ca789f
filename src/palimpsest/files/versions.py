"""The versions that a result was made with."""

import platform
from importlib import metadata

from palimpsest import __version__


def versions() -> dict[str, str]:
    """The versions of Python, Palimpsest and its main dependencies, by name."""
    names = ("torch", "numpy", "scipy", "scikit-image")
    ours = {"python": platform.python_version(), "palimpsest": __version__}  # which need not be installed
    return ours | {name: metadata.version(name) for name in names}

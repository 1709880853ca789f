"""What a result was made with."""

from __future__ import annotations

import platform
from importlib import metadata

from palimpsest import __version__


def versions() -> dict[str, str]:
    """What a run was made with."""
    names = ("torch", "numpy", "scipy", "scikit-image")
    ours = {"python": platform.python_version(), "palimpsest": __version__}  # which need not be installed
    return ours | {name: metadata.version(name) for name in names}

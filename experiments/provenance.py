"""Where a result comes from: the command and the commit that made it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def made_by(command: str) -> dict[str, str]:
    """The command, and the commit of this repository, or PALIMPSEST_COMMIT where git is not at hand."""
    if not (commit := os.environ.get("PALIMPSEST_COMMIT")):
        git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    return {"command": command, "commit": commit}

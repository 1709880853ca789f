"""`palimpsest compare`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from palimpsest import auditing
from palimpsest.files.storage import write_atomically
from palimpsest.runs.journal import printable


@dataclass
class Compare:
    """Compare two finished audits, for example before and after a mitigation.

    Shows the numbers of both, and warns if they differ in more than the weights.

        palimpsest compare runs/audit runs/audit-with-noise
    """

    old: Annotated[Path, tyro.conf.Positional]
    """Folder of the first audit."""
    new: Annotated[Path, tyro.conf.Positional]
    """Folder of the second audit."""
    json: Path | None = None
    """File to write the comparison to, as JSON."""

    def run(self) -> None:
        changes = auditing.compare(self.old, self.new)
        if self.json is not None:
            write_atomically(self.json, changes.to_json().encode())
        for line in str(changes).splitlines():
            print(" ".join(map(printable, line.split(" "))))  # the table keeps its spaces

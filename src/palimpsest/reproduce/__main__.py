"""`python -m palimpsest.reproduce`: the same as `palimpsest reproduce`, with nothing but the standard library."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from palimpsest.errors import PalimpsestError
from palimpsest.reproduce import Options, reproduce


def parser() -> argparse.ArgumentParser:
    make = argparse.ArgumentParser("python -m palimpsest.reproduce", description=reproduce.__doc__)
    make.add_argument("names", nargs="+", help="experiments, files of your own, or all")
    for name in ("column", "variant"):
        make.add_argument(f"--{name}", nargs="+", default=())
    for name in ("candidates", "seed"):
        make.add_argument(f"--{name}", nargs="+", type=int, default=())
    for name in ("small", "tuning", "missing", "summarise"):
        make.add_argument(f"--{name}", action="store_true")
    make.add_argument("--budget", type=float, help="seconds")
    make.add_argument("--workers", type=int, default=Options.workers)
    make.add_argument("--out", type=Path, default=Options.out)
    make.add_argument("--docs", type=Path, default=Options.docs)
    make.add_argument("--data-root", type=Path)
    return make


def main(arguments: Sequence[str] | None = None) -> int:
    given = vars(parser().parse_args(arguments))
    fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    try:
        reproduce(Options(**fields))
    except PalimpsestError as error:
        print(f"palimpsest: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

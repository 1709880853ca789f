"""The command line: `palimpsest demo | train | reconstruct | report | audit | compare | membership | identify | bench`.

Exit status 0, 1 (failed), 2 (wrong use), or 3 and 4 of an audit's gate. Errors are one sentence on standard error.
"""

import io
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Annotated, Any

import tyro

from palimpsest import __version__
from palimpsest.cli import shared
from palimpsest.cli.audit import AuditCommand
from palimpsest.cli.bench import Bench
from palimpsest.cli.compare import Compare
from palimpsest.cli.demo import Demo
from palimpsest.cli.identify import Identify
from palimpsest.cli.membership import MembershipCommand
from palimpsest.cli.reconstruct import Reconstruct
from palimpsest.cli.report import Report
from palimpsest.cli.shared import CommandFailedError
from palimpsest.cli.train import Train
from palimpsest.errors import DivergenceError, InvalidInputError, PalimpsestError, ProcessEndedError
from palimpsest.execution.allocator import keep_freed_memory
from palimpsest.execution.processes import launched, place
from palimpsest.execution.resources import out_of_memory
from palimpsest.runs import journal
from palimpsest.runs.journal import printable

DESCRIPTION = """Measure how much of the training set can be reconstructed from a network's weights.

Palimpsest is a privacy audit tool. Use it only on models and data you are entitled to. Start with `palimpsest demo`.
`palimpsest --version` prints the version."""

Command = (
    Demo
    | Train
    | Reconstruct
    | Report
    | Annotated[AuditCommand, tyro.conf.subcommand("audit")]
    | Compare
    | Annotated[MembershipCommand, tyro.conf.subcommand("membership")]
    | Identify
    | Bench
)


def main(arguments: Sequence[str] | None = None, *, began: float | None = None) -> int:
    """Run one command; the value is the exit status. ``began`` is when its process did, on the monotonic clock."""
    shared.began = time.monotonic() if began is None else began
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of folders need not be text
    if (sys.argv[1:] if arguments is None else [*arguments]) == ["--version"]:
        print(f"palimpsest {__version__}")
        return 0
    keep_freed_memory()
    try:
        command: Any = tyro.cli(Command, prog="palimpsest", description=DESCRIPTION, args=arguments)
        if launched() > 1 and not isinstance(command, Reconstruct):
            raise InvalidInputError("only `palimpsest reconstruct` runs on several processes; leave out torchrun")
        events = journal.on_stderr(terminal=isinstance(command, AuditCommand | MembershipCommand))
        with events if place()[0] == 0 else nullcontext():
            return command.run() or 0
    except ProcessEndedError as error:
        _complain(f"process {place()[0]} of {launched()}: {error}", status=1, of_all=True)
        sys.stdout.flush()
        os._exit(1)  # without Python's own end, in which the threads of a broken connection can abort
    except (DivergenceError, CommandFailedError) as error:
        return _complain(str(error), status=1)
    except PalimpsestError as error:
        return _complain(str(error), status=2)
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        return _complain(f"cannot use{where}: {error.strerror}; make room or choose another folder", status=2)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        return _complain(
            "there is not enough memory; use fewer --candidates, or a smaller network", status=1, of_all=True
        )
    except KeyboardInterrupt:
        return _complain("interrupted; nothing was left half-written", status=1)


def _complain(sentence: str, *, status: int, of_all: bool = False) -> int:
    """Say what went wrong: once on each host, unless all of its processes should."""
    if of_all or place()[1] == 0:
        print(f"palimpsest: {printable(sentence)}", file=sys.stderr)
    return status

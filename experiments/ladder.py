"""What each piece of knowledge adds: an audit of a network of 40 pictures, with all that its training left behind.

python experiments/ladder.py             writes docs/results/ladder.json, and the table and answers in docs/auditing.md
python experiments/ladder.py --small     a version of seconds, which writes nothing
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import left_behind
import tables
from provenance import made_by

import palimpsest as pal

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "docs" / "results" / "ladder.json", "auditing.md"
SEED = 63  # left_behind.py reads 60 to 62
SMALL = {"steps": 5, "restarts": 2, "tangents": 1, "control_steps": 5}


def audited(*, minutes: float, small: bool) -> pal.auditing.Audit:
    kind = left_behind.KINDS[0]
    data = pal.datasets.load("faces", per_class=2 if small else 20, seed=SEED)
    left = left_behind.trained(kind, data, SEED, epochs=5 if small else 2000)
    labels = (data.train.labels > 0).long()
    truth = pal.auditing.Truth(data.train.images, labels, data.held_out.images, mean=data.mean)
    with tempfile.TemporaryDirectory() as folder:
        return pal.audit(
            lambda: left_behind.network(kind, data),
            {"model": left.model.state_dict(), "optimizer": left.optimiser},
            initial=left.checkpoints[0],
            checkpoints=left.checkpoints[1:],
            image_shape=data.image_shape,
            truth=truth,
            out=Path(folder) / "audit",
            minutes=minutes,
            **SMALL if small else {},
        )


def rows(found: pal.auditing.Audit) -> list[dict]:
    return [
        {"rung": rung.attacker.name, "adds": rung.attacker.adds, "method": rung.reading.plan.method,
         "outcome": rung.reading.verdict.outcome.value, "exposes": rung.exposes, "more": rung.adds}
        for rung in found.rungs if rung.reading is not None
    ]  # fmt: skip


def answers(found: pal.auditing.Audit) -> str:
    """The answers as the terminal shows them, indented as Markdown wants it."""
    first = found.summary.index("May these files be published?")
    lines = found.summary[first : first + 1 + len(found.publications)]
    return "\n" + "".join(f"    {line}\n" for line in lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    found = audited(minutes=options.minutes, small=options.small)
    made = rows(found)
    shown = [["–" if value is None else str(value) for value in row.values()] for row in made]
    table = tables.markdown(["rung", "adds", "method", "outcome", "exposes", "more"], shown)
    print(table, *found.summary, sep="\n")
    if not options.small:
        content = made_by("python experiments/ladder.py") | {"rows": made}
        RESULTS.write_text(json.dumps(content, indent=1) + "\n")
        tables.write(PAGE, table)
        tables.write(PAGE, answers(found), "answers")


if __name__ == "__main__":
    main()

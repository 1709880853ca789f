"""The summary that opens the report: what an assessment of anonymity asks for, in that order.

docs/handing-over.md maps its items to Opinion 28/2024 of the European Data Protection Board.
"""

from collections.abc import Sequence
from dataclasses import replace

from markupsafe import Markup

from palimpsest.auditing.given import Given
from palimpsest.auditing.preflight import Preflight
from palimpsest.auditing.verdict import Audit, judge
from palimpsest.report.words import duration

MATERIAL = {"weights": "the weights", "optimiser": "the optimiser's state"}  # what was read, by the reading's name
MEANS = {
    "ntk": "the change of the weights since their start",
    "path": "each change between weights that are known",
    "gradient": "the first moment in the optimiser's state",
    "kkt": "the trained weights, at a maximum margin",
    "multiclass": "the trained weights, at a maximum margin",
    "kkt-signed": "the trained weights, as weight decay leaves them",
}
SEGMENTS = ("checkpoints", "updates")  # files that split the training into segments
NOT_IN_PALIMPSEST = (
    "Palimpsest does not have attacks through the network's answers, attacks with a learned image prior or with shadow"
    " models, or the inference of attributes."
)


def readings(audit: Audit) -> dict[str, Audit]:
    """Each reading of the audit with its own verdict, by its name."""
    name = "optimiser" if audit.method == "gradient" else "weights"
    found = {name: replace(audit, verdict=judge(audit), optimiser=None)}
    return found if audit.optimiser is None else found | {"optimiser": audit.optimiser}


def calibrated(audit: Audit, found: Preflight) -> bool:
    """Whether the probabilities are frequencies.

    Their map was fitted on dense networks, read by NTK at one tangent point. Elsewhere they are ranks.
    """
    return audit.method == "ntk" and len(audit.plan.at) == 1 and found.bound is not None


def summary(every: Sequence[Audit], found: Preflight, given: Given) -> dict[str, list[str]]:
    """For each item, a text per reading, or one for all: means, knowledge, effort, result, tests, and the rest."""
    return {
        "Means tried": [_means(audit) for audit in every],
        "Knowledge assumed": [_knowledge(audit, found, given) for audit in every],
        "Effort": [_effort(audit) for audit in every],
        "Images affected": [_affected(audit, calibrated(audit, found)) for audit in every],
        "Controls": [_controls(audit) for audit in every],
        "Not tried": [_not_tried({audit.method for audit in every}, given)],
    }


def _means(audit: Audit) -> str:
    return f"Method {audit.method}: searches images whose gradients explain {MEANS[audit.method]}."


def _knowledge(audit: Audit, found: Preflight, given: Given) -> str:
    known = ["The network's code", "the trained weights"]
    known += ["the initial weights"] if audit.method == "ntk" else []
    known += [f"{len(given[kind])} {kind}" for kind in SEGMENTS if audit.method == "path" and kind in given]
    known += ["the optimiser's state"] if audit.method == "gradient" else []
    count = "unknown"
    if audit.samples is not None:
        counted = "counted in the first layer" if found.samples == audit.samples else "as given"
        count = f"{audit.samples}, {counted}"
    score = " The images themselves serve the scores only." if audit.score else ""
    return f"{', '.join(known[:-1])} and {known[-1]}. Number of training images: {count}.{score}"


def _effort(audit: Audit) -> str:
    plan, effort = audit.plan, audit.effort
    work = f"{effort.restarts} restarts of {plan.candidates} candidates, {plan.steps:,} steps each"
    where = f", on {' and '.join(effort.devices)}" if effort.devices else ""
    line = Markup("{}: <time>{}</time>. {} runs of controls: <time>{}</time>{}.").format(
        work, duration(effort.seconds), effort.control_runs, duration(effort.control_seconds), where
    )
    return line if audit.finished else line + " The time ran out before the plan was done."


def _affected(audit: Audit, frequencies: bool) -> str:
    comparison, verdict = audit.comparison, audit.verdict
    if audit.compared and comparison is not None and comparison.interval is not None:
        count = f"{comparison.recovered} of {comparison.total} training images recovered"
        if comparison.as_a_whole:
            return f"The training set as a whole. {count}, which chance can explain."
        low = comparison.interval[0]
        return f"{count}, {f'at least {low} beyond chance' if low else 'no more than by chance'}."
    if not verdict.likely:
        return "None identified."
    rank = "" if frequencies else ", by an estimate that is not calibrated here"
    return f"About {verdict.expected:.0f} of {verdict.likely} likely candidates are real{rank}. Which ones is unknown."


def _controls(audit: Audit) -> str:
    negative, positive = "No negative control was run", "No positive control was run"
    if audit.negative is not None:
        negative = f"Negative: the likeliest candidate from permuted values has {audit.bar:.0%}"
    if audit.positive is not None:
        comparison = audit.positive.comparison
        easier = audit.positive.easier
        hard = "as hard to read" if easier is None else f"perhaps easier to read, because {easier[0]}"
        positive = f"Positive: {comparison.recovered} of {comparison.total} public images recovered; {hard}"
    return f"{negative}. {positive}."


def _not_tried(methods: set[str], given: Given) -> str:
    """Material that was not given, or given and not used, and attacks that do not exist here."""
    users = {"initial weights": {"ntk", "path"}, "checkpoints": {"path"}, "updates": {"path"}}
    unused = [kind for kind, its in users.items() if kind in given and not its & methods]
    missing = [] if "initial weights" in given else ["the initial weights, or the seed that makes them"]
    missing += [] if any(kind in given for kind in SEGMENTS) else ["weights on the way"]
    missing += [] if "gradient" in methods else ["the optimiser's state"]
    lines = [f"Given, but not used: {', '.join(unused)}."] if unused else []
    lines += [f"An attacker who has more may read more: {', '.join(missing)}."] if missing else []
    return " ".join([*lines, NOT_IN_PALIMPSEST])

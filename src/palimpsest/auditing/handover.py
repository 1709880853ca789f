"""The summary that opens the report: what an assessment of anonymity asks for, in that order.

docs/handing-over.md maps its items to Opinion 28/2024 of the European Data Protection Board.
"""

from collections.abc import Sequence

from markupsafe import Markup

from palimpsest.auditing.checksums import Checksums
from palimpsest.auditing.ladder import MISSING
from palimpsest.auditing.preflight import Preflight
from palimpsest.auditing.result import Audit, Reading, Rung
from palimpsest.report.words import duration

MEANS = {
    "ntk": "the change from the initial to the final weights",
    "path": "each change between weights that are known",
    "gradient": "the first moment in the optimiser's state",
    "kkt": "the final weights, at a maximum margin",
    "multiclass": "the final weights, at a maximum margin",
    "kkt-signed": "the final weights, as weight decay leaves them",
}
LOSSES = {False: "squared or logistic", True: "cross_entropy or squared"}  # by whether there are several outputs


def summary(audit: Audit, given: Checksums) -> dict[str, list[str]]:
    """For each item, a text per rung, or one for all: means, knowledge, effort, result, tests, and the rest."""
    every, found = audit.readings.values(), audit.preflight
    return {
        "Means tried": [_means(each) for each in every],
        "Knowledge assumed": [_knowledge(each, found, given) for each in every],
        "Effort": [_effort(each) for each in every],
        "Images affected": [_affected(each) for each in every],
        "Membership": [membership_test(audit)],
        "Controls": [_controls(each) for each in every],
        "Not tried": [_not_tried(audit.rungs)],
    }


def membership_test(audit: Audit) -> str:
    """How to test whether given images were trained on, which an audit says of the training images alone."""
    found = audit.preflight
    if audit.membership_sentence:
        return Markup("{} <code>palimpsest membership</code> tests any other images.").format(audit.membership_sentence)
    rest = "" if found.related is True else f" --loss LOSS ({LOSSES[found.outputs > 1]}, as in training)"
    command = Markup("<code>palimpsest membership --images SUSPECTS --held-out OTHERS{}</code>").format(rest)
    return Markup(
        "The audit does not test single images for membership. {} does, with the other options of this audit."
    ).format(command)


def _means(audit: Reading) -> str:
    rescaled = ", rescaled by the rule of Adam," if audit.rule == "adam" else ""
    return f"Method {audit.attacker.label}: searches images whose gradients{rescaled} explain {MEANS[audit.method]}."


def _knowledge(audit: Reading, found: Preflight, given: Checksums) -> str:
    known = ["The network's code", "the final weights"]
    known += ["the initial weights"] if audit.method in ("ntk", "path") and "initial weights" in given else []
    if audit.method == "path":
        known += [f"{audit.attacker.segments} segments between checkpoints"] if "checkpoints" in given else []
        known += [f"{len(given['updates'])} updates"] if "updates" in given else []
    known += ["the optimiser's state"] if audit.method == "gradient" else []
    return f"{', '.join(known[:-1])} and {known[-1]}. Number of training images: {counted(audit, found) or 'unknown'}."


def counted(audit: Reading, found: Preflight) -> str:
    """The number of training images, and how it is known; empty if it is not."""
    if audit.samples is None:
        return ""
    if audit.attacker.name == "O" and audit.samples == audit.attacker.directions:
        return f"{audit.samples}, counted in the optimiser's state"
    if audit.samples in (found.samples, audit.attacker.directions):
        return f"{audit.samples}, counted in the change of the first layer"
    return f"{audit.samples}, as given"


def _effort(audit: Reading) -> str:
    plan, effort = audit.plan, audit.effort
    work = f"{effort.restarts} restarts of {plan.candidates} candidates, {plan.steps:,} steps each"
    where = f", on {' and '.join(effort.devices)}" if effort.devices else ""
    line = Markup("{}: <time>{}</time>. {} runs of controls: <time>{}</time>{}.").format(
        work, duration(effort.seconds), effort.control_runs, duration(effort.control_seconds), where
    )
    return line if audit.finished else line + " The time ran out before the plan was done."


def _affected(audit: Reading) -> str:
    comparison, verdict = audit.comparison, audit.verdict
    if audit.compared and comparison is not None and comparison.interval is not None:
        count = f"{comparison.recovered} of {comparison.total} training images recovered"
        if comparison.as_a_whole:
            return f"The training set as a whole. {count}, which chance can explain."
        low = comparison.interval[0]
        return f"{count}, {f'at least {low} beyond chance' if low else 'no more than by chance'}."
    if not verdict.likely:
        return "None identified."
    if verdict.expected is None:
        return f"Restarts agree on {verdict.likely} candidates more than by chance. How many are real is unknown."
    return f"About {verdict.expected:.0f} of {verdict.likely} likely candidates are real. Which ones is unknown."


def _controls(audit: Reading) -> str:
    negative, positive = "No negative control was run", "No positive control was run"
    if audit.negative is not None:
        chance = f"the likeliest candidate from permuted values has {audit.bar:.0%}"
        ranks = "candidates from permuted values set the threshold of chance"
        negative = f"Negative: {chance if audit.ranking.calibrated else ranks}"
    if audit.positive is not None:
        comparison = audit.positive.comparison
        easier = audit.positive.easier
        hard = "as hard to read" if easier is None else f"perhaps easier to read, because {easier[0]}"
        positive = f"Positive: {comparison.recovered} of {comparison.total} public images recovered; {hard}"
    return f"{negative}. {positive}."


def _not_tried(rungs: Sequence[Rung]) -> str:
    """Rungs without a reading, with the reason, and attacks that do not exist here."""
    unread = [
        f"{rung.attacker.adds} ({rung.reason})" for rung in rungs if not rung.reading and rung.attacker.name != "T"
    ]
    lines = [f"Not read: {'; '.join(unread)}."] if unread else []
    return " ".join([*lines, f"The audit does not have these attacks: {'; '.join(MISSING)}."])

"""What an experiment comes to, in words: what splitting does, what its controls leave of that, which aims are met."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from palimpsest.reproduce.summary import CERTAIN

WORDS = {"better": "helps", "worse": "hurts", "even": "makes no clear difference"}
AGAINST = {"better": "better than", "even": "not to be told from", "worse": "worse than"}


def findings(content: Mapping[str, Any]) -> Iterator[str]:
    """Lines of a list, from the summary of an experiment."""
    kinds = dict.fromkeys((test["column"], test["candidates"], test["variant"]) for test in content["tests"])
    for kind in kinds:
        tests = [t for t in content["tests"] if (t["column"], t["candidates"], t["variant"]) == kind]
        yield comparison(*kind, tests, len(content["seeds"]))
    for row in content["rows"]:
        if row["variant"] == "merging":
            counts = f"{row['final candidates']:.0f} candidates; there are {content['training']['images']} images"
            yield f"- {row['column']}, k = {row['candidates']}: splitting and merging end with {counts}."
    spans = {network.get("images by the span") for network in content["networks"]} - {None}
    if spans:
        yield f"- The first layer's change alone gives the number of images as {', '.join(map(str, sorted(spans)))}."
    if len(content["networks"]) > len({network["seed"] for network in content["networks"]}):
        yield "- Some seeds were trained more than once, so that not all parts were read from the same weights."
    if not kinds and not spans:
        yield "- Nothing yet: there is no run with splitting to compare."


def comparison(column: str, k: int, variant: str, tests: Sequence[Mapping[str, Any]], seeds: int) -> str:
    """One sentence on whether splitting helps, and one on what of that its controls leave."""
    text = f"- **{column}, k = {k}: {variant} "
    plain = next((test for test in tests if test["against"] == "none"), None)
    if plain is None:
        text += "was not compared with no splitting.**"
    else:
        text += f"{WORDS[plain['verdict']]}**{fewer(len(plain['by seed']), seeds)}: {'; '.join(_told(plain))}."
    rest = []
    for verdict, phrase in AGAINST.items():
        others = [t for t in tests if t is not plain and t["verdict"] == verdict]
        named = [t["against"] + fewer(len(t["by seed"]), seeds) for t in others]
        rest += [f"{phrase} {', '.join(named)}"] if named else []
    return text + (f" It is {'; '.join(rest)}." if rest else "")


def _told(test: Mapping[str, Any]) -> Iterator[str]:
    """What there is to say about a comparison, beginning with how the images fared that were read."""
    doubt = "not on every seed" if len(test["by seed"]) > 1 else "on one seed alone"
    but = f", but {doubt}" if test["p"] < CERTAIN and test["verdict"] == "even" else ""
    yield f"better on {test['better']} images, worse on {test['worse']}, p = {test['p']:.2g}{but}"
    yield "with those that were not read, {} and {}".format(*test["of all"])
    for measure in ("mean SSIM", "mean L2", "recovered"):
        if measure in test:
            without, with_ = test[measure]
            yield f"{measure} {without:.3g} → {with_:.3g}"
    yield f"of each seed's 25 best, {test['top better']} of {test['top']} gained"
    if test["unsplit"]:
        yield f"on {test['unsplit']} of {len(test['by seed'])} seeds nothing was split"


def aim(goal: Mapping[str, Any], seeds: int) -> str:
    """A figure that was aimed at, and whether it is reached."""
    least = goal["at_least"] is not None
    bound, measured = goal["at_least"] if least else goal["at_most"], goal["measured"]
    what = f"{goal['column']}, {goal['variant']}, k = {goal['candidates']}: {goal['measure']}"
    wanted = f"{'at least' if least else 'at most'} {bound:g}"
    if measured is None:
        return f"- {what} {wanted}: not measured yet"
    reached = measured >= bound if least else measured <= bound
    outcome = "reached" if reached else "**not reached**"
    return f"- {what} {wanted}: {measured:.4g}{fewer(goal['on seeds'], seeds)}, {outcome}"


def fewer(seeds: int, all_seeds: int) -> str:
    """A remark where not all seeds were run."""
    return f" ({seeds} of {all_seeds} seeds)" if seeds < all_seeds else ""

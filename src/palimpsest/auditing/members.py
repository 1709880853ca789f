"""Can the training images be told from others? The membership test inside an audit, if it has the material for one.

It needs the change of the weights, the training images, and held-out images. Verdicts are about reading images, so the
test changes none. It only tells why a method does not explain the images: they left traces in the weights, or none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from palimpsest.auditing.case import Case
from palimpsest.auditing.exchange import chosen, fair
from palimpsest.auditing.given import Given
from palimpsest.auditing.ladder import ORDER
from palimpsest.auditing.preflight import Preflight
from palimpsest.auditing.stages import Contents, cached_tensors
from palimpsest.auditing.subject import Subject
from palimpsest.auditing.told_apart import LEVEL, Membership, MembershipOptions, segments_of, told_apart
from palimpsest.auditing.truth import Truth
from palimpsest.errors import InvalidInputError
from palimpsest.runs.journal import note
from palimpsest.scoring.rates import rates

MOST = 500  # images of each kind: for more, the test takes minutes
FIRST, FEWEST = 4, 20  # images of each kind that show how long the test takes, and that it needs
SHARE = 0.1  # of the time left that it may take


def members(case: Case, found: Preflight) -> Membership | None:
    """The test of the training images against held-out ones, made once. None without the material for it.

    It uses what the attackers on the chosen rungs know. The names of the tested images are their numbers, from 1.
    """
    truth, examined = case.truth, known(case)
    if truth is None or truth.held_out is None or not segments_of(examined) or not found.related or found.unusable:
        return None
    path, compute = case.folder / "membership.safetensors", partial(_computed, case, examined, truth, truth.held_out)
    try:
        if len(truth.held_out) < FEWEST:
            raise InvalidInputError(f"{len(truth.held_out)} held-out images are too few; give at least {FEWEST}")
        made = cached_tensors(path, case.owner, compute, _parsed)
        if isinstance(made, _Refused) and made.minutes < case.options.minutes:
            path.unlink()
            made = cached_tensors(path, case.owner, compute, _parsed)
        if isinstance(made, _Refused):
            raise InvalidInputError("there is too little time; give more --minutes")
    except InvalidInputError as error:
        note(f"membership is not tested: {error}")
        return None
    return None if made.rates.verdict.auc is None else made  # there are too few training images


def known(case: Case) -> Subject:
    """The subject with the changes of its weights that the chosen rungs know."""
    rungs = case.options.rungs or ORDER
    if "C" in rungs and case.subject.segments:
        return case.subject
    return replace(case.subject, segments=(), initial=case.subject.initial if "W0" in rungs else None)


@dataclass(frozen=True)
class _Refused:
    """There was too little time, with this many minutes. A repeated audit that has no more does not try again."""

    minutes: float


def _computed(case: Case, examined: Subject, truth: Truth, held_out: Tensor) -> Contents:
    note("testing whether the given images can be told from held-out ones")
    mean, std = fair(truth.images, held_out, truth.mean, truth.std)  # by all images, before some are left out
    began, patience = case.clock.now(), SHARE * case.clock.seconds_left

    def tested(most: int) -> tuple[Tensor, Membership]:
        rows, others = chosen(len(truth.images), most), chosen(len(held_out), most)
        return rows, told_apart(
            examined, Given(truth.images[rows]), Given(held_out[others]), MembershipOptions(), mean=mean, std=std,
            device=case.device, patience=patience if most > FEWEST else 0.0,
        )  # fmt: skip

    def seconds(most: int) -> float:
        start = case.clock.now()
        tested(most)
        return case.clock.now() - start

    wanted = min(MOST, max(len(truth.images), len(held_out)))
    most = 0
    if patience > 0 and seconds(FIRST) * FEWEST / FIRST <= patience:
        pace = seconds(FEWEST) / FEWEST  # for one image of each kind; more of them take no longer each
        most = int(min(wanted, (patience - (case.clock.now() - began)) / pace))
    if most < min(FEWEST, wanted):
        return {}, {"refused": case.options.minutes}
    rows, found = tested(most)
    thinned = most < max(len(truth.images), len(held_out))
    names = ("statistic", "layer", "knowledge", "doubt")
    tensors = {"traces": found.traces, "held_out": found.held_out, "rows": rows}
    return tensors, {name: getattr(found, name) for name in names} | {"thinned": thinned}


def _parsed(tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> Membership | _Refused:
    if "refused" in description:
        return _Refused(float(description["refused"]))
    ours, theirs = tensors["traces"], tensors["held_out"]
    names = tuple(str(i + 1) for i in tensors["rows"].tolist())
    return Membership(names, ours, theirs, rates(ours, theirs), LEVEL, **description)

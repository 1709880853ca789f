"""Can the training images be told from others? The membership test inside an audit, if it has the material for one.

It needs the change of the weights, the training images, and held-out images. Verdicts are about reading images, so the
test changes none. It only tells why a method does not explain the images: they left traces in the weights, or none.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from palimpsest.auditing.case import Case
from palimpsest.auditing.exchange import chosen
from palimpsest.auditing.given import Given
from palimpsest.auditing.stages import Contents, cached_tensors
from palimpsest.auditing.told_apart import LEVEL, Membership, MembershipOptions, segments_of, told_apart
from palimpsest.auditing.traces import BATCH, widest_dense_layer
from palimpsest.auditing.truth import Truth
from palimpsest.errors import InvalidInputError
from palimpsest.runs.journal import note
from palimpsest.scoring.rates import RATES, rates

MOST_BY_SPAN, MOST = 2000, 100  # images of each kind: the span needs one pass, gradients a few passes for each image
FIRST, FEWEST = 4, 20  # images of each kind that show how long gradients take, and that a test by gradients needs
SHARE = 0.1  # of the time left that the test may take


def members(case: Case) -> Membership | None:
    """The test of the training images against held-out ones, made once. None without the material for it.

    The names of the images that it tested are their numbers, from 1.
    """
    if case.truth is None or case.truth.held_out is None or not segments_of(case.subject):
        return None
    try:
        made = cached_tensors(case.folder / "membership.safetensors", case.owner, partial(_computed, case), _parsed)
    except InvalidInputError as error:
        note(f"membership is not tested: {error}")
        return None
    return None if made.rates.verdict.auc is None else made  # there are too few images


def _computed(case: Case) -> Contents:
    note("testing whether the given images can be told from held-out ones")
    truth = case.truth
    assert truth is not None
    assert truth.held_out is not None
    seen = truth.seen[:BATCH].to(next(case.subject.model.parameters()))
    most = MOST_BY_SPAN
    if widest_dense_layer(case.subject.model, seen, segments_of(case.subject)) is None:
        began = case.clock.now()
        _tested(case, truth, truth.held_out, FIRST)
        seconds = (case.clock.now() - began) / FIRST  # for one image of each kind
        most = int(min(MOST, SHARE * case.clock.seconds_left / seconds))
        if most < FEWEST:
            raise InvalidInputError(f"{FEWEST} images take {FEWEST * seconds:.0f} seconds here; give more --minutes")
    rows, found = _tested(case, truth, truth.held_out, most)
    tensors = {"traces": found.traces, "held_out": found.held_out, "rows": rows}
    return tensors, {"statistic": found.statistic, "layer": found.layer, "knowledge": found.knowledge}


def _tested(case: Case, truth: Truth, held_out: Tensor, most: int) -> tuple[Tensor, Membership]:
    """The test with at most this number of images of each kind, and the numbers of the training images it had."""
    rows, others = chosen(len(truth.images), most), chosen(len(held_out), most)
    return rows, told_apart(
        case.subject, Given(truth.images[rows]), Given(held_out[others]), MembershipOptions(), mean=truth.mean,
        std=truth.std, device=case.device, at_other_scales=False,
    )  # fmt: skip


def _parsed(tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> Membership:
    """The test at the finest rate of false positives that the held-out images resolve, down to `LEVEL`."""
    ours, theirs = tensors["traces"], tensors["held_out"]
    level = max(LEVEL, 1 / (len(theirs) + 1))
    names = tuple(str(i + 1) for i in tensors["rows"].tolist())
    compared = rates(ours, theirs, at=tuple(dict.fromkeys([level, *RATES])))
    return Membership(names, ours, theirs, compared, level, **description)

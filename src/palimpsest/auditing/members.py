"""Can the training images be told from others? The membership test inside an audit, if it has the material for one.

It needs the change of the weights, the training images, and held-out images. Verdicts are about reading images, so the
test changes none. It only tells why a method does not explain the images: they left traces in the weights, or none.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from palimpsest.auditing.case import Case
from palimpsest.auditing.exchange import chosen
from palimpsest.auditing.given import Given
from palimpsest.auditing.stages import Contents, cached_tensors
from palimpsest.auditing.told_apart import LEVEL, Membership, MembershipOptions, segments_of, told_apart
from palimpsest.auditing.traces import BATCH, widest_dense_layer
from palimpsest.errors import PalimpsestError
from palimpsest.runs.journal import note
from palimpsest.scoring.rates import RATES, rates

MOST_BY_SPAN, MOST = 2000, 100  # images of each kind: the span needs one pass, gradients a few passes for each image


def members(case: Case) -> Membership | None:
    """The test of the training images against held-out ones, made once. None without the material for it.

    The names of the images that it tested are their numbers, from 1.
    """
    truth, changes = case.truth, segments_of(case.subject)
    if truth is None or truth.held_out is None or not changes:
        return None
    held_out = truth.held_out

    def compute() -> Contents:
        note("testing whether the given images can be told from held-out ones")
        seen = truth.seen[:BATCH].to(next(case.subject.model.parameters()))
        most = MOST if widest_dense_layer(case.subject.model, seen, changes) is None else MOST_BY_SPAN
        rows, others = chosen(len(truth.images), most), chosen(len(held_out), most)
        found = told_apart(
            case.subject, Given(truth.images[rows]), Given(held_out[others]), MembershipOptions(), mean=truth.mean,
            std=truth.std, device=case.device, at_other_scales=False,
        )  # fmt: skip
        tensors = {"traces": found.traces, "held_out": found.held_out, "rows": rows}
        return tensors, {"statistic": found.statistic, "layer": found.layer, "knowledge": found.knowledge}

    try:
        made = cached_tensors(case.folder / "membership.safetensors", case.owner, compute, _parsed)
    except PalimpsestError as error:
        note(f"membership is not tested: {error}")
        return None
    return None if made.rates.verdict.auc is None else made  # there are too few images


def _parsed(tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> Membership:
    """The test at the finest rate of false positives that the held-out images resolve, down to `LEVEL`."""
    ours, theirs = tensors["traces"], tensors["held_out"]
    level = max(LEVEL, 1 / (len(theirs) + 1))
    names = tuple(str(i + 1) for i in tensors["rows"].tolist())
    compared = rates(ours, theirs, at=tuple(dict.fromkeys([level, *RATES])))
    return Membership(names, ours, theirs, compared, level, **description)

"""The headline of an audit, case by case."""

from dataclasses import replace

import pytest
import torch

from palimpsest.auditing.evidence import Evidence, PositiveControl, believed
from palimpsest.auditing.ranking import Ranking
from palimpsest.auditing.reasons import Reason
from palimpsest.auditing.verdict import OUT_OF_TIME, judge
from palimpsest.scoring import Outcome
from palimpsest.scoring import judge as compare


def ranked(*probabilities, explained):
    n, p = len(probabilities), torch.tensor(probabilities).double()
    return Ranking(torch.zeros(n, 1, 8, 8), p, torch.ones(n), explained, calibrated=True)


def comparison(recovered, *, n=40, held_out=40):
    """The verdict on n training images, the best of which beat every held-out image; the others lie among them."""
    members, others = torch.linspace(0.1, 0.3, n), torch.linspace(0.1, 0.3, held_out) + 1e-4
    members[:recovered] = 0.9
    return compare(members, others)


READ, UNREAD = ranked(0.95, 0.9, 0.6, explained=0.9), ranked(0.1, explained=0.15)
NOTHING, CHANCE = ranked(0.02, 0.01, explained=0.6), ranked(0.03, explained=0.1)
CONTROL = PositiveControl(READ, comparison(40), images=40, samples=40, way=1.1, likely=5, real=5)
UNSURE = replace(CONTROL, likely=4, real=4)
BLIND = Evidence(NOTHING, CHANCE, CONTROL)
UNCALIBRATED = replace(READ, calibrated=False)
CONFIRMING, REFUTING = replace(CONTROL, likely=8, real=7), replace(CONTROL, likely=5, real=3)
COMPARED = replace(BLIND, comparison=comparison(0), floor=0.1, accuracy=1.0)
LEAKAGE, NO_EVIDENCE, UNDECIDED, NO_VERDICT = Outcome

CASES = {
    "the comparison finds images": (replace(COMPARED, comparison=comparison(30)), LEAKAGE),
    "so it does although the method fits badly": (replace(COMPARED, comparison=comparison(30), floor=0.9), LEAKAGE),
    "likely candidates": (replace(BLIND, ranking=READ), LEAKAGE),
    "one certain candidate": (replace(BLIND, ranking=ranked(0.9, 0.1, explained=0.9)), LEAKAGE),
    "likely candidates without a control": (replace(BLIND, ranking=READ, positive=None), UNDECIDED),
    "likely candidates that the control lacks": (
        replace(BLIND, ranking=READ, positive=replace(CONTROL, comparison=comparison(0))),
        UNDECIDED,
    ),
    "likely candidates, the control not read": (
        replace(BLIND, ranking=READ, positive=replace(CONTROL, ranking=UNREAD)),
        UNDECIDED,
    ),
    "many more candidates than images": (
        replace(BLIND, ranking=ranked(*[0.9] * 9, explained=0.9), samples=4),
        UNDECIDED,
    ),
    "a few more candidates than images": (
        replace(BLIND, ranking=ranked(*[0.9] * 6, explained=0.9), samples=4),
        LEAKAGE,
    ),
    "candidates of an uncalibrated kind": (replace(BLIND, ranking=UNCALIBRATED, positive=UNSURE), UNDECIDED),
    "candidates that explain permuted values, too": (
        replace(BLIND, ranking=READ, negative=ranked(0.03, explained=0.4)),
        UNDECIDED,
    ),
    "the same, confirmed by the control": (
        replace(BLIND, ranking=UNCALIBRATED, positive=CONFIRMING),
        LEAKAGE,
    ),
    "the same, confirmed by four of five, as chance does": (
        replace(BLIND, ranking=UNCALIBRATED, positive=replace(CONTROL, likely=5, real=4)),
        UNDECIDED,
    ),
    "likely candidates, and a control of fewer images": (
        replace(BLIND, ranking=READ, positive=replace(CONTROL, images=20)),
        UNDECIDED,
    ),
    "likely candidates, and a control that moved less": (
        replace(BLIND, ranking=READ, positive=replace(CONTROL, way=0.8)),
        UNDECIDED,
    ),
    "likely candidates, and nobody knows how many images there are": (
        replace(BLIND, ranking=READ, positive=replace(CONTROL, samples=None)),
        UNDECIDED,
    ),
    "likely candidates, and batches of live normalisation that nobody knows": (
        replace(BLIND, ranking=READ, positive=replace(CONTROL, live=True)),
        UNDECIDED,
    ),
    "the same, confirmed by too few": (
        replace(BLIND, ranking=UNCALIBRATED, positive=replace(CONTROL, likely=1, real=1)),
        UNDECIDED,
    ),
    "more candidates than the control, none better": (
        replace(BLIND, ranking=ranked(*[0.3] * 8, explained=0.9), negative=ranked(*[0.3] * 2, explained=0.1)),
        NO_EVIDENCE,
    ),
    "the same, refuted by the control": (replace(BLIND, ranking=UNCALIBRATED, positive=REFUTING), UNDECIDED),
    "a calibrated kind, refuted by the control": (replace(BLIND, ranking=READ, positive=REFUTING), UNDECIDED),
    "a calibrated kind, confirmed by too few": (replace(BLIND, ranking=READ, positive=UNSURE), UNDECIDED),
    "nothing found by comparison": (COMPARED, NO_EVIDENCE),
    "nothing found without the images": (BLIND, NO_EVIDENCE),
    "no control": (replace(BLIND, positive=None), UNDECIDED),
    "no control beside the images": (replace(COMPARED, positive=None), UNDECIDED),
    "control not read": (replace(BLIND, positive=replace(CONTROL, ranking=UNREAD)), UNDECIDED),
    "control compared, not read": (replace(COMPARED, positive=replace(CONTROL, comparison=comparison(0))), UNDECIDED),
    "control with fewer images": (replace(BLIND, positive=replace(CONTROL, images=20)), UNDECIDED),
    "number of images unknown": (replace(BLIND, positive=replace(CONTROL, samples=None)), UNDECIDED),
    "control that moved less": (replace(BLIND, positive=replace(CONTROL, way=0.5)), UNDECIDED),
    "several likely candidates, none certain": (replace(BLIND, ranking=ranked(0.7, 0.6, explained=0.9)), UNDECIDED),
    "many that are not likely": (replace(BLIND, ranking=ranked(*[0.3] * 8, explained=0.9)), UNDECIDED),
    "one certain candidate of a method that fails": (
        replace(BLIND, ranking=ranked(0.9, 0.1, explained=0.9), positive=replace(CONTROL, ranking=UNREAD)),
        UNDECIDED,
    ),
    "no more certain than by chance": (replace(BLIND, ranking=READ, negative=ranked(0.96, explained=0.1)), UNDECIDED),
    "explains no more than chance": (replace(BLIND, ranking=READ, negative=ranked(0.02, explained=0.88)), UNDECIDED),
    "likely candidates that match no given image": (replace(COMPARED, ranking=READ), UNDECIDED),
    "a few recovered images": (replace(COMPARED, comparison=comparison(5)), UNDECIDED),
    "more than five among many": (replace(COMPARED, comparison=comparison(6, n=400, held_out=40)), UNDECIDED),
    "a method that explains the control alone": (replace(BLIND, ranking=ranked(0.01, explained=0.2)), UNDECIDED),
    "images that the network gets wrong": (replace(COMPARED, accuracy=0.6, majority=0.5), NO_VERDICT),
    "no better than the commonest class": (replace(COMPARED, accuracy=0.9, majority=0.85), NO_VERDICT),
    "many classes, most of them right": (replace(COMPARED, accuracy=0.6, majority=0.01), NO_EVIDENCE),
    "wrong images beside likely candidates": (
        replace(BLIND, ranking=READ, comparison=compare(torch.ones(4), torch.zeros(2)), accuracy=0.3, majority=0.5),
        NO_VERDICT,
    ),
    "images that explain nothing": (replace(COMPARED, floor=0.84), NO_VERDICT),
    "unread control and a high floor": (replace(COMPARED, floor=0.84, positive=None, ranking=READ), NO_VERDICT),
    "live batch normalisation": (replace(BLIND, live=True), NO_VERDICT),
    "live batch normalisation, likely candidates": (replace(BLIND, ranking=READ, live=True), NO_VERDICT),
    "live batch normalisation, images found": (replace(COMPARED, comparison=comparison(30), live=True), LEAKAGE),
    "a change like noise": (replace(BLIND, ranking=CHANCE), UNDECIDED),
    "a change like noise beside the images": (replace(COMPARED, ranking=CHANCE, floor=1.0), NO_VERDICT),
    "other images than those behind the weights": (replace(COMPARED, floor=0.8, trace=0.5), NO_VERDICT),
    "no negative control": (replace(BLIND, negative=None), NO_VERDICT),
    "likely candidates without a negative control": (replace(BLIND, ranking=READ, negative=None), NO_VERDICT),
}


@pytest.mark.parametrize("case", list(CASES))
def test_one_headline_folds_in_everything(case):
    evidence, outcome = CASES[case]
    found = judge(evidence)
    assert found.outcome is outcome
    assert found.sentence.lower().startswith(outcome.value)
    assert (found.advice == "") == (outcome in (LEAKAGE, NO_EVIDENCE))
    assert not (found.found and outcome is NO_EVIDENCE)
    assert found.found or outcome is not LEAKAGE
    assert (found.reason is None) == (outcome in (LEAKAGE, NO_EVIDENCE))


def test_the_numbers_behind_the_headline():
    found = judge(replace(BLIND, ranking=ranked(0.95, 0.6, 0.1, explained=0.9), negative=ranked(0.7, explained=0.1)))
    assert (found.likely, found.bar, found.readable) == (1, pytest.approx(0.7), True)
    assert found.expected == pytest.approx(0.95)
    assert (found.unexplained, found.unexplained_by_chance) == (pytest.approx(0.1), pytest.approx(0.9))


def test_no_more_images_are_claimed_than_there_are():
    found = judge(replace(BLIND, ranking=ranked(*[0.95] * 6, explained=0.9), samples=4))
    assert "estimated 4 " in found.sentence


def test_advice_fits_the_method_and_the_control():
    far = replace(COMPARED, floor=0.9)
    assert "--initial" in judge(replace(far, method="kkt")).advice
    assert "--initial" not in judge(far).advice
    assert "--samples" in judge(replace(BLIND, positive=replace(CONTROL, samples=None))).advice
    for ranking in (NOTHING, READ):
        without = judge(replace(BLIND, ranking=ranking, positive=None, controls=False)).advice
        assert "--no-controls" in without
        assert "--minutes" not in without


NOISE, OTHERS, METHOD, ANSWERS = Reason.NOISE, Reason.OTHER_IMAGES, Reason.UNDESCRIBED, Reason.WRONG_ANSWERS
LIVE, CERTAIN = Reason.LIVE_NORMALISATION, replace(BLIND, ranking=READ)
FAR = replace(COMPARED, floor=0.8)
REASONS = {
    "candidates explain no more than by chance": (replace(FAR, ranking=CHANCE), NOISE),
    "neither do they without the images": (replace(BLIND, ranking=CHANCE), NOISE),
    "noise also answers badly": (replace(FAR, ranking=CHANCE, accuracy=0.5, majority=0.5), NOISE),
    "the same effort explains no control": (
        replace(FAR, ranking=CHANCE, positive=replace(CONTROL, ranking=CHANCE)),
        METHOD,
    ),
    "the weights themselves, with their start": (replace(FAR, ranking=CHANCE, method="kkt"), METHOD),
    "noise, but the images may have left traces": (replace(FAR, ranking=CHANCE, trace=0.05), METHOD),
    "candidates explain a little more than by chance": (
        replace(FAR, ranking=replace(CHANCE, explained=0.2), trace=0.5),
        OTHERS,
    ),
    "noise, but the images left traces": (replace(FAR, ranking=CHANCE, trace=0.001), METHOD),
    "no larger traces than held-out images": (replace(FAR, trace=0.5), OTHERS),
    "perhaps larger traces": (replace(FAR, trace=0.05), METHOD),
    "no held-out images for traces": (replace(FAR, trace=None), METHOD),
    "wrong answers are more than a high floor": (replace(FAR, accuracy=0.5, majority=0.5), ANSWERS),
    "no traces are more than wrong answers": (replace(FAR, trace=0.5, accuracy=0.5, majority=0.5), OTHERS),
    "live batch normalisation before all others": (replace(FAR, ranking=CHANCE, accuracy=0.5, live=True), LIVE),
    "no negative control": (replace(BLIND, negative=None), Reason.TOO_FEW_READINGS),
    "a few recovered images": (replace(COMPARED, comparison=comparison(5)), Reason.CHANCE),
    "candidates that match no given image": (replace(COMPARED, ranking=READ), Reason.UNMATCHED),
    "weak candidates that match no given image": (
        replace(COMPARED, ranking=ranked(0.7, 0.6, explained=0.9)),
        Reason.UNCERTAIN,
    ),
    "no candidate is certain": (replace(BLIND, ranking=ranked(0.7, 0.6, explained=0.9)), Reason.UNCERTAIN),
    "candidates that explain permuted values, too": (
        replace(CERTAIN, negative=ranked(0.03, explained=0.4)),
        Reason.UNDETERMINED,
    ),
    "a control that refutes": (replace(BLIND, ranking=UNCALIBRATED, positive=REFUTING), Reason.UNCONFIRMED),
    "candidates without a control": (replace(CERTAIN, positive=None), Reason.NO_CONTROL),
    "candidates, and an unread control": (
        replace(CERTAIN, positive=replace(CONTROL, ranking=UNREAD)),
        Reason.UNREAD_CONTROL,
    ),
    "more candidates than images": (
        replace(BLIND, ranking=ranked(*[0.9] * 9, explained=0.9), samples=4),
        Reason.CROWDED,
    ),
    "many that are not likely": (replace(BLIND, ranking=ranked(*[0.3] * 8, explained=0.9)), Reason.FAINT),
    "no control": (replace(BLIND, positive=None), Reason.NO_CONTROL),
    "an unread control": (replace(BLIND, positive=replace(CONTROL, ranking=UNREAD)), Reason.UNREAD_CONTROL),
    "a control that moved less": (replace(BLIND, positive=replace(CONTROL, way=0.5)), Reason.EASIER_CONTROL),
    "a method that explains the control alone": (
        replace(BLIND, ranking=ranked(0.01, explained=0.4)),
        Reason.UNEXPLAINED,
    ),
}


@pytest.mark.parametrize("case", list(REASONS))
def test_a_verdict_that_is_not_a_claim_names_the_reason(case):
    evidence, reason = REASONS[case]
    assert judge(evidence).reason is reason


def test_out_of_time_comes_after_the_specific_advice():
    stopped = replace(COMPARED, finished=False)
    advice = judge(replace(stopped, floor=0.9, method="kkt")).advice
    assert advice.index("--initial") < advice.index(OUT_OF_TIME)
    for evidence in (replace(stopped, negative=None), replace(stopped, comparison=comparison(30))):
        assert judge(evidence).advice == OUT_OF_TIME
    assert judge(replace(stopped, positive=None, ranking=READ)).advice.count("--minutes") == 1


def test_few_held_out_images_leave_the_verdict_to_the_estimates():
    too_few = replace(COMPARED, comparison=compare(torch.ones(4), torch.zeros(2)))
    assert judge(too_few).outcome is NO_EVIDENCE
    assert judge(replace(too_few, ranking=READ)).outcome is LEAKAGE


@pytest.mark.parametrize("positive", [None, CONTROL, CONFIRMING, REFUTING])
@pytest.mark.parametrize("p", [(0.95, 0.9, 0.6), (0.95,), (0.7, 0.6), (0.3, 0.3, 0.3, 0.3)])
def test_ranks_are_not_told_as_probabilities(p, positive):
    ranking = replace(ranked(*p, explained=0.9), calibrated=False)
    found = judge(replace(BLIND, ranking=ranking, positive=positive))
    assert found.found
    assert found.expected is None
    assert "%" not in found.sentence
    assert "estimated" not in found.sentence


def test_probabilities_are_believed_unless_a_control_speaks_against_them():
    assert believed(READ, CHANCE, CONTROL).calibrated
    assert believed(READ, CHANCE, UNSURE).calibrated
    assert believed(READ, CHANCE, None).calibrated
    assert not believed(READ, CHANCE, REFUTING).calibrated
    assert not believed(READ, ranked(0.03, explained=0.4), CONTROL).calibrated
    assert not believed(READ, None, CONTROL).calibrated
    assert not believed(UNCALIBRATED, CHANCE, CONTROL).calibrated


def test_a_reading_as_if_by_sgd_that_explains_anything_asks_for_the_optimiser():
    found = replace(BLIND, ranking=READ, negative=ranked(0.03, explained=0.4))
    assert "--optimiser" in judge(found).advice
    assert "--optimiser" not in judge(replace(found, rule="adam")).advice

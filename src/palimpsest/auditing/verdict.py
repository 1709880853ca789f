"""The headline of an audit: one outcome, from everything that the audit measured.

Leakage       Training images can be read out of the weights.
No evidence   Nothing was read, although the same effort reads a control that is as hard to read.
Undecided     The findings support neither of the two.
No verdict    Something that a verdict needs is missing, or an assumption of the method does not hold.

The first rule that applies gives the headline. A comparison with given training images that claims leakage comes first,
because its rate of false claims is known. Wrong data, or a method that does not describe the training, give no verdict.
Without a comparison, candidates may claim leakage if such candidates of a positive control that is as hard to read are
real, and if the equations determine images: candidates must leave most of the permuted change unexplained. All other
rules only weaken the claim that nothing was read.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from palimpsest.auditing.evidence import CERTAIN, CHANGES, Evidence
from palimpsest.auditing.reasons import Reason
from palimpsest.scoring import Outcome, Verdict

DESCRIBED = 0.5  # share of the target that may stay unexplained if the method describes the training
CROWD = 2.0  # likely candidates per training image, beyond which the estimates do not hold for this network
SUGGESTIVE = 0.1  # p-value of a comparison that neither claims nor excludes leakage
MANY = 5  # recovered images that are too many for "no evidence", even if chance can explain them
LONGER = "Audit again in a new folder with more --minutes."
OUT_OF_TIME = "Out of time. Run the same command again with more --minutes to continue."
NOISY = "the change of the weights looks like noise, because candidates explain its permuted values equally well"
STRONGER = "--initial tests a stronger attacker."
PRIVATE = (
    "Noise has this effect, and so may unusual training. If training was private, record its ε: it is the guarantee."
)
UNDESCRIBED = "the method does not describe this training"
CLEAR = 0.01  # p-value of traces, from which the given images are in the weights
EXPLAINED = 0.1  # of the target left unexplained by the given images: they are those of the training
WITH_CONTROLS = "Audit again in a new folder without --no-controls."


@dataclass(frozen=True)
class AuditVerdict:
    """The headline, and the numbers behind it."""

    outcome: Outcome
    sentence: str  # the verdict in one or two sentences
    advice: str  # how to get a better answer, or the empty string
    likely: int  # candidates that are more likely than not training images, and likelier than chance
    expected: float | None  # how many of these are expected to be training images; None if that is not calibrated
    bar: float | None  # the highest probability of a candidate of the negative control
    readable: bool | None  # whether the positive control was read with the same effort; None without one
    unexplained: float  # the share of the target that the candidates leave unexplained
    unexplained_by_chance: float | None  # the same for the negative control
    found: bool  # whether anything was found, even if it does not suffice for a claim
    reason: Reason | None = None  # why it is not a claim; None for leakage and for no evidence
    of: str = "W"  # the rung that these numbers belong to


def judge(e: Evidence) -> AuditVerdict:
    """Fold all evidence into one headline."""
    p = e.likely(e.ranking)
    outcome, reason, sentence, advice = next(_headlines(e))
    found = outcome is Outcome.LEAKAGE or next(_ambiguities(e, p, _crowded(e, p)), None) is not None
    if not e.finished:  # to continue this audit replaces a longer one in a new folder
        advice = f"{advice.replace(LONGER, '').strip()} {OUT_OF_TIME}".strip()
    return AuditVerdict(
        outcome=outcome,
        sentence=sentence,
        advice=advice,
        likely=len(p),
        expected=float(p.sum()) if e.ranking.calibrated else None,
        bar=None if e.negative is None else e.bar,
        readable=e.readable,
        unexplained=1 - e.ranking.explained,
        unexplained_by_chance=None if e.negative is None else 1 - e.negative.explained,
        found=found,
        reason=reason,
    )


# --- the rules, in the order in which they apply -----------------------------------------------------------------

Reasons = Iterator[tuple[Reason, str, str]]  # why a verdict is not a claim, in words, and how to get a better answer


def _headlines(e: Evidence) -> Iterator[tuple[Outcome, Reason | None, str, str]]:
    """Outcome, reason, sentence and advice of every rule that applies. The first one counts."""
    p = e.likely(e.ranking)
    crowded = _crowded(e, p)
    if e.comparison is not None and e.comparison.outcome is Outcome.LEAKAGE:
        yield Outcome.LEAKAGE, None, e.comparison.sentence, ""
    for reason, words, advice in _obstacles(e):
        yield Outcome.NO_VERDICT, reason, f"No verdict: {words}.", advice
    if not e.compared and _claims(e, crowded):
        found = f"Leakage: {_candidates(e, p)}. Compare the pictures with the training images."
        yield Outcome.LEAKAGE, None, found, ""
    for reason, words, advice in (*_ambiguities(e, p, crowded), *_doubts(e)):
        yield Outcome.UNDECIDED, reason, f"Undecided: {words}.", advice
    assert e.positive is not None
    control = f"The same effort reads a control that is as hard to read, with {e.positive.images} images"
    yield Outcome.NO_EVIDENCE, None, f"No evidence of leakage: {_nothing(e)}. {control}.", ""


def _claims(e: Evidence, crowded: bool) -> bool:
    """Whether the candidates alone suffice for a claim."""
    hard = e.positive is not None and e.positive.easier is None
    return bool(e.readable) and e.certain(e.ranking) and e.holds and hard and not crowded


def _crowded(e: Evidence, p: Tensor) -> bool:
    return e.samples is not None and len(p) > CROWD * e.samples


def _obstacles(e: Evidence) -> Reasons:
    """Something is missing, or an assumption does not hold."""
    if e.live:
        words = "batch normalisation was live in training, so each gradient depends on its whole batch"
        advice = "Do not take this for safety: others may find a method."
        yield Reason.LIVE_NORMALISATION, f"{words}, and the method for final weights alone does not read that", advice
    if e.floor is not None and e.floor > DESCRIBED and e.method in CHANGES:
        yield from _far(e, e.floor)
    explained = e.floor is not None and e.floor < EXPLAINED  # early federated rounds: right images, poor answers
    if e.accuracy is not None and e.accuracy < (1 + e.majority) / 2 and not explained:  # half-way to a perfect answer
        words = f"the network classifies only {e.accuracy:.0%} of the given training images correctly"
        advice = "Check the images and their classes, and the mean and standard deviation that training used."
        yield Reason.WRONG_ANSWERS, words, advice
    if e.floor is not None and e.floor > DESCRIBED:
        advice = f"From the final weights alone, only very long training can be read. {STRONGER}"
        if e.method in CHANGES:
            advice = _training(e)
        yield Reason.UNDESCRIBED, f"{UNDESCRIBED}. {_unexplained(e.floor)}", advice
    if e.negative is None:
        advice = "Some restarts diverged. Audit again in a new folder with another --seed." if e.finished else LONGER
        yield Reason.TOO_FEW_READINGS, "the audit did not finish two restarts and a negative control", advice


def _far(e: Evidence, floor: float) -> Reasons:
    """The given images leave much of the change unexplained. Is that the method, noise, or are they other images?"""
    if e.trace is not None and e.trace <= CLEAR:
        advice = _training(e)
        words = f"{UNDESCRIBED}. {_unexplained(floor)}, although they left traces in the weights"
        yield Reason.UNDESCRIBED, words, advice
    elif e.trace is not None and e.trace <= SUGGESTIVE:
        return  # there may be traces, so it is neither noise nor a training on others
    elif e.noisy:
        yield Reason.NOISE, f"{NOISY}. {_unexplained(floor)}", PRIVATE
    elif e.trace is not None:
        words = "the given images may not be those behind these weights. They left no larger traces than held-out ones"
        advice = "Check that these are the training images, as training saw them: mean, deviation, augmentation."
        yield Reason.OTHER_IMAGES, f"{words}, and leave {floor:.0%} of the target unexplained", advice


def _training(e: Evidence) -> str:
    """Kinds of training that the method does not describe."""
    return f"{_adam(e)}A wrong mean or standard deviation has this effect. So do long training and high learning rates."


def _adam(e: Evidence) -> str:
    """Advice on an optimiser that this reading did not assume, with a space behind it."""
    if e.rule_known or e.rule == "adam" or e.method not in ("ntk", "path"):
        return ""
    return "If Adam or AdamW trained this network, audit again in a new folder with --optimiser adam. "


def _unexplained(floor: float) -> str:
    return f"The given images leave {floor:.0%} of its target unexplained"


def _ambiguities(e: Evidence, p: Tensor, crowded: bool) -> Reasons:
    """Something was found, but not enough for a claim."""
    if e.compared and e.comparison is not None and e.comparison.p_value is not None:
        # The correction for looks protects claims. Here it would turn a suspicion into nothing.
        if e.comparison.p_value <= e.looks * SUGGESTIVE or e.comparison.recovered > MANY:
            words = f"{_recovered(e.comparison)}, which chance can explain"
            if not e.comparison.recovered:
                higher = f"score higher than held-out ones (p = {e.comparison.p_value:.2g})"
                words = f"training images {higher}, which chance can explain"
            yield Reason.CHANCE, words, f"Hold out more images. {LONGER}"
        if len(p):
            unmatched = "no given training image is matched better than by chance"
            reason, doubt = Reason.UNMATCHED, unmatched
            if not _claims(e, crowded):  # then the candidates are weak, and need not match anything
                reason, doubt = _weakness(e, crowded)
                doubt = f"{doubt}, and {unmatched}"
            yield reason, f"{_candidates(e, p)}, but {doubt}", LONGER
    elif len(p):
        reason, doubt = _weakness(e, crowded)
        advice = _remedy(e) if reason is Reason.NO_CONTROL else LONGER
        if reason is Reason.UNDETERMINED:
            advice = f"{_adam(e)}Give the training images by --data. They decide."
        if reason is Reason.EASIER_CONTROL and e.positive is not None and e.positive.easier:
            advice = e.positive.easier[1]
        yield reason, f"{_candidates(e, p)}, but {doubt}", f"Look at the pictures. {advice}"
    elif e.surplus >= 1 and not e.ranking.calibrated:
        yield Reason.FAINT, "restarts agree more than by chance, but no candidate stands out", LONGER
    elif e.surplus >= 1:
        count = "one candidate" if round(e.surplus) == 1 else f"{e.surplus:.0f} candidates"
        yield Reason.FAINT, f"about {count} beyond chance can be expected to be real, but none is likely", LONGER


def _weakness(e: Evidence, crowded: bool) -> tuple[Reason, str]:
    """Why likely candidates do not suffice for a claim."""
    if crowded:
        return Reason.CROWDED, f"there are only {e.samples} training images, so the estimates do not hold here"
    if not e.certain(e.ranking):
        calibrated = e.ranking.calibrated
        return Reason.UNCERTAIN, (
            f"no estimate reaches {CERTAIN:.0%}" if calibrated else "restarts do not agree on any of them enough"
        )
    if e.readable is None:
        return Reason.NO_CONTROL, "no positive control was read"
    if not e.determined and e.negative is not None:
        explained = f"candidates also explain {e.negative.explained:.0%} of permuted values, where nothing can be read"
        return Reason.UNDETERMINED, explained
    if not e.holds and e.positive is not None:
        likely, real = e.positive.likely, e.positive.real
        few = f"the positive control has only {likely} of them, too few to confirm that they are real"
        refuted = f"only {real} of {likely} such candidates in the positive control are real"
        return Reason.UNCONFIRMED, few if e.positive.confirms is None else refuted
    if e.positive is not None and e.positive.easier:
        return Reason.EASIER_CONTROL, f"the positive control may be easier to read: {e.positive.easier[0]}"
    return Reason.UNREAD_CONTROL, "the same effort does not read the control"


def _doubts(e: Evidence) -> Reasons:
    """Nothing was found, and nothing shows that it would have been."""
    if e.positive is None or e.readable is None:
        yield Reason.NO_CONTROL, f"{_nothing(e)}, and no positive control was read", _remedy(e)
        return
    if e.floor is None and e.noisy:
        yield Reason.NOISE, f"{_nothing(e)}, but {NOISY}", PRIVATE
    if not e.readable:
        words = f"{_nothing(e)}, but the same effort does not read the positive control either"
        yield Reason.UNREAD_CONTROL, words, LONGER
    if e.positive.easier:
        why, advice = e.positive.easier
        yield Reason.EASIER_CONTROL, f"{_nothing(e)}, but the positive control may be easier to read: {why}", advice
    ours, control = (1 - ranking.explained for ranking in (e.ranking, e.positive.ranking))
    if e.floor is None and ours > DESCRIBED >= control:
        words = f"{ours:.0%} of the target stays unexplained, and {control:.0%} in the positive control"
        advice = "Give the training images by --data, to test the method."
        yield Reason.UNEXPLAINED, f"{_nothing(e)}, but {words}", advice


def _remedy(e: Evidence) -> str:
    """How to get a positive control."""
    if not e.controls:
        return WITH_CONTROLS
    return "The log says why the positive control could not be read." if e.finished else LONGER


def _nothing(e: Evidence) -> str:
    return f"{_recovered(e.comparison)}, no more than by chance" if e.compared else "nothing was read"


def _recovered(comparison: Verdict | None) -> str:
    assert comparison is not None
    return f"{comparison.recovered} of {comparison.total} training images recovered (p = {comparison.p_value:.2g})"


def _candidates(e: Evidence, p: Tensor) -> str:
    if not e.ranking.calibrated:
        count = "one candidate" if len(p) == 1 else f"{len(p)} candidates"
        agreed = f"restarts agree on {count} more than by chance"
        return f"{agreed}{_confirmed(e)}"
    if len(p) == 1:
        probability = f"an estimated probability of {float(p[0]):.0%}"
        return f"restarts agree on one candidate, with {probability}{_confirmed(e)}"
    real = min(round(float(p.sum())), e.samples or len(p))
    return f"restarts agree on {len(p)} candidates, and an estimated {real} are training images{_confirmed(e)}"


def _confirmed(e: Evidence) -> str:
    if e.positive is None or not e.holds:
        return ""
    return f"; of {e.positive.likely} such candidates in the positive control, {e.positive.real} are real"

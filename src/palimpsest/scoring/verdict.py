"""Did the training images leak? A claim with a known rate of false alarms.

Members are the training images. Held-out images are others of the same kind, scored in the same way. If the candidates
do not depend on the training set, the two are exchangeable. Every ranking of n members and m held-out images by score
is then equally likely. Two tests check this:

- the Mann–Whitney test, which detects that members tend to score higher. It is exact up to `EXACT_LIMIT` pairs, and
  uses the normal approximation for more;
- the count R of members that score above *every* held-out image, which detects that a few score far higher:
  P(R ≥ r) = Π_{i<r} (n − i)/(n + m − i), exactly.

Leakage is claimed if either p-value is at most (1 − confidence)/2, so a false claim has at most the probability
1 − confidence. The strongest of several reconstructions may be reported: each p-value is then multiplied by their
number, the looks (Bonferroni).

Images drawn in fixed numbers of each class are exchangeable only within a class. The two tests pool the classes. They
hold approximately if members and held-out images have the same proportions of classes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from scipy import optimize, stats
from torch import Tensor

from palimpsest.errors import InvalidInputError

EXACT_LIMIT = 40_000  # pairs up to which the Mann–Whitney distribution is computed exactly


class Outcome(StrEnum):
    """The claim. An audit uses all four outcomes. A comparison with known training images does not use `UNDECIDED`."""

    LEAKAGE = "leakage"
    """Training images can be read out of the weights."""
    NO_EVIDENCE = "no evidence"
    """Nothing was read. An audit says so only if the same effort reads a control that is as hard to read."""
    UNDECIDED = "undecided"
    """The audit ran to its end, and its findings support neither of the two."""
    NO_VERDICT = "no verdict"
    """A verdict needs something that is missing, or an assumption of the method does not hold."""


@dataclass(frozen=True)
class Verdict:
    """How much of the training set leaked, according to the scores.

    Args:
        outcome: leakage, no evidence, or no verdict (too few held-out images).
        sentence: the verdict in one or two sentences.
        recovered: the number of training images above every held-out image and above their own blurred copies. Without
            held-out images, the number above their own blurred copies, which proves nothing.
        total: the number of training images.
        interval: confidence interval for the number of images recovered beyond chance. Its upper end is ``recovered``.
        auc: the probability that a training image scores above a held-out image.
        auc_interval: its confidence interval (Newcombe's score method).
        p_value: of the exchangeability of training and held-out images, corrected for two tests and for all looks.
        threshold: the score that an image must exceed.
        confidence: the confidence of the intervals and of the claim.
    """

    outcome: Outcome
    sentence: str
    recovered: int
    total: int
    interval: tuple[int, int] | None
    auc: float | None
    auc_interval: tuple[float, float] | None
    p_value: float | None
    threshold: float
    confidence: float

    @property
    def as_a_whole(self) -> bool:
        """Whether the training images leaked as a whole, without one that is recovered beyond chance."""
        return self.outcome is Outcome.LEAKAGE and self.interval is not None and self.interval[0] == 0


def judge(members: Tensor, held_out: Tensor, *, confidence: float = 0.99, looks: int = 1) -> Verdict:
    """The verdict on scores. A score is above 0 only if the match is better than a blurred copy.

    Args:
        members: the scores of the n training images.
        held_out: the scores of the m held-out images. With too few there is no verdict.
        confidence: the confidence of the claim and of the intervals.
        looks: how many reconstructions of the same weights you judge, if you report the strongest.

    Examples:
        >>> import torch
        >>> judge(torch.linspace(0.2, 0.9, 30), torch.linspace(-0.4, 0.4, 30)).sentence
        'Leakage: 21 of 30 training images recovered, at least 17 beyond chance (99 % confidence). AUC of training
        against held-out images: 0.96 (0.81 to 0.99).'
    """
    if not 0.5 <= confidence < 1 or looks < 1:
        raise InvalidInputError(f"confidence is {confidence}, looks {looks}; give 0.5 ≤ confidence < 1 and looks ≥ 1")
    x, y = (scores.detach().cpu().double().numpy() for scores in (members, held_out))
    n, m, half = len(x), len(y), (1 - confidence) / (2 * looks)
    if m == 0:
        return _no_verdict(x, confidence, "no held-out images were given")
    if 1 / math.comb(n + m, n) > half:  # not even a perfect separation would be beyond chance
        return _no_verdict(x, confidence, f"{n} training and {m} held-out images are too few")
    threshold = max(0.0, float(y.max()))
    R = int((x > threshold).sum())
    p_value = min(1.0, 2 * looks * min(_mann_whitney(x, y), _exceedance(R, n, m)))
    # The fewest true recoveries t for which chance can explain the other R − t among n − t exchangeable images.
    low = next(t for t in range(R + 1) if _exceedance(R - t, n - t, m) > half)
    auc = float(((x[:, None] > y).mean() + (x[:, None] >= y).mean()) / 2)
    limits = _auc_interval(auc, n, m, confidence)
    outcome = Outcome.LEAKAGE if p_value <= 1 - confidence else Outcome.NO_EVIDENCE
    verdict = Verdict(outcome, "", R, n, (low, R), auc, limits, p_value, threshold, confidence)
    return replace(verdict, sentence=_sentence(verdict))


def strongest(verdicts: Sequence[Verdict]) -> int:
    """The index of the verdict that recovered most, among several on the same weights.

    Judge each of them with ``looks=len(verdicts)``.

    Examples:
        >>> import torch
        >>> few, many = (judge(torch.linspace(low, 0.9, 30), torch.zeros(30), looks=2) for low in (-0.9, 0.2))
        >>> strongest([few, many])
        1
    """
    return max(
        range(len(verdicts)),
        key=lambda i: (verdicts[i].outcome is Outcome.LEAKAGE, verdicts[i].recovered, -(verdicts[i].p_value or 0.0)),
    )


def _sentence(v: Verdict) -> str:
    """Outcome, number, confidence; the AUC as the one number for the whole set."""
    assert v.interval is not None
    assert v.auc_interval is not None
    percent, count = f"{100 * v.confidence:.3g} %", f"{v.recovered} of {v.total} training images"
    if v.outcome is Outcome.NO_EVIDENCE:
        start = f"No evidence of leakage: {count} recovered, which chance can explain (p = {v.p_value:.2g})."
    elif v.as_a_whole:
        start = (
            f"Leakage as a whole: the weights hold a trace of the {v.total} training images ({percent} confidence), but"
            " no single image is recovered beyond chance."
        )
    else:
        start = f"Leakage: {count} recovered, at least {v.interval[0]} beyond chance ({percent} confidence)."
    low, high = v.auc_interval
    return f"{start} AUC of training against held-out images: {v.auc:.2f} ({low:.2f} to {high:.2f})."


def _no_verdict(x: np.ndarray, confidence: float, reason: str) -> Verdict:
    R = int((x > 0).sum())
    sentence = (
        f"No verdict: {reason}. {R} of {len(x)} training images have a match better than a blur, which proves nothing."
    )
    return Verdict(Outcome.NO_VERDICT, sentence, R, len(x), None, None, None, None, 0.0, confidence)


def _exceedance(r: int, n: int, m: int) -> float:
    """P(R ≥ r): the r best of n + m exchangeable images are all among the n."""
    return math.prod((n - i) / (n + m - i) for i in range(r))


def _mann_whitney(x: np.ndarray, y: np.ndarray) -> float:
    """One-sided p-value that members score higher. Ties count against members, so the level holds."""
    scores, held_out = np.concatenate([x, y]), np.repeat([0, 1], [len(x), len(y)])
    ranks = np.empty(len(scores))
    ranks[np.lexsort((held_out, scores))] = np.arange(len(scores))
    method = "exact" if len(x) * len(y) <= EXACT_LIMIT else "asymptotic"
    a, b = ranks[: len(x)], ranks[len(x) :]
    return float(stats.mannwhitneyu(a, b, alternative="greater", method=method).pvalue)


def _auc_interval(auc: float, n: int, m: int, confidence: float) -> tuple[float, float]:
    """Newcombe's fifth method: the θ with |auc − θ| ≤ z √V(θ), which remains an interval if auc is 0 or 1."""
    z = stats.norm.ppf((1 + confidence) / 2)
    N = (n + m) / 2 - 1

    def beyond(θ: float) -> float:
        V = θ * (1 - θ) * (1 + N * (1 - θ) / (2 - θ) + N * θ / (1 + θ)) / (n * m)
        return (auc - θ) ** 2 - z**2 * V

    low = 0.0 if auc == 0 else optimize.brentq(beyond, 0, auc - 1e-12 if auc == 1 else auc)
    high = 1.0 if auc == 1 else optimize.brentq(beyond, auc + 1e-12 if auc == 0 else auc, 1)
    return float(low), float(high)

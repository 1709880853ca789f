"""The names of the reasons for which a verdict is not a claim. docs/pipelines.md lists them with what helps."""

from enum import StrEnum


class Reason(StrEnum):
    """Why a verdict is not a claim. Programs read this name; the sentence says it with its numbers."""

    LIVE_NORMALISATION = "live normalisation"  # each gradient depends on its whole batch
    UNDESCRIBED = "method does not fit"  # the training images leave too much of the target unexplained
    NOISE = "noise"  # candidates explain the change no better than its permuted values
    OTHER_IMAGES = "other images"  # the given images left no traces in the weights
    WRONG_ANSWERS = "wrong answers"  # the network does not classify the given images
    TOO_FEW_READINGS = "too few readings"  # a verdict needs two restarts, and two of the negative control
    CHANCE = "chance"  # some images were recovered, which chance can explain
    UNMATCHED = "unmatched candidates"  # restarts agree on candidates, but these match no given image
    UNCERTAIN = "uncertain candidates"  # restarts do not agree on any candidate enough
    UNCONFIRMED = "unconfirmed candidates"  # the positive control does not show that such candidates are real
    UNDETERMINED = "undetermined candidates"  # such candidates also explain permuted values
    CROWDED = "crowded candidates"  # more likely candidates than training images can explain
    FAINT = "faint agreement"  # restarts agree more than by chance, but no candidate stands out
    NO_CONTROL = "no positive control"
    UNREAD_CONTROL = "unread positive control"  # the same effort does not read it either
    EASIER_CONTROL = "easier positive control"
    UNEXPLAINED = "unexplained target"  # nothing was read, and more is unexplained than in the positive control
    FAILED_RUNG = "failed rung"  # an attacker who knows more could not be tried
    OUT_OF_TIME = "out of time"
    WRONG_FILES = "wrong files"  # a sign that the given files or options are wrong

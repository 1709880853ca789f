"""Handwritten digits, 8×8 and grey: 1,797 of them, inside scikit-learn."""

from pathlib import Path

from palimpsest.datasets.base import Source, register

CLASSES = tuple("0123456789")
ODD = frozenset({1, 3, 5, 7, 9})


@register("digits")
def read(root: Path | None) -> Source:
    """The digits of scikit-learn; odd ones are +1 in the two-class task.

    >>> read(None).images.shape
    (1797, 1, 8, 8)
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    return Source(data.images[:, None] / 16, data.target, CLASSES, positive=ODD, sides=("even", "odd"))

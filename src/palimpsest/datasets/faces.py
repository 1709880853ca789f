"""Faces and other pictures, 25×25 and grey: 100 of each, inside scikit-image."""

from pathlib import Path

import numpy as np

from palimpsest.datasets.base import Source, register


@register("faces")
def read(root: Path | None) -> Source:
    """The face / non-face subset of Labelled Faces in the Wild; faces are +1.

    >>> read(None).images.shape
    (200, 1, 25, 25)
    """
    from skimage.data import lfw_subset

    images = lfw_subset()[:, None]
    labels = np.repeat([1, 0], 100)  # the first hundred are the faces
    return Source.of_two(images, labels, ("other", "face"))

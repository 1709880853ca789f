"""What `load` promises for every dataset: balance, disjointness, the same images for the same seed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palimpsest import datasets
from palimpsest.datasets import base
from palimpsest.errors import DataError, InvalidInputError


def contents(split):
    return {image.numpy().tobytes() for image in split.images}


@pytest.mark.parametrize("name", ["faces", "digits"])
def test_shipped_data_sets_are_balanced_in_range_and_disjoint(name):
    data = datasets.load(name, per_class=12, held_out_per_class=15, seed=3)
    assert data.train.images.dtype == torch.float32
    assert data.train.images.shape == (24, *data.image_shape)
    assert 0 <= data.train.images.min() < data.train.images.max() <= 1
    assert data.train.labels.tolist() == [-1] * 12 + [1] * 12
    assert data.held_out.labels.tolist() == [-1] * 15 + [1] * 15
    assert not contents(data.train) & contents(data.held_out)
    assert len(data.classes) == 2


def test_faces_are_the_positive_class():
    data = datasets.load("faces", per_class=3)
    from skimage.data import lfw_subset

    faces = {np.float32(image).tobytes() for image in lfw_subset()[:100]}
    positive = [image.numpy().tobytes() in faces for image in data.train.images]
    assert positive == [False] * 3 + [True] * 3


def test_ten_classes():
    data = datasets.load("digits", per_class=4, task="classes")
    assert data.train.labels.bincount().tolist() == [4] * 10
    assert data.classes == tuple("0123456789")


def test_same_seed_same_images_other_seed_others():
    first, again, other = (datasets.load("faces", seed=s).train.images for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_mean_belongs_to_train_and_held_out_alike():
    data = datasets.load("faces", per_class=5, held_out_per_class=9)
    both = torch.cat([data.train.images, data.held_out.images])
    torch.testing.assert_close(data.centred(both).mean(0), torch.zeros(data.image_shape), atol=1e-6, rtol=0)


@given(st.integers(0, 1000), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_a_picture_that_occurs_twice_is_drawn_once(seed, train, held_out):
    pictures = np.arange(10, dtype=np.uint8)[np.array([0, 1, 2, 3, 4, 5, 6, 7, 0, 0, 1, 7])]
    labels = np.array([0, 0, 0, 0, 0, 1, 1, 1, 0, 1, 1, 0])
    images = pictures[:, None, None, None] * np.ones((1, 1, 2, 2), np.uint8)
    try:
        rows = base._draw(images, labels, (train, held_out), ("a", "b"), seed)
    except DataError:
        return
    drawn = pictures[np.concatenate(rows)]
    assert len(set(drawn.tolist())) == len(drawn) == 2 * (train + held_out)
    assert (np.bincount(labels[rows[0]]) == train).all()


def test_a_set_of_your_own_is_one_function(monkeypatch):
    monkeypatch.setattr(base, "SOURCES", dict(base.SOURCES))

    @datasets.register("noise")
    def read(root):
        images = np.random.default_rng(0).random((12, 3, 4, 4))
        return datasets.Source(images, np.arange(12) % 3, ("a", "b", "c"))

    data = datasets.load("noise", per_class=2)
    assert data.image_shape == (3, 4, 4)
    assert data.train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    with pytest.raises(InvalidInputError, match="binary"):
        datasets.load("noise", per_class=2, task="binary")


def test_images_for_tuning_are_apart_from_those_of_other_seeds():
    reported = [datasets.load("faces", per_class=10, seed=seed) for seed in (0, 1)]
    tuning = datasets.load("faces", per_class=10, seed=11, apart_from=(0, 1))
    used = set().union(*(contents(part) for data in reported for part in (data.train, data.held_out)))
    assert not (contents(tuning.train) | contents(tuning.held_out)) & used
    assert len(contents(tuning.train)) == 20
    assert contents(datasets.load("faces", per_class=10, seed=11).train) & used  # else there was nothing to avoid


def test_more_images_than_there_are():
    with pytest.raises(DataError, match=r"'other'.* 100 "):
        datasets.load("faces", per_class=60)


@pytest.mark.parametrize("options", [{"per_class": 0}, {"held_out_per_class": 0}, {"task": "regression"}])
def test_wrong_options(options):
    with pytest.raises(InvalidInputError):
        datasets.load("digits", **options)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(DataError, match="cifar10, cifar10-test, digits, faces, mnist"):
        datasets.load("imagenet")

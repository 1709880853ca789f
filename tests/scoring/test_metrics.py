"""Metrics against scikit-image and against what they must not depend on."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from palimpsest.errors import InvalidInputError
from palimpsest.scoring import metrics


def images(n, shape=(1, 16, 16), seed=0):
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def oracle(a, b, data_range):
    return structural_similarity(
        a.numpy(), b.numpy(), gaussian_weights=True, sigma=1.5, use_sample_covariance=False,
        data_range=data_range, channel_axis=0,
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(1, 25, 25), (3, 32, 32), (1, 11, 11), (2, 13, 40)])
@pytest.mark.parametrize("data_range", [1.0, 255.0])
def test_ssim_equals_scikit_image(shape, data_range):
    a = images(6, shape) * data_range
    b = 0.7 * a + 0.3 * images(6, shape, seed=1) * data_range
    b[0], b[1] = a[0], 0.5 * data_range
    expected = [oracle(x, y, data_range) for x, y in zip(a, b, strict=True)]
    np.testing.assert_allclose(metrics.ssim(a, b, data_range=data_range), expected, atol=1e-6, rtol=0)


def test_ssim_of_faces_in_single_precision_equals_scikit_image():
    from palimpsest import datasets

    data = datasets.load("faces", per_class=10)
    a, b = data.train.images, data.held_out.images
    expected = [oracle(x.double(), y.double(), 1.0) for x, y in zip(a, b, strict=True)]
    np.testing.assert_allclose(metrics.ssim(a, b), expected, atol=1e-6, rtol=0)


@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(3, 20), st.integers(3, 20))
@settings(max_examples=30, deadline=None)
def test_ssim_is_symmetric_bounded_and_one_on_itself(seed, channels, height, width):
    a, b = images(2, (channels, height, width), seed), images(2, (channels, height, width), seed + 1)
    torch.testing.assert_close(metrics.ssim(a, a), torch.ones(2).double())
    torch.testing.assert_close(metrics.ssim(a, b), metrics.ssim(b, a))
    assert (metrics.ssim(a, b).abs() <= 1 + 1e-12).all()


@given(st.integers(0, 2**31), st.floats(0.1, 10), st.floats(-5, 5))
@settings(max_examples=30, deadline=None)
def test_minmax_and_ncc_forget_brightness_and_contrast(seed, scale, shift):
    a, b = images(3, seed=seed), images(2, seed=seed + 1)
    torch.testing.assert_close(metrics.minmax(scale * a + shift), metrics.minmax(a))
    torch.testing.assert_close(metrics.pairwise_ncc(scale * a + shift, b), metrics.pairwise_ncc(a, b))
    torch.testing.assert_close(metrics.pairwise_ncc(-a, b), -metrics.pairwise_ncc(a, b))


def test_ncc_is_the_correlation_coefficient():
    a, b = images(3), images(2, seed=1)
    expected = np.corrcoef(a.flatten(1), b.flatten(1))[:3, 3:]
    np.testing.assert_allclose(metrics.pairwise_ncc(a, b), expected, atol=1e-12)


def test_flat_images_are_harmless():
    flat = torch.full((1, 1, 12, 12), 0.3)
    assert metrics.pairwise_ncc(flat, images(4, (1, 12, 12))).abs().max() == 0
    assert metrics.minmax(flat, low=-1, high=2).unique().tolist() == [-1]


def test_psnr_and_l2():
    a, b = images(3), images(3, seed=1)
    expected = [peak_signal_noise_ratio(x.numpy(), y.numpy(), data_range=2) for x, y in zip(a, b, strict=True)]
    np.testing.assert_allclose(metrics.psnr(a, b, data_range=2), expected)
    np.testing.assert_allclose(metrics.l2(a, b), np.linalg.norm((a - b).flatten(1), axis=1))
    assert metrics.psnr(a, a).isinf().all()


def test_blur_keeps_constants_and_mean_of_nothing_else():
    flat = torch.full((2, 3, 9, 7), 0.4)
    torch.testing.assert_close(metrics.gaussian_blur(flat, sigma=2.0), flat)
    sharp = images(2)
    assert (metrics.gaussian_blur(sharp, sigma=2.0).var((2, 3)) < 0.2 * sharp.var((2, 3))).all()


def test_shapes_that_do_not_fit():
    for a, b in ((images(2), images(3)), (images(2), images(2, (1, 8, 8))), (images(2)[0], images(2)[0])):
        with pytest.raises(InvalidInputError):
            metrics.ssim(a, b)

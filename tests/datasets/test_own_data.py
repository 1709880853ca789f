"""Folders of images and .npz arrays of the user's own."""

import zipfile

import numpy as np
import pytest
import torch
from numpy.lib import format as npy
from PIL import Image

from palimpsest import datasets
from palimpsest.datasets import arrays
from palimpsest.errors import DataError

RNG = np.random.default_rng(0)


def write_folder(root, *, classes=("cat", "dog"), n=6, size=(5, 4), mode="L", suffix=".png"):
    for name in classes:
        (root / name).mkdir(parents=True)
        for i in range(n):
            pixels = RNG.integers(0, 256, (*size, 3) if mode == "RGB" else size, dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}{suffix}")
    return root


def load(path):
    return datasets.load(path, per_class=2, held_out_per_class=2)


@pytest.mark.parametrize(("mode", "suffix", "channels"), [("L", ".png", 1), ("RGB", ".png", 3), ("RGB", ".jpg", 3)])
def test_folder(tmp_path, mode, suffix, channels):
    data = load(write_folder(tmp_path, mode=mode, suffix=suffix))
    assert data.image_shape == (channels, 5, 4)
    assert data.classes == ("cat", "dog")
    assert data.train.labels.tolist() == [-1, -1, 1, 1]


def test_folder_keeps_pixels_and_classes(tmp_path):
    write_folder(tmp_path, mode="RGB", classes=("a", "b", "c"))
    data = load(tmp_path)
    assert data.train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    first = data.train.images[0].mul(255).round().byte().permute(1, 2, 0).numpy()
    assert any(np.array_equal(first, np.array(Image.open(path))) for path in (tmp_path / "a").iterdir())


def test_grey_among_colour_becomes_colour(tmp_path):
    write_folder(tmp_path, mode="RGB", n=2)
    for name in ("cat", "dog"):
        for i in (2, 3):
            Image.fromarray(RNG.integers(0, 256, (5, 4), dtype=np.uint8)).save(tmp_path / name / f"{i}.png")
    assert load(tmp_path).image_shape == (3, 5, 4)


def test_one_class(tmp_path):
    with pytest.raises(DataError, match="sub-folder"):
        load(write_folder(tmp_path, classes=("cat",)))


def test_empty_class(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "eel").mkdir()
    with pytest.raises(DataError, match="eel"):
        load(tmp_path)


def test_too_few(tmp_path):
    with pytest.raises(DataError, match=r"'cat'.* 3 "):
        load(write_folder(tmp_path, n=3))


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b"",
        lambda b: b"GIF89a" + b[6:],
        lambda b: b[: len(b) * 2 // 3],
        lambda b: b[:50] + bytes([b[50] ^ 0xFF]) + b[51:],
    ],
)
def test_corrupt_image_is_named(tmp_path, damage):
    write_folder(tmp_path, size=(25, 25))
    path = tmp_path / "dog" / "4.png"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"dog/4.png"):
        load(tmp_path)


def test_other_size_and_depth_are_named(tmp_path):
    write_folder(tmp_path)
    Image.new("L", (9, 9)).save(tmp_path / "dog" / "3.png")
    with pytest.raises(DataError, match=r"dog/3.png.*size"):
        load(tmp_path)
    Image.fromarray(np.zeros((5, 4), np.uint16)).save(tmp_path / "dog" / "3.png")
    with pytest.raises(DataError, match=r"dog/3.png.*I;16"):
        load(tmp_path)


@pytest.mark.parametrize("shape", [(12, 6, 5), (12, 1, 6, 5), (12, 6, 5, 1)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_npz(tmp_path, shape, dtype):
    images = RNG.integers(0, 256, shape, dtype=np.uint8)
    images = images if dtype == np.uint8 else (images / 255).astype(dtype)
    np.savez(tmp_path / "own.npz", images=images, labels=np.repeat([-1, 1], 6))
    data = load(tmp_path / "own.npz")
    assert data.image_shape == (1, 6, 5)
    assert data.train.labels.tolist() == [-1, -1, 1, 1]
    expected = torch.from_numpy(images.reshape(12, 1, 6, 5).astype(np.float32) / (255 if dtype == np.uint8 else 1))
    assert all(any(torch.allclose(x, e) for e in expected[:6]) for x in data.train.images[:2])


def test_npz_in_fortran_order_and_compressed(tmp_path):
    images = np.asfortranarray(RNG.random((8, 3, 4, 5)))
    np.savez_compressed(tmp_path / "own.npz", images=images, labels=np.repeat([5, 7], 4))
    data = load(tmp_path / "own.npz")
    assert data.classes == ("5", "7")
    assert all(any(np.allclose(x, e) for e in images[:4]) for x in data.train.images[:2].numpy())


GOOD = {"images": RNG.random((8, 4, 5)), "labels": np.repeat([0, 1], 4)}
BAD = {
    "no labels": ({"images": GOOD["images"]}, "labels"),
    "fewer labels than images": ({**GOOD, "labels": np.arange(7)}, "label"),
    "labels that are objects": ({**GOOD, "labels": np.array([object()] * 8)}, "labels"),
    "images beyond one": ({**GOOD, "images": 2 * GOOD["images"]}, "images"),
    "images of NaN": ({**GOOD, "images": np.full((8, 4, 5), np.nan)}, "images"),
    "images of one dimension": ({**GOOD, "images": np.zeros((8, 20))}, "images"),
    "one class": ({**GOOD, "labels": np.zeros(8, int)}, "class"),
}


@pytest.mark.parametrize(("arrays", "name"), BAD.values(), ids=BAD)
def test_npz_that_does_not_fit(tmp_path, arrays, name):
    np.savez(tmp_path / "own.npz", **arrays)
    with pytest.raises(DataError, match=f"own.npz.*{name}"):
        load(tmp_path / "own.npz")


def test_npz_that_lies_or_is_damaged(tmp_path):
    path = tmp_path / "own.npz"
    with pytest.raises(DataError, match=r"own.npz"):
        load(path)
    path.write_bytes(b"not a zip file")
    with pytest.raises(DataError, match=r"own.npz"):
        load(path)
    for many in (10**9, 10, -1):
        with zipfile.ZipFile(path, "w") as archive, archive.open("images.npy", "w") as stream:
            npy.write_array_header_1_0(stream, {"descr": "<f8", "fortran_order": False, "shape": (many, 28, 28)})
        with pytest.raises(DataError, match=r"own.npz.*images"):
            load(path)
    np.savez_compressed(path, **GOOD)
    content = bytearray(path.read_bytes())
    content[200:260] = bytes(60)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"own.npz"):
        load(path)


def test_images_too_large_for_any_network_are_refused_before_they_are_decoded(tmp_path):
    write_folder(tmp_path)
    Image.new("1", (5000, 5000)).save(tmp_path / "dog" / "3.png")
    with pytest.raises(DataError, match=r"dog/3.png.*5000×5000"):
        load(tmp_path)


def test_npz_that_unpacks_to_far_more_than_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "SUSPICIOUS", 10_000)
    np.savez_compressed(tmp_path / "own.npz", images=np.zeros((8, 40, 50), np.uint8), labels=np.repeat([0, 1], 4))
    with pytest.raises(DataError, match=r"own.npz.*'images'"):
        load(tmp_path / "own.npz")


@pytest.mark.parametrize(
    "header", ["{'descr': '<i8', 'fortran_order': False, 'shape': (12,", "(" * 3000, "1 +", "\x00"]
)
def test_npz_with_a_header_that_is_no_python(tmp_path, header):
    with zipfile.ZipFile(tmp_path / "own.npz", "w") as archive:
        archive.writestr("images.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode())
    with pytest.raises(DataError, match=r"own.npz.*'images'"):
        load(tmp_path / "own.npz")

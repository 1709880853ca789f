"""MNIST and CIFAR-10 from files that are intact, damaged, or lie."""

import gzip
import io
import struct
import tarfile
import tracemalloc

import numpy as np
import pytest

from palimpsest import datasets
from palimpsest.datasets import cifar10, files
from palimpsest.errors import DataError

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (200, 5, 4), dtype=np.uint8)
LABELS = np.arange(200, dtype=np.uint8) % 10


def idx(array, *, shape=None):
    shape = array.shape if shape is None else shape
    return bytes((0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape) + array.tobytes()


def write_mnist(folder, *, part="t10k", images=None, labels=None, packed=True):
    folder.mkdir(parents=True, exist_ok=True)
    for kind, content in (("images-idx3", images or idx(IMAGES)), ("labels-idx1", labels or idx(LABELS))):
        path = folder / f"{part}-{kind}-ubyte{'.gz' if packed else ''}"
        path.write_bytes(gzip.compress(content) if packed else content)


def load_mnist(root):
    return datasets.load("mnist", per_class=5, data_root=root)


@pytest.mark.parametrize("layout", [".", "mnist", "MNIST/raw", "raw"])
@pytest.mark.parametrize("packed", [True, False])
def test_mnist_layouts(tmp_path, layout, packed):
    write_mnist(tmp_path / layout, packed=packed)
    data = load_mnist(tmp_path)
    assert data.image_shape == (1, 5, 4)
    originals = {(image / np.float32(255)).tobytes(): int(label) for image, label in zip(IMAGES, LABELS, strict=True)}
    for image, label in zip(data.train.images, data.train.labels, strict=True):
        assert label == (1 if originals[image.numpy().tobytes()] % 2 else -1)


def test_mnist_prefers_the_training_part_and_reads_the_environment(tmp_path, monkeypatch):
    write_mnist(tmp_path, part="train", images=idx(IMAGES[:, :3]))
    write_mnist(tmp_path, part="t10k")
    monkeypatch.setenv("PALIMPSEST_DATA", str(tmp_path))
    assert datasets.load("mnist", per_class=5).image_shape == (1, 3, 4)


BAD_IMAGES = {
    "fewer bytes than announced": idx(IMAGES[:200], shape=(400, 5, 4)),
    "more bytes than announced": idx(IMAGES, shape=(1, 5, 4)),
    "too many bytes announced": idx(IMAGES, shape=(2**32 - 1, 2**32 - 1, 2**32 - 1)),
    "numbers that are not bytes": b"\x00\x00\x0d\x03" + idx(IMAGES)[4:],
    "truncated header": idx(IMAGES)[:9],
    "fewer images than labels": idx(IMAGES[:100]),
}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("lie", BAD_IMAGES)
def test_mnist_files_that_lie(tmp_path, lie, packed):
    write_mnist(tmp_path, images=BAD_IMAGES[lie], packed=packed)
    with pytest.raises(DataError, match="t10k-images"):
        load_mnist(tmp_path)


def test_a_lying_header_allocates_nothing(tmp_path):
    path = tmp_path / "lie"
    path.write_bytes(idx(IMAGES, shape=(60_000, 28, 28)))
    tracemalloc.start()
    with pytest.raises(DataError, match="only"):
        files.read_idx(path, dimensions=3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * files.CHUNK + 100_000


def test_a_gzip_bomb_is_read_no_further_than_announced(tmp_path):
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(idx(IMAGES) + bytes(1 << 27)))
    tracemalloc.start()
    with pytest.raises(DataError, match="more"):
        files.read_idx(path, dimensions=3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 24


@pytest.mark.parametrize(
    "damage", [lambda b: b[: len(b) // 2], lambda b: b"not gzip", lambda b: b[:20] + b"\xff" * 40 + b[60:]]
)
def test_damaged_gzip(tmp_path, damage):
    write_mnist(tmp_path)
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match="t10k-images"):
        load_mnist(tmp_path)


def test_missing_files_say_where_to_put_them(tmp_path):
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz"):
        load_mnist(tmp_path)
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte.gz"):
        load_mnist(tmp_path)
    with pytest.raises(DataError, match=r"data_batch_1.bin|test_batch.bin"):
        datasets.load("cifar10", data_root=tmp_path)


def test_labels_out_of_range(tmp_path):
    write_mnist(tmp_path, labels=idx(LABELS + 3))
    with pytest.raises(DataError, match="t10k-labels"):
        load_mnist(tmp_path)


def batch(n, seed):
    records = np.random.default_rng(seed).integers(0, 256, (n, cifar10.RECORD), dtype=np.uint8)
    records[:, 0] = np.arange(n) % 10
    return records


def write_archive(path, batches):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in batches.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def test_cifar10_batches(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    records = [batch(40, 1), batch(40, 2)]
    for i, content in enumerate(records, 1):
        (folder / f"data_batch_{i}.bin").write_bytes(content.tobytes())
    (folder / "test_batch.bin").write_bytes(batch(40, 3).tobytes())
    data = datasets.load("cifar10", per_class=3, held_out_per_class=3, task="classes", data_root=tmp_path)
    assert data.image_shape == (3, 32, 32)
    stored = {(r[1:] / np.float32(255)).tobytes(): r[0] for r in np.concatenate(records)}
    for image, label in zip(data.train.images, data.train.labels, strict=True):
        assert stored[image.numpy().tobytes()] == label
    binary = datasets.load("cifar10", per_class=6, data_root=tmp_path)
    for image, label in zip(binary.train.images, binary.train.labels, strict=True):
        assert label == (1 if stored[image.numpy().tobytes()] in cifar10.VEHICLES else -1)


def test_cifar10_test_batch_shares_no_image_with_the_training_batches(tmp_path):
    contents = {"data_batch_1.bin": batch(40, 1), "test_batch.bin": batch(40, 2)}
    for name, records in contents.items():
        (tmp_path / name).write_bytes(records.tobytes())
    stored = {(r[1:] / np.float32(255)).tobytes() for r in contents["test_batch.bin"]}
    for name, ours in {"cifar10": False, "cifar10-test": True}.items():
        data = datasets.load(name, per_class=6, data_root=tmp_path)
        assert {image.numpy().tobytes() in stored for image in data.train.images} == {ours}
    archive = tmp_path / "archive"
    archive.mkdir()
    write_archive(archive / "cifar-10-binary.tar.gz", {"test_batch.bin": contents["test_batch.bin"].tobytes()})
    assert len(datasets.load("cifar10-test", per_class=6, data_root=archive).train) == 12


def test_cifar10_archive(tmp_path):
    path = tmp_path / "cifar-10-binary.tar.gz"
    write_archive(path, {name: batch(10, i).tobytes() for i, name in enumerate(cifar10.BATCHES)})
    assert len(datasets.load("cifar10", per_class=10, held_out_per_class=10, data_root=tmp_path).train) == 20
    write_archive(path, {"data_batch_1.bin": batch(10, 0).tobytes()})
    with pytest.raises(DataError, match=r"data_batch_2.bin"):
        datasets.load("cifar10", data_root=tmp_path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataError, match="cifar-10-binary"):
        datasets.load("cifar10", data_root=tmp_path)


def test_cifar10_archive_that_unpacks_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "ARCHIVE_LIMIT", 10_000)
    write_archive(tmp_path / "cifar-10-binary.tar.gz", {"padding": bytes(20_000)})
    with pytest.raises(DataError, match="cifar-10-binary"):
        datasets.load("cifar10", data_root=tmp_path)


@pytest.mark.parametrize(
    "content",
    [batch(3, 0).tobytes()[:-1], b"", np.full(cifar10.RECORD, 77, np.uint8).tobytes()],
    ids=["truncated", "empty", "label 77"],
)
def test_cifar10_batches_that_are_none(tmp_path, content):
    (tmp_path / "data_batch_1.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"data_batch_1.bin"):
        datasets.load("cifar10", data_root=tmp_path)


def test_cifar10_batch_longer_than_the_format_allows(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar10, "LIMIT", 2 * cifar10.RECORD)
    (tmp_path / "data_batch_1.bin").write_bytes(batch(3, 0).tobytes())
    with pytest.raises(DataError, match=r"data_batch_1.bin"):
        datasets.load("cifar10", data_root=tmp_path)

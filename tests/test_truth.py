"""Training images as the network saw them, and how much noise hides them."""

import numpy as np
import pytest
import torch

import palimpsest as pal
from palimpsest import cli
from palimpsest.auditing.truth import load

SHAPE = (3, 4, 5)


@pytest.fixture
def images(tmp_path):
    """A file of four images, and what it holds."""
    values = np.random.default_rng(0).random((4, *SHAPE)).astype(np.float32)
    np.savez(tmp_path / "own.npz", images=values.transpose(0, 2, 3, 1), labels=np.arange(4) % 2)
    return str(tmp_path / "own.npz"), torch.from_numpy(values)


@pytest.mark.parametrize("mean", [0.0, 0.5])
@pytest.mark.parametrize("std", ["0.25", "0.2,0.3,0.4", "image"])
def test_images_are_seen_less_the_mean_over_the_deviation(images, mean, std, tmp_path):
    path, expected = images
    deviation = torch.rand(SHAPE, generator=torch.Generator().manual_seed(1)) + 0.1
    if std == "image":
        np.save(tmp_path / "std.npy", deviation.numpy())
        std = str(tmp_path / "std.npy")
    else:
        deviation = torch.tensor([float(part) for part in std.split(",")]).view(-1, 1, 1)
    truth = load(path, None, mean=str(mean), std=std, image_shape=SHAPE)
    assert torch.allclose(truth.seen, (expected - mean) / deviation, atol=1e-6)


def test_the_command_line_passes_the_deviation_on(images, tmp_path, monkeypatch):
    seen = []

    def audit(*_, truth, **__):
        seen.append(truth)
        raise KeyboardInterrupt  # nothing else of the audit is wanted here

    monkeypatch.setattr(cli.auditing, "audit", audit)
    words = ["--out", str(tmp_path / "audit"), "--network", "a:b", "--weights", "w.pt", "--shape", "3,4,5"]
    assert cli.main(["audit", *words, "--data", images[0], "--mean", "0.5", "--std", "0.2,0.3,0.4"]) == 1
    assert torch.equal(seen[0].std[:, 0, 0], torch.tensor([0.2, 0.3, 0.4]))
    assert cli.main(["audit", *words, "--data", images[0], "--std", "wide"]) == 2
    assert cli.main(["audit", *words, "--std", "0.5"]) == 2  # of which images?
    assert len(seen) == 1


def test_noise_hides_what_was_learnt_and_leaves_the_network_as_it_was():
    data = pal.datasets.load("digits", per_class=2, held_out_per_class=20, seed=0)
    torch.manual_seed(0)
    fit = pal.train(pal.networks.MLP(data.image_shape, hidden=(100,)), data.train.images - 0.5, data.train.labels)
    truth = pal.auditing.Truth(data.train.images, (data.train.labels > 0).long(), data.held_out.images, mean=0.5)
    before = {name: t.clone() for name, t in fit.model.state_dict().items()}
    clear, hidden = pal.auditing.recovery_under_noise(fit.model, fit.initial, truth, levels=(0.0, 10.0), steps=200)
    assert (clear.level, hidden.level) == (0.0, 10.0)
    assert clear.accuracy == 1.0
    assert clear.recovered > hidden.recovered == 0
    assert clear.ssim > hidden.ssim
    assert all(torch.equal(t, before[name]) for name, t in fit.model.state_dict().items())

"""Training images as the network saw them, and how much noise hides them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import palimpsest as pal
from palimpsest import auditing
from palimpsest.auditing.truth import load
from palimpsest.cli.main import main

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

    monkeypatch.setattr(auditing, "audit", audit)
    words = ["--out", str(tmp_path / "audit"), "--network", "a:b", "--weights", "w.pt", "--shape", "3,4,5"]
    assert main(["audit", *words, "--data", images[0], "--mean", "0.5", "--std", "0.2,0.3,0.4"]) == 1
    assert torch.equal(seen[0].std[:, 0, 0], torch.tensor([0.2, 0.3, 0.4]))
    assert main(["audit", *words, "--data", images[0], "--std", "wide"]) == 2
    assert main(["audit", *words, "--std", "0.5"]) == 2  # of which images?
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


def made_up(n, seed, held_out=40, **options):
    generator = torch.Generator().manual_seed(seed)
    texture = pal.scoring.metrics.gaussian_blur(torch.randn(n + held_out, 1, 16, 16, generator=generator), sigma=1.5)
    x, y = pal.scoring.metrics.minmax(texture).split([n, held_out])
    noise = pal.scoring.metrics.gaussian_blur(torch.randn(2 * n, 1, 16, 16, generator=generator), sigma=1.5)
    return pal.auditing.Truth(x, torch.arange(n) % 2, y, mean=x.mean(0), **options), noise


def test_a_deviation_for_each_pixel_turns_no_noise_into_a_claim():
    claims = 0
    for seed in range(20):
        truth, noise = made_up(4, seed)
        truth = replace(truth, std=truth.images.std(0))
        claims += truth.score(noise).verdict.outcome is pal.scoring.Outcome.LEAKAGE
    assert claims == 0


class Fixed(torch.nn.Module):
    """Gives these outputs, whatever it sees."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs = torch.nn.Parameter(torch.tensor(outputs))

    def forward(self, x):
        return self.outputs


@pytest.mark.parametrize(
    ("outputs", "accuracy"),
    [
        ([0.1, 0.9, 0.2, 0.8], 1.0),
        ([-1.0, 1.0, -1.0, 1.0], 1.0),
        ([1.0, -1.0, 1.0, -1.0], 1.0),
        ([0.1, 0.2, 0.3, 0.0], 0.75),
    ],
)
def test_one_output_may_have_any_threshold(outputs, accuracy):
    truth, _ = made_up(4, 0)
    assert truth.accuracy(Fixed(outputs)) == accuracy
    assert truth.majority(1) == 0.5


def test_several_outputs_are_compared_with_the_classes():
    truth, _ = made_up(4, 0)
    assert truth.accuracy(Fixed([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]])) == 0.75

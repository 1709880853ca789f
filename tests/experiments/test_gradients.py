"""Optimiser states and single gradients: every row and attack runs once, and counts what it should."""

import json

import cloudpickle
import gradient_inversion
import optimiser_state
import pytest
import torch
from networks_in_use.rows import Training


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("optimiser-state")


@pytest.mark.parametrize("name", ["mlp-adam-10", "cnn-momentum-50", "resnet-adam-10"])
def test_a_final_checkpoint_is_read_and_scored(name, folder):
    options = ["--small", "--rows", name, "--seeds", "1", "--scratch", str(folder), "--results", str(folder / "parts")]
    assert optimiser_state.main(options) == 0
    part = json.loads((folder / "parts" / f"{name}-seed1.json").read_text())
    assert len(part["ssim"]) == len(part["shares"]) == len(part["recovered"]) == 10
    assert {"command", "commit", "verdict"} <= set(part)


def test_workers_take_the_parts_of_a_script(tmp_path):
    """What a script holds itself goes to a worker by value, with the modules that it seems to use."""
    row = optimiser_state.ROWS["mlp-adam-10"].small()
    part = optimiser_state.Part(row=row, seed=0, small=True, results=tmp_path, scratch=tmp_path)
    cloudpickle.register_pickle_by_value(optimiser_state)
    try:
        assert cloudpickle.dumps(part.run)
    finally:
        cloudpickle.unregister_pickle_by_value(optimiser_state)


def test_shares_add_up_to_the_moment():
    """SGD's momentum of the last bias is Σ_j βʲ Σ_i ∂ℓ_j/∂Φ(x_i), the sum of the signed shares of all images."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 1)).double()
    x, y = torch.randn(6, 4).double(), torch.full((6,), 9.0).double()  # far off, so that all shares have one sign
    left = optimiser_state.trained(model, x, y, Training(optimiser="momentum", rate=1e-4, epochs=3, batch=2), 0)
    torch.testing.assert_close(left.shares.sum(), -left.optimiser["state"][1]["momentum_buffer"].sum())
    assert len(left.batches) == 5
    assert sorted(torch.cat(left.batches[:3]).tolist()) == list(range(6))  # the last epoch


def test_counts_are_those_of_the_last_batches():
    part = {"batches": [[0, 1], [2, 3]], "shares": [1.0, 0.01, 1.0, 1.0], "ssim": [0.7, 0.5, 0.9, 0.1]}
    found = optimiser_state.counts(part | {"recovered": [True, False, True, False], "held-out ssim": [0.5, 0.1]})
    assert (found["1 of"], found["1 held"], found["1 above 0.4"], found["1 above 0.6"]) == (2, 1, 2, 1)
    assert (found["2 of"], found["2 above 0.6"], found["2 recovered"], found["held-out above 0.4"]) == (4, 2, 2, 1)


def test_every_attack_on_a_gradient_runs_and_is_resumed(tmp_path, capsys):
    options = ["--small", "--batches", "2", "--width", "2", "--seeds", "0", "--results", str(tmp_path)]
    for _ in range(2):
        assert gradient_inversion.main(options) == 0
    assert capsys.readouterr().out.count("PSNR") == len(gradient_inversion.ATTACKS) == len(list(tmp_path.iterdir()))


def test_choices_made_at_an_image_give_its_own_gradient(tmp_path):
    options = ["--small", "--landscape", "--width", "2", "--results", str(tmp_path)]
    assert gradient_inversion.main(options) == 0
    found = json.loads((tmp_path / "landscape.json").read_text())
    own, fixed = found["rows"][0], found["rows"][len(gradient_inversion.NOISE)]
    assert own["noise"] == fixed["noise"]
    assert max(fixed["errors"]) < 1e-3 < max(own["errors"])  # a small change of the image, with and without jumps
    torch.manual_seed(0)
    model, x = gradient_inversion.network(2).eval(), torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(gradient_inversion.outputs(model, x)[0], model(x))


def test_the_last_bias_shows_the_labels():
    torch.manual_seed(0)
    model, y = gradient_inversion.network(4).eval(), torch.tensor([3, 3, 7, 1])
    g = gradient_inversion.gradient_of(model, torch.rand(4, 3, 32, 32) - gradient_inversion.MEAN, y)
    found = gradient_inversion.labels_from_bias(list(g.values())[-1], 4)
    assert sorted(found.tolist()) == [1, 3, 3, 7]


def test_psnr_pairs_each_image_with_one_candidate():
    images = torch.rand(3, 3, 32, 32)
    assert gradient_inversion.psnr(images.flip(0), images) == [120.0] * 3
    assert gradient_inversion.psnr((images[:1] + 0.1).clamp(0, 1), images[:1])[0] > 19.9


def test_known_labels_give_the_gradient_itself():
    """With the true images, labels and λ = 1/n nothing of the gradient is left."""
    torch.manual_seed(0)
    model, y = gradient_inversion.network(2).eval().double(), torch.tensor([4, 0])
    x = torch.rand(2, 3, 32, 32).double() - 0.5
    g = gradient_inversion.gradient_of(model, x, y)
    objective = gradient_inversion.LossGradient(model, g)
    objective.label_kind = gradient_inversion.Given(y)
    loss = objective.loss(x, torch.full((2,), 0.5).double(), y)
    assert float(loss / objective.target_norm_squared) < 1e-20


def test_the_published_attack_takes_the_steps_of_plain_torch():
    """The loop that is replayed as a graph comes to the result of torch's own Adam and schedule."""
    torch.manual_seed(0)
    model = gradient_inversion.network(2).eval().double()
    g = gradient_inversion.gradient_of(model, torch.rand(2, 3, 32, 32).double() - 0.5, torch.tensor([4, 0]))
    run = gradient_inversion.Run(batch=2, steps=50, seed=0)
    found = gradient_inversion.as_published(model, g, run, smoothness=1e-2)
    torch.testing.assert_close(found, plain(model, g, run, smoothness=1e-2), rtol=0, atol=1e-6)


def plain(model, g, run, *, smoothness):
    """Inverting Gradients step by step: Adam on signs, a box, and the point after the step with the least loss."""
    mean, std = gradient_inversion.MEAN.double(), gradient_inversion.STD.double()
    y = gradient_inversion.labels_from_bias(list(g.values())[-1], run.batch)
    wanted = torch.cat([t.flatten() for t in g.values()])
    z = torch.randn(run.batch, 3, 32, 32, generator=torch.Generator().manual_seed(run.seed)).double().requires_grad_()
    rule, least, best = torch.optim.Adam([z], lr=0.1), float("inf"), None
    turns = [int(run.steps / share) for share in (2.667, 1.6, 1.142)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(rule, turns, gamma=0.1)
    for _ in range(run.steps):
        loss, z.grad = gradient_inversion.published_loss(model, z, std, y, wanted, smoothness)
        z.grad.sign_()
        rule.step()
        schedule.step()
        with torch.no_grad():
            z.copy_(torch.maximum(torch.minimum(z, (1 - mean) / std), -mean / std))
        if float(loss) < least:
            least, best = float(loss), z.detach().clone()
    return best * std


def test_a_part_does_not_begin_after_the_time_limit(tmp_path, capsys):
    options = ["--small", "--batches", "1", "--width", "2", "--attacks", "labels", "--results", str(tmp_path)]
    assert gradient_inversion.main([*options, "--seconds", "0"]) == 0
    assert "parts left: 3" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_processes_run_parts_of_a_gradient(tmp_path):
    options = ["--small", "--batches", "1", "--width", "2", "--attacks", "tuned", "--results", str(tmp_path)]
    assert gradient_inversion.main([*options, "--seeds", "0", "1", "--workers", "2"]) == 0
    assert len(list(tmp_path.iterdir())) == 2


def test_the_published_attack_takes_the_published_steps():
    assert gradient_inversion.steps_of("tuned") == gradient_inversion.PUBLISHED_STEPS
    assert gradient_inversion.steps_of("labels") == gradient_inversion.SEARCH.steps

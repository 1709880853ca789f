"""The published columns are the published recipes: each is compared with a literal implementation of its own.

The literal versions use nothing of Palimpsest but its initial draw. They differentiate by autograd and step by
torch.optim.
"""

import copy
import json
from dataclasses import replace

import peers
import pytest
import torch
import torch.nn.functional as F
from published import claim, descent, explained, readers, training
from published.command import main, small
from published.raw import Sharpening
from published.recipes import SETTINGS, KKTRun, setting
from scipy.optimize import nnls

import palimpsest as pal
from palimpsest.datasets import DataSet
from palimpsest.datasets.base import Part

SHAPE = (3, 2, 2)
STEPS = 40


class Rectified(torch.autograd.Function):
    """Haim et al.: the value of a ReLU, and the derivative σ(αz)."""

    @staticmethod
    def forward(ctx, z, alpha):
        ctx.z, ctx.alpha = z, alpha
        return torch.relu(z)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.sigmoid(ctx.alpha * ctx.z), None


def outputs(θ, x, σ):
    h = x.flatten(1)
    for number in range(3):
        h = F.linear(σ(h) if number else h, θ[f"layers.{number}.weight"], θ.get(f"layers.{number}.bias"))
    return h


def problem(name):
    """A small network with weights of some size, in float64, and the setting with fewer candidates."""
    known = setting(name)
    torch.manual_seed(0)
    tiny = replace(known, hidden=(9, 8), candidates=20, steps=STEPS, half=False)
    start = training.network(tiny, SHAPE, 0)
    final = training.network(tiny, SHAPE, 1)
    with torch.no_grad():
        for p in final.parameters():
            p.add_(0.3 * torch.randn_like(p))
    images = torch.rand(4, *SHAPE)
    data = DataSet("test", *2 * [Part(images, torch.tensor([1, -1, 1, -1]))], images.double().mean(0), ("a", "b"))
    return tiny, training.Trained(final, start.state_dict(), {}), data


def draws(run, k, kind):
    generator = torch.Generator().manual_seed(3)
    x = run.scale * torch.randn(k, *SHAPE, generator=generator, dtype=torch.float64)
    draw = torch.randn if kind == "normal" else torch.rand
    λ = draw(k, generator=generator, dtype=torch.float64) - (0.5 if kind == "centred" else 0.0)
    return x.requires_grad_(), λ.requires_grad_()


@pytest.mark.parametrize(
    ("name", "number"), [(each.name, n) for each in SETTINGS if each.column != "loo" for n in (0, 1)]
)
def test_reconstruction_by_haim_and_by_buzaglo(name, number):
    tiny, network, data = problem(name)
    run, k = tiny.runs[number], tiny.candidates
    run = replace(run, rate=min(run.rate, 0.1), multiplier_rate=min(run.multiplier_rate, 0.1))  # k is small
    rec = readers.published(tiny, run, network, data, precision="float64", seed=3)
    x, λ = draws(run, k, "uniform" if run.least is not None else "normal")
    by_x = torch.optim.SGD([x], lr=run.rate, momentum=0.9)
    by_λ = torch.optim.SGD([λ], lr=run.multiplier_rate, momentum=0.9)
    θ = {n: p.detach().requires_grad_() for n, p in network.model.named_parameters()}
    for _ in range(STEPS):
        Φ = outputs(θ, x, lambda z: Rectified.apply(z, run.alpha))
        if tiny.task == "classes":
            own = Φ.gather(1, rec.labels[:, None])[:, 0]
            φ = own - Φ.scatter(1, rec.labels[:, None], -torch.inf).max(1)[0]
        else:
            φ = Φ[:, 0] if run.least is None else rec.labels * Φ[:, 0]
        gradients = torch.autograd.grad((λ * φ).sum() / k, list(θ.values()), create_graph=True)
        loss = sum((p.detach() - g).square().sum() for p, g in zip(θ.values(), gradients, strict=True))
        loss = loss + torch.relu(x - 1).square().sum() + torch.relu(-1 - x).square().sum()
        if run.least is not None:
            loss = loss + 5 * torch.relu(run.least - λ).square().sum()
        by_x.zero_grad()
        by_λ.zero_grad()
        loss.backward()
        by_x.step()
        by_λ.step()
    start = draws(run, k, "uniform" if run.least is not None else "normal")
    assert (x - start[0]).abs().max() > 1e-3
    assert (λ - start[1]).abs().max() > 1e-4
    assert torch.allclose(rec.images, x, rtol=1e-6, atol=1e-9)
    assert torch.allclose(k * rec.multipliers, λ, rtol=1e-6, atol=1e-9)
    assert rec.labels is None or rec.labels.unique(return_counts=True)[1].unique().numel() == 1


def test_reconstruction_by_loo():
    tiny, network, data = problem("loo-cifar10-200")
    run, k = tiny.runs[0], tiny.candidates
    tiny = replace(tiny, steps=STEPS)
    rec = readers.published(tiny, run, network, data, precision="float64", seed=3)
    x, λ = draws(run, k, "centred")
    initial = x.detach().clone()
    θ = {n: p.detach().requires_grad_() for n, p in network.model.named_parameters()}
    low, high = -data.mean, 1 - data.mean
    memory = {id(p): [torch.zeros_like(p) for _ in range(3)] for p in (x, λ)}
    for i in range(STEPS):
        β = min(10 + 10 ** (i / 20000), 200)
        Φ = outputs(θ, x, lambda z, β=β: F.softplus(β * z) / β)
        gradients = torch.autograd.grad((λ * Φ[:, 0]).mean(), list(θ.values()), create_graph=True)
        change = [p.detach() - network.initial[n] for n, p in θ.items()]
        loss = sum((Δ - g).square().sum() for Δ, g in zip(change, gradients, strict=True))
        outside = torch.relu(x - high) ** 2 + torch.relu(low - x) ** 2
        loss = loss + 0.1 * k * outside.mean()
        steps = torch.autograd.grad(loss, (x, λ))
        with torch.no_grad():
            for p, g in zip((x, λ), steps, strict=True):
                mean, square, count = memory[id(p)]
                moves = g != 0
                mean[moves] = 0.9 * mean[moves] + 0.1 * g[moves]
                square[moves] = 0.999 * square[moves] + 0.001 * g[moves] ** 2
                count[moves] += 1
                m, v = mean[moves] / (1 - 0.9 ** count[moves]), square[moves] / (1 - 0.999 ** count[moves])
                p[moves] -= 0.02 * m / (v.sqrt() + 1e-8)
    assert (x - initial).abs().max() > 0.1
    assert torch.allclose(rec.images, x, rtol=1e-6, atol=1e-8)
    assert torch.allclose(k * rec.multipliers, λ, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", [each.name for each in SETTINGS])
def test_training(name, tmp_path):
    known = setting(name)
    faster = known.learning_rate * (1 if known.loss == "cross_entropy" else 10)
    tiny = replace(small(known), learning_rate=faster)
    network = training.trained(tiny, 1, "float64", tmp_path, tmp_path)
    data = training.load(tiny, 1)
    images = data.train.images.double()
    mean = images.mean(0) if tiny.mean == "image" else images.mean((0, 2, 3))[:, None, None]
    assert torch.allclose(data.mean, mean.expand_as(data.mean))
    model = training.network(tiny, data.image_shape, 1)
    published = {"squared": 1.0 if tiny.column == "buzaglo" else 0.5}.get(tiny.loss, 1.0)
    optimiser = torch.optim.SGD(
        model.parameters(), tiny.learning_rate / published, tiny.momentum, weight_decay=tiny.weight_decay
    )
    for _ in range(tiny.training_steps):
        Φ, y = model(images - mean), data.train.labels
        if tiny.loss == "cross_entropy":
            loss = F.cross_entropy(Φ, y)
        elif tiny.loss == "logistic":
            loss = F.binary_cross_entropy_with_logits(Φ[:, 0], (y + 1) / 2)
        else:
            loss = published * (Φ[:, 0] - y).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert network.facts["steps"] == tiny.training_steps
    for (name, after), before in zip(model.named_parameters(), network.initial.values(), strict=True):
        change = network.model.get_parameter(name) - before
        assert change.abs().max() > 0
        assert torch.allclose(change, after - before, rtol=1e-6, atol=1e-6 * change.abs().max().item())


@pytest.mark.parametrize("name", ["haim-cifar10", "buzaglo-cifar10"])
def test_initial_weights_are_those_of_the_authors(name):
    model = training.network(setting(name), (3, 32, 32), 1)
    first, *others = model.layers
    assert first.weight.std().item() == pytest.approx(1e-4, rel=0.01)
    assert first.bias.std().item() == pytest.approx(1e-4, rel=0.1)
    for layer in others:
        assert layer.bias is None
        assert layer.weight.abs().max() <= 1000**-0.5
        assert layer.weight.std().item() == pytest.approx(3000**-0.5, rel=0.05)


def test_initial_weights_of_loo():
    model = training.network(setting("loo-cifar10-100"), (3, 32, 32), 1)
    for layer in model.layers:
        assert not layer.bias.any()
        assert layer.weight.std().item() == pytest.approx(layer.in_features**-0.5, rel=0.05)


def test_exact_forward_is_the_same_in_both_engines():
    tiny, network, _ = problem("haim-cifar10")
    objective = readers.kkt_objective(tiny, network)
    x, λ = torch.randn(5, *SHAPE, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    y = torch.tensor([1, -1, 1, -1, 1])
    exact = objective.with_exact_forward()
    exact.sharpness = 20.0
    by_hand, by_autograd = (each.loss_and_gradients(x, λ, y) for each in (exact, exact.by_autograd()))
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(by_hand, by_autograd, strict=True))
    objective.sharpness = None
    assert torch.equal(exact.outputs(x), objective.outputs(x))
    assert not objective.exact_forward


@pytest.mark.parametrize("name", ["haim-cifar10", "haim-mnist", "buzaglo-cifar10", "loo-cifar10-100"])
def test_no_image_serves_twice(name):
    tiny = small(setting(name))
    sets = [training.load(tiny, seed) for seed in (1, 2, training.TUNING)]
    rows = [image.numpy().tobytes() for data in sets for part in (data.train, data.held_out) for image in part.images]
    assert len(set(rows)) == len(rows) == 6 * tiny.images


def test_a_small_run_writes_every_part_and_makes_none_twice(tmp_path, monkeypatch):
    command = ["--small", "--setting", "haim-cifar10", "--results", str(tmp_path), "--scratch", str(tmp_path / "s")]
    assert main([*command, "--precision", "tf32", "--column", "training"]) == 0
    assert main(command) == 0
    folder = tmp_path / "published-haim-cifar10"
    names = {"haim-b9dfyspx", "haim-k60fvjdy", "haim-none", "ours-none", "with-initial-none"}
    files = {f"{name}-k16-seed1.json" for name in names} | {f"training-seed1-{p}.json" for p in ("float64", "tf32")}
    assert {file.name for file in folder.iterdir()} == files
    pooled = json.loads((folder / "haim-none-k16-seed1.json").read_text())
    assert pooled["final candidates"] == 32
    assert len(pooled["peer"]["ssim"]) == len(pooled["ssim"]) == len(pooled["held-out ssim"]) == 8
    assert {"command", "commit", "training", "differs"} <= pooled.keys()
    weights = {json.loads((folder / f"{name}-k16-seed1.json").read_text())["training"]["weights"] for name in names}
    assert len(weights) == 1
    monkeypatch.setattr(pal, "reconstruct", lambda *_, **__: pytest.fail("there was nothing left to do"))
    assert main(command) == 0
    assert main(["--agreement", "--results", str(tmp_path)]) == 0
    assert json.loads((folder / "agreement.json").read_text())["rows"][0]["against"] == "tf32"


def test_columns_with_checkpoints_name_the_steps_that_they_know(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "CHECKPOINTS", (3, 10, 25))
    late, early = (readers.WITH_CHECKPOINTS[f"with-{name}"] for name in ("checkpoints", "early-checkpoints"))
    columns = {
        "with-checkpoints": ((10, 25), *late[1:]),
        "with-early-checkpoints": ((3, 10), *early[1:]),
        "with-other-checkpoints": ((3, 11), *late[1:]),  # no file
    }
    monkeypatch.setattr(readers, "WITH_CHECKPOINTS", columns)
    assert late[1].to_end
    assert not early[1].to_end
    known = {}
    of_path = pal.Path
    monkeypatch.setattr(pal, "Path", lambda model, states, **options: known.update({len(known): states})
                        or of_path(model, states, **options))  # fmt: skip
    command = ["--small", "--setting", "haim-cifar10", "--results", str(tmp_path), "--scratch", str(tmp_path / "s")]
    assert main([*command, "--precision", "tf32", "--column", *columns]) == 0
    parts = {json.loads(f.read_text())["column"] for f in (tmp_path / "published-haim-cifar10").glob("with-*.json")}
    assert parts == {"with-checkpoints", "with-early-checkpoints"}
    tiny = small(setting("haim-cifar10"))
    network = training.trained(tiny, 1, "tf32", tmp_path / "s" / "small", tmp_path)
    assert list(network.checkpoints) == [3, 10, 25]
    assert [len(states) for states in known.values()] == [4, 3]
    for states, (steps, *_) in zip(known.values(), columns.values(), strict=False):
        for state, step in zip(states[1:], steps, strict=False):  # the last is the end, or the last checkpoint
            for name, t in network.checkpoints[step].items():
                torch.testing.assert_close(state[name], t.float())
    twin = replace(tiny, training_steps=10)
    end = training.trained(twin, 1, "tf32", tmp_path / "twin", tmp_path / "twin").model
    for name, t in end.state_dict().items():
        torch.testing.assert_close(network.checkpoints[10][name].float(), t)


@pytest.mark.parametrize("name", ["haim-cifar10", "paper-ntk-mnist"])
def test_the_claim_is_summed_up_from_its_parts(tmp_path, name):
    command = ["--small", "--setting", name, "--results", str(tmp_path), "--scratch", str(tmp_path / "s")]
    assert main([*command, "--column", "claim"]) == 0
    assert main(["--claims", "--results", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / f"published-{name}" / "claim.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == list(claim.VARIANTS[1:])
    assert all(0 <= row["ours ssim"] <= 8 for row in rows)
    table = claim.table(tmp_path).splitlines()
    assert len(table) == 2 + len(rows)
    assert str(rows[1]["peer l2"]) in table[3]


def test_splits_do_not_restart_the_schedule_of_loos_sharpness(tmp_path):
    tiny = small(setting("paper-ntk-mnist"))
    network = training.trained(tiny, 1, "float32", tmp_path, tmp_path)
    rec = readers.published(
        tiny, claim.better_run(tiny), network, training.load(tiny, 1), precision="float32", seed=1, record_every=1,
        splitting=pal.Splitting(rounds=2, direction="duplicate"),
    )  # fmt: skip
    βs = [entry["sharpness"] for entry in rec.history if "sharpness" in entry]
    assert len(rec.images) > tiny.candidates
    assert βs == sorted(βs)
    assert βs[-1] == Sharpening(steps=tiny.steps)((tiny.steps - 1) / tiny.steps)


def test_the_peers_ssim():
    a, b = torch.rand(2, 3, 6, 6).double(), torch.rand(2, 3, 6, 6).double()
    assert torch.allclose(peers.ssim(a, a), torch.ones(2).double())
    tap = torch.exp(-torch.tensor([1.0, 0.0, 1.0]).double() / 4.5)
    w = torch.outer(tap, tap) / tap.sum() ** 2
    p, q = a[0, 0, 1:4, 2:5], b[0, 0, 1:4, 2:5]
    μp, μq = (w * p).sum(), (w * q).sum()
    cov = (w * p * q).sum() - μp * μq
    value = (2 * μp * μq + 1e-4) * (2 * cov + 9e-4)
    value /= (μp**2 + μq**2 + 1e-4) * ((w * p * p).sum() - μp**2 + (w * q * q).sum() - μq**2 + 9e-4)
    assert float(peers.ssim_map(a, b)[0, 0, 2, 3]) == pytest.approx(float(value))


def test_haims_measure_finds_the_images_in_any_contrast():
    torch.manual_seed(0)
    images = torch.rand(5, 3, 8, 8)
    mean = images.mean(0)
    candidates = torch.cat([torch.randn(7, 3, 8, 8), images - mean])
    found = peers.haim(candidates, images, mean, half=True)
    assert (found["ssim"] > 0.98).all()
    found = peers.loo(candidates, images, mean)
    assert (found["l2"] < 1e-5).all()
    assert isinstance(setting("haim-mnist").runs[0], KKTRun)


@pytest.mark.parametrize(
    ("loss", "momentum", "decay"), [("squared", 0.9, 0.0), ("squared", 0.0, 0.01), ("logistic", 0.0, 0.0)]
)
def test_networks_trained_at_once_are_those_trained_one_by_one(loss, momentum, decay, tmp_path, monkeypatch):
    monkeypatch.setattr(descent, "SAVE_EVERY", 0.0)
    torch.manual_seed(0)
    starts = [pal.networks.MLP(SHAPE, (7, 6), 1, bias="all").double() for _ in range(2)]
    images = [x - x.mean(0) for x in torch.rand(2, 5, *SHAPE).double()]
    labels = torch.randint(0, 2, (2, 5)) * 2 - 1
    file = tmp_path / "training.checkpoint"

    def at_once(steps):
        all_ = descent.Descent(starts, images, labels, loss, 0.05, momentum=momentum, decay=decay)
        all_.train(steps, record_every=10, tell=lambda step, losses: None, checkpoint=file)
        return all_

    at_once(20)  # is interrupted after 20 of 40 steps
    for number, (start, x, y) in enumerate(zip(starts, images, labels, strict=True)):
        ours, literal = copy.deepcopy(start), copy.deepcopy(start)
        descent.put_into(ours, x, at_once(40).changes(number), shrinkage=(1 - 0.05 * decay) ** 40)
        optimiser = torch.optim.SGD(literal.parameters(), lr=0.05, momentum=momentum, weight_decay=decay)
        for _ in range(40):
            optimiser.zero_grad()
            z = literal(x).flatten()
            (F.softplus(-y * z) if loss == "logistic" else (z - y).square()).mean().backward()
            optimiser.step()
        for p, q in zip(ours.parameters(), literal.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def test_a_network_that_reached_its_loss_stays_as_it_is():
    torch.manual_seed(0)
    starts = [pal.networks.MLP(SHAPE, (7, 6), 1).double() for _ in range(2)]
    seen = []
    both = descent.Descent(
        starts, 2 * [torch.rand(5, *SHAPE)], 2 * [torch.tensor([1, -1, 1, -1, 1])], "squared", 0.005, stop=0.5
    )
    both.train(1000, record_every=1, tell=lambda step, losses: seen.append(losses))
    assert len(seen) < 1000
    assert all(0.3 < loss <= 0.5 for loss in seen[-1])


def test_what_the_training_images_leave_unexplained():
    """The shares equal those of the full gradients."""
    torch.manual_seed(0)
    start, model = (pal.networks.MLP(SHAPE, (7, 6), 1).double() for _ in range(2))
    images, labels = torch.rand(5, *SHAPE).double(), torch.tensor([1, -1, 1, -1, 1])
    with torch.no_grad():
        shares = explained.unexplained(model, start, images, labels)
    margins = model(images).flatten() * labels
    for number, layer in enumerate(model.layers):
        parameters = list(layer.parameters())
        rows = [torch.autograd.grad(m, parameters, retain_graph=True) for m in margins]
        f = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows], 1)
        for name, T in (
            ("weights", parameters),
            ("change", [a - b for a, b in zip(parameters, start.layers[number].parameters(), strict=True)]),
        ):
            T = torch.cat([t.detach().flatten() for t in T])
            assert shares[name][number] == pytest.approx(float(nnls(f.numpy(), T.numpy())[1] / T.norm()), abs=2e-4)

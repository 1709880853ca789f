"""Checkpoints of one training run as segments that share the images."""

import copy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import brute_force
import palimpsest as pal
from cases import NETWORKS
from palimpsest.errors import InvalidInputError
from palimpsest.objectives.spaces import Everywhere, Subspace
from palimpsest.solver.loop import Solver
from palimpsest.solver.settings import Settings


def close(a, b, relative=1e-12) -> bool:
    return bool((a - b).norm() <= relative * b.norm())


class Residual(nn.Module):
    """A residual block with batch normalisation, and a head."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.second, self.head = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(3, outputs)
        nn.init.uniform_(self.norm.running_mean, -0.3, 0.3)
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)

    def forward(self, x):
        h = F.relu(self.norm(self.first(x)))
        return self.head(F.relu(h + self.second(h)).mean((2, 3)))


class Copies(nn.Module):
    """Disjoint copies of a network, with one output each."""

    def __init__(self, *members: nn.Module) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x):
        return torch.cat([member(x) for member in self.members], 1)


def mlp(outputs: int = 1) -> nn.Module:
    return pal.networks.MLP((1, 4, 4), (6, 5), outputs)


def models(make=mlp, count=4, **options) -> list[nn.Module]:
    torch.manual_seed(0)
    return [make(**options).double() for _ in range(count)]


def states(networks) -> list[dict]:
    return [network.state_dict() for network in networks]


def trained(checkpoints=(0, 40, 120), decay=0.0, n=6, steps=300):
    """A perceptron with checkpoints on the way, and its images."""
    torch.manual_seed(0)
    model, kept = pal.networks.MLP(30, (60, 60)).double(), []
    x, y = torch.randn(n, 30).double(), torch.randn(n).double().sign()
    rule = torch.optim.SGD(model.parameters(), lr=5e-3, weight_decay=decay)
    for step in range(steps):
        if step in checkpoints:
            kept.append(copy.deepcopy(model.state_dict()))
        rule.zero_grad()
        (model(x)[:, 0] - y).square().mean().backward()
        rule.step()
    return model, [*kept, model.state_dict()], x


# --- the objective ----------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0.3, (0.2, 0.7)], ids=["one node", "two nodes"])
@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_one_segment_is_the_ntk_method_relative_to_the_target(network, at):
    torch.manual_seed(0)
    initial, final = (network.make(network.most_outputs).double() for _ in range(2))
    options = {"at": at, "sharpness": 4.0, "weights": "auto"}
    ntk = pal.NTK(final, initial.state_dict(), **options)
    path = pal.Path(final, states([initial, final]), **options)
    x = torch.randn(3, *network.image_shape).double()
    λ = torch.randn(3, *ntk.multiplier_shape(x)).double()
    assert path.multiplier_shape(x) == (1, *ntk.multiplier_shape(x))
    T2, P2 = ntk.target_norm_squared, path.target_norm_squared
    expected = [v / T2 for v in ntk.loss_and_gradients(x, λ)]
    found = [v / P2 for v in path.loss_and_gradients(x, λ[:, None])]
    assert all(close(a.view_as(b), b) for a, b in zip(found, expected, strict=True))
    S = pal.splitting.matrix(path, x, λ[:, None]) / P2
    assert close(S, pal.splitting.matrix(ntk, x, λ) / T2)


@pytest.mark.parametrize("make", [mlp, Residual])
def test_it_equals_the_ntk_method_on_disjoint_copies_of_the_network(make):
    """Each copy has the buffers at the end of its segment, and the weight 1 / (m ‖T_j‖²)."""
    networks = models(make)
    path = pal.Path(networks[-1], states(networks), at=0.5, sharpness=4.0)
    starts, ends = Copies(*copy.deepcopy(networks[:-1])), Copies(*copy.deepcopy(networks[1:]))
    moved = [(a.parameters(), b.parameters()) for a, b in pairwise(networks)]
    squares = [sum(float((q - p).detach().square().sum()) for p, q in zip(*pair, strict=True)) for pair in moved]
    w = {name: 1 / (3 * squares[int(name.split(".")[1])]) for name, _ in ends.named_parameters()}
    ntk = pal.NTK(ends, starts.state_dict(), at=0.5, weights=w, sharpness=4.0).by_autograd()
    x, λ = torch.randn(5, 1, 4, 4).double(), torch.randn(5, 3).double()
    for objective in (path, path.by_autograd()):
        found, expected = objective.loss_and_gradients(x, λ), ntk.loss_and_gradients(x, λ)
        assert all(close(a, b) for a, b in zip(found, expected, strict=True))
    assert close(pal.splitting.matrix(path, x, λ), pal.splitting.matrix(ntk, x, λ))
    v = torch.randn_like(x)
    assert close(path.hessian(x, λ)(v), ntk.hessian(x, λ)(v))


@pytest.mark.parametrize("make", [mlp, Residual])
def test_the_loss_is_the_formula(make):
    networks = models(make, 3, outputs=2)
    weights = {name: 2.0 for name, _ in list(networks[0].named_parameters())[:2]}
    path = pal.Path(
        networks[-1], states(networks), at=(0.25, 0.75), shrinkage=(0.9, 0.8), weights=weights, sharpness=4.0
    )
    x, λ = torch.randn(4, 1, 4, 4).double(), torch.randn(4, 2, 2, 2).double()
    for j, c in enumerate((0.9, 0.8)):
        for name, θ in networks[j + 1].named_parameters():
            before = dict(networks[j].named_parameters())[name]
            assert close(path.target[name][j], θ - c * before)
            assert close(path.tangents[2 * j + 1][name], c * before + 0.75 * (θ - c * before))
    r = path.residual(x, λ)
    assert {name: t.shape for name, t in r.items()} == {n: (2, *θ.shape) for n, θ in networks[0].named_parameters()}
    T2 = [sum(t[j].square().sum() for t in path.target.values()) for j in range(2)]
    L = sum(weights.get(n, 1.0) * t[j].square().sum() / (2 * T2[j]) for n, t in r.items() for j in range(2))
    assert close(path.loss(x, λ), L)
    assert close(L, brute_force.loss(path, x, λ, None))
    for found, expected in zip(path.gradients(x, λ), brute_force.gradients(path, x, λ, None), strict=True):
        assert close(found, expected, 1e-10)


def test_whitening_is_one_metric_for_all_segments():
    networks = models()
    path = pal.Path(networks[-1], states(networks), sharpness=4.0, whitening=1.0)
    Q = torch.linalg.qr(torch.randn(16, 5).double())[0]
    space = Subspace(torch.zeros(1, 4, 4).double(), Q.T.reshape(5, 1, 4, 4))
    c, λ = torch.randn(4, 5).double(), torch.randn(4, 3).double()
    T, r = path.target["layers.0.weight"], path.residual(space.images(c), λ)
    lengths = sum(t.flatten(1).square().sum(1) for t in path.target.values()).sqrt()
    σ, V = torch.linalg.svd((T / lengths[:, None, None]).flatten(0, 1) @ Q, full_matrices=False)[1:]
    s = σ**-1 * (σ.norm() / len(σ) ** 0.5)
    inside, outside = r.pop("layers.0.weight") @ Q @ V.T * s, T - T @ Q @ Q.T
    parts = [*r.values(), inside, outside]
    expected = sum((t.flatten(1).square().sum(1) / lengths**2).sum() / 3 for t in parts)
    assert close(path.within(space).loss(c, λ), expected)


def test_checkpoints_are_converted_to_the_precision_of_the_model():
    networks = models()
    halves = [{name: t.half() for name, t in state.items()} for state in states(networks)[:-1]]
    path = pal.Path(networks[-1], [*halves, networks[-1].state_dict()])
    assert path.dtype == torch.float64
    x, λ = torch.randn(2, 1, 4, 4), torch.randn(2, 3)
    single, double = path.to(dtype=torch.float32).loss(x, λ), path.loss(x.double(), λ.double())
    assert single == pytest.approx(float(double), rel=1e-5)


# --- runs -------------------------------------------------------------------------------------------


def test_multipliers_move_in_units_of_their_segment():
    networks = models()
    short = {name: t + 1e-3 * torch.randn_like(t) for name, t in networks[0].state_dict().items()}
    path = pal.Path(networks[-1], [networks[0].state_dict(), short, networks[-1].state_dict()], at=(0.3, 0.6))
    solver = Solver(path, Everywhere((1, 4, 4)), Settings(candidates=6, steps=4))
    state = solver.init()
    unit = solver.unit(state)
    assert unit.shape == (2, 1)
    lengths = [sum(t[j].square().sum() for t in path.target.values()).sqrt() for j in range(2)]
    assert close(unit[1] / unit[0], lengths[1] / lengths[0])
    assert ((state.multipliers.abs() / unit) <= 0.05 + 1e-12).all()


def test_a_run_reads_the_images_and_splits_merges_and_is_certified():
    model, checkpoints, x = trained()
    found = pal.span(model, checkpoints)
    objective = pal.Path(model, checkpoints, weights="auto", whitening=0.5)
    rec = pal.reconstruct(
        objective, image_shape=30, within=found.subspace, candidates=10, steps=300, splitting=pal.Splitting(rounds=1),
        merging=pal.Merging(), priors=(), progress=False,
    )  # fmt: skip
    assert rec.loss < 0.05
    assert rec.multipliers.shape[1:] == (3,)
    cosine = F.normalize(rec.images, dim=1) @ F.normalize(x, dim=1).T
    assert cosine.amax(0).min() > 0.9
    assert rec.certify(iterations=4).gradient < 1


# --- the span ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_the_span_is_that_of_all_segments(decay):
    model, checkpoints, x = trained(decay=decay)
    found = pal.span(model, checkpoints)
    assert found.samples == 6
    assert len(found.shrinkages) == 3
    assert close(found.subspace.images(found.subspace.coordinates(x)), x, 1e-7)
    expected = [(1 - 5e-3 * decay) ** steps for steps in (40, 80, 180)]
    assert torch.allclose(torch.tensor(found.shrinkages), torch.tensor(expected), rtol=1e-6)
    assert found.shrinkage == pytest.approx(pal.span(model, checkpoints[0]).shrinkage, rel=1e-6)


def test_images_that_only_one_segment_saw_are_counted():
    """The last steps undo the first ones: the whole change does not know two of the images."""
    model, (start, end), _ = trained(checkpoints=(0,), n=4)
    other = {name: t.clone() for name, t in end.items()}
    u, v = torch.randn(60, 2).double(), torch.randn(2, 30).double()
    other["layers.0.weight"] += 1e-3 * u @ v
    other["layers.0.bias"] += 1e-3 * u @ torch.ones(2).double()
    assert pal.span(model, [start, other, end]).samples == 6
    assert pal.span(model, start).samples == 4


# --- refusals ---------------------------------------------------------------------------------------


def test_pairs_of_weights_state_the_segments_themselves():
    networks = models()
    chain = states(networks)
    pairs = list(pairwise(chain))
    by_chain, by_pairs = (pal.Path(networks[-1], given, weights="auto") for given in (chain, pairs))
    assert all(torch.equal(T, by_pairs.target[name]) for name, T in by_chain.target.items())
    assert by_chain.weights == by_pairs.weights
    apart = pal.Path(networks[-1], pairs[:1] + pairs[2:])  # rounds need not follow each other
    assert all(torch.equal(T, by_chain.target[name][[0, 2]]) for name, T in apart.target.items())
    model, checkpoints, _ = trained()
    one, other = pal.span(model, checkpoints), pal.span(model, list(pairwise(checkpoints)))
    assert one.samples == other.samples
    assert torch.equal(one.subspace.basis, other.subspace.basis)


def test_checkpoints_that_cannot_be_used_are_refused():
    networks = models()
    first, second, third, last = states(networks)
    model, other = networks[-1], pal.networks.MLP((1, 4, 4), (6, 7)).double().state_dict()
    for wrong in ([first, second], [last, second, first], [first, other, last], [first, first, last], [last], [],
                  None, first, [first, {}, last], [first, None, last]):  # fmt: skip
        with pytest.raises(InvalidInputError):
            pal.Path(model, wrong)
    with pytest.raises(InvalidInputError, match="segment 2"):
        pal.Path(model, [first, second, second, last])
    with pytest.raises(InvalidInputError, match="segment 1"):
        pal.Path(model, [first, other, last])
    for options in ({"at": ()}, {"shrinkage": (1.0, 1.0)}, {"whitening": 2}, {"weights": {"no": 1.0}}):
        with pytest.raises(InvalidInputError):
            pal.Path(model, [first, third, second, last], **options)
    with pytest.raises(InvalidInputError):
        pal.span(model, [last])
    with pytest.raises(InvalidInputError):
        pal.span(model, [first, {"layers.0.weight": torch.zeros(2, 2), "layers.0.bias": torch.zeros(2)}])


def test_statistics_that_a_checkpoint_does_not_hold_are_those_of_the_model():
    networks = models(Residual, 3)
    some = [{name: t for name, t in state.items() if "running" not in name} for state in states(networks)]
    path, whole = pal.Path(networks[-1], some), pal.Path(networks[-1], states(networks))
    x, λ = torch.randn(2, 1, 4, 4).double(), torch.randn(2, 2).double()
    mine, theirs = path.residual(x, λ), whole.residual(x, λ)
    assert torch.equal(mine["first.weight"][1], theirs["first.weight"][1])
    assert not torch.equal(mine["first.weight"][0], theirs["first.weight"][0])

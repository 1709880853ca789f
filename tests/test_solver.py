"""The two phases: what they reach, what they record, and how they fail."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import palimpsest as pal
from palimpsest.errors import DivergenceError, InvalidInputError
from palimpsest.objectives.spaces import Everywhere
from palimpsest.solver.lanczos import BASIS
from palimpsest.solver.loop import Solver
from palimpsest.solver.optimisers import SGD, Adam
from palimpsest.solver.priors import TotalVariation
from palimpsest.solver.settings import Settings
from palimpsest.solver.state import Ending
from palimpsest.solver.stationarity import Stationarity
from synthetic import descend, exact_problem, stalled_problem


def small(**options):
    """A quick reconstruction of a random network's change, with two rounds of splitting unless told otherwise."""
    torch.manual_seed(0)
    initial, final = (pal.networks.MLP((1, 3, 3), (6,)).double() for _ in range(2))
    objective = options.pop("objective", None) or pal.NTK(final, initial.state_dict(), at=options.pop("at", 0.5))
    options = {
        "candidates": 4,
        "steps": 30,
        "splitting": pal.Splitting(share=0.5),
        "progress": False,
    } | options
    return pal.reconstruct(objective, image_shape=(1, 3, 3), **options)


# --- what a run reaches -------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_true_candidates_have_no_loss_and_a_run_from_nearby_returns_to_them(seed):
    objective, x, λ = exact_problem(seed)
    assert objective.loss(x, λ) <= 1e-24 * objective.target_norm_squared
    near = x + 0.02 * torch.randn_like(x)
    found, _ = descend(objective, near, λ * 1.02, steps=2500, learning_rate=0.02)
    assert (found - x).norm() <= 1e-5 * x.norm()
    assert (near - x).norm() > 1e-2 * x.norm()


def test_a_run_in_the_span_returns_images_of_the_span():
    torch.manual_seed(0)
    model = pal.networks.MLP((1, 5, 5), (20,)).double()
    initial = {name: t.clone() for name, t in model.state_dict().items()}
    x, y = torch.randn(4, 1, 5, 5).double(), torch.tensor([1.0, -1.0, 1.0, -1.0]).double()
    rule = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(100):
        rule.zero_grad()
        (model(x)[:, 0] - y).square().mean().backward()
        rule.step()
    found = pal.span(model, initial)
    rec = pal.reconstruct(
        pal.NTK(model, initial),
        image_shape=(1, 5, 5),
        within=found.subspace,
        candidates=6,
        steps=50,
        progress=False,
    )
    space = found.subspace.shaped((1, 5, 5))
    assert rec.images.shape == (6, 1, 5, 5)
    assert torch.allclose(space.images(space.coordinates(rec.images)), rec.images, atol=1e-8)


def test_the_loss_falls_and_the_multipliers_of_a_margin_method_stay_positive():
    torch.manual_seed(0)
    objective = pal.KKT(pal.networks.MLP((1, 3, 3), (6,)).double())
    rec = small(objective=objective, steps=120, splitting=None)
    assert rec.loss < 0.7
    assert (rec.multipliers >= 0).all()
    assert rec.labels.tolist() == [1, -1, 1, -1]


@pytest.mark.parametrize("optimiser", [Adam(), SGD(learning_rate=0.01)], ids=["adam", "sgd"])
def test_a_run_does_not_see_the_scale_of_the_network(optimiser):
    """Multiplying the target by a constant multiplies the multipliers and changes no image."""
    images, multipliers = [], []
    for scale in (1e-6, 1e6):
        torch.manual_seed(0)
        initial, final = (pal.networks.MLP((1, 3, 3), (6,)).double() for _ in range(2))
        objective = pal.NTK(final, initial.state_dict())
        objective.target = {name: scale * t for name, t in objective.target.items()}
        rec = small(objective=objective, optimiser=optimiser, splitting=None)
        images.append(rec.images)
        multipliers.append(rec.multipliers)
    assert torch.allclose(images[0], images[1], atol=1e-8)
    assert torch.allclose(1e12 * multipliers[0], multipliers[1], rtol=1e-6)


# --- phases, history, lineage -------------------------------------------------------------------


def test_two_rounds_of_splitting_leave_a_full_account():
    rec = small(at=(0.2, 0.8))
    splits = [entry for entry in rec.history if "split" in entry]
    records = [entry for entry in rec.history if "loss" in entry]
    assert [entry["step"] for entry in splits] == [10, 20]
    assert len(rec.images) == 4 + sum(entry["split"] for entry in splits)
    assert len(splits[0]["eigenvalues"]) == 4
    assert all(entry["after"] <= entry["before"] for entry in splits)
    assert rec.multipliers.shape == (len(rec.images), 2)
    assert [entry["step"] for entry in records] == list(range(30))
    assert records[9]["rate"] < 0.1 * records[0]["rate"]
    assert records[10]["rate"] == records[0]["rate"]
    assert records[9]["sharpness"] > 100 > records[10]["sharpness"]
    assert rec.outcome is Ending.FINISHED


def test_lineage_leads_back_to_the_first_candidates():
    rec = small()
    assert len(set(rec.ids.tolist())) == len(rec.ids)
    for i in range(len(rec.images)):
        line = rec.ancestors(i)
        assert line[0] == rec.ids[i]
        assert line[-1] < 4
        assert rec.parents[i] == (line[1] if len(line) > 1 else -1)
    assert (rec.parents >= 0).any()


def test_offspring_inherit_half_of_the_memory_of_their_gradients():
    torch.manual_seed(0)
    initial, final = (pal.networks.MLP((1, 3, 3), (6,)).double() for _ in range(2))
    settings = Settings(candidates=4, steps=30, splitting=pal.Splitting(share=0.25))
    solver = Solver(pal.NTK(final, initial.state_dict()), Everywhere((1, 3, 3)), settings)
    state = solver.init()
    while state.round == 0:
        before, state = state, solver.step(state)
    parent = int((state.ids[:4] >= 4).nonzero()[0])
    for child in (parent, 4):
        assert torch.allclose(state.moments["x"]["mean"][child], before.moments["x"]["mean"][parent] / 2)
        assert torch.allclose(state.moments["x"]["square"][child], before.moments["x"]["square"][parent] / 4)
        assert torch.equal(state.moments["multipliers"]["mean"][child], before.moments["multipliers"]["mean"][parent])
        assert torch.allclose(state.multipliers[child], before.multipliers[parent] / 2)


@pytest.mark.parametrize("direction", ["random", "duplicate", "none"])
def test_the_controls_are_policies_too(direction):
    rec = small(splitting=pal.Splitting(direction=direction))
    assert (len(rec.images) > 4) == (direction != "none")
    assert [entry["eta"] > 0 for entry in rec.history if "split" in entry] == [direction == "random"] * 2


def test_a_phase_ends_on_the_gradient_tolerance_or_on_a_plateau():
    converged = small(splitting=None, gradient_tolerance=1e9)
    assert converged.outcome is Ending.CONVERGED
    assert len(converged.history) == 1
    flat = small(splitting=None, plateau=0.999, steps=100, record_every=1)
    assert flat.outcome is Ending.PLATEAU
    assert len(flat.history) < 100


@pytest.mark.parametrize(
    ("until", "rounds", "expected"), [(None, 2, [34, 67]), (None, 1, [50]), (0.4, 2, [20, 40]), (0.01, 3, [1, 1, 1])]
)
def test_rounds_take_place_when_they_should(until, rounds, expected):
    rec = small(steps=100, splitting=pal.Splitting(rounds=rounds, until=until))
    assert [entry["step"] for entry in rec.history if "split" in entry] == expected
    assert rec.history[-1]["step"] < 100
    assert rec.outcome is Ending.FINISHED


def test_an_early_end_of_a_phase_leads_to_a_split_and_its_steps_to_the_next_phase():
    rec = small(gradient_tolerance=1e9)
    splits = [entry for entry in rec.history if "split" in entry]
    assert [entry["step"] for entry in splits] == [1, 2]
    assert rec.outcome is Ending.CONVERGED


def test_a_stable_point_that_stopped_of_itself_ends_the_run():
    objective, x, λ = exact_problem(0)
    settings = Settings(candidates=2, priors=(), sharpness=None, gradient_tolerance=1e-6, splitting=pal.Splitting())
    solver = Solver(objective, Everywhere((6,)), settings)
    state = replace(solver.init(), x=x, multipliers=λ)
    while not solver.done(state):
        state = solver.step(state)
    assert state.outcome is Ending.STABLE
    assert state.step == solver.record_every
    assert len(state.x) == 2


def test_sgd_with_momentum_descends():
    rec = small(optimiser=SGD(learning_rate=0.05), splitting=None, steps=60)
    losses = [entry["objective"] for entry in rec.history]
    assert losses[-1] < losses[0]


def test_adam_is_the_published_rule():
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    reference = torch.optim.Adam([parameter], lr=0.02, eps=1e-12)
    ours, rule = parameter.detach().clone(), Adam()
    moments = rule.init(ours)
    for step in range(1, 6):
        gradient = torch.tensor([0.3 * step, -1.0 / step], dtype=torch.float64)
        parameter.grad = gradient.clone()
        reference.step()
        rule.update_(ours, gradient, moments, rule.pace(step, 1.0))
    assert torch.allclose(ours, parameter.detach(), atol=1e-10)


def test_callbacks_hear_of_everything():
    heard = []

    class Listener(pal.Callback):
        def on_start(self, state):
            heard.append(("start", state.step))

        def on_record(self, state, entry):
            heard.append(("split" if "split" in entry else "record", state.step))

        def on_end(self, state):
            heard.append(("end", state.step))

    small(callbacks=[Listener()], record_every=5)
    assert heard[0] == ("start", 0)
    assert heard[-1] == ("end", 30)
    assert [step for what, step in heard if what == "split"] == [10, 20]
    assert [step for what, step in heard if what == "record"] == [0, 5, 10, 15, 20, 25]


def test_the_users_objective_is_left_as_it_was():
    torch.manual_seed(0)
    objective = pal.KKT(pal.networks.MLP((1, 3, 3), (6,)).double(), sharpness=7.0)
    small(objective=objective)
    assert objective.sharpness == 7.0


# --- the certificate ----------------------------------------------------------------------------


def test_the_certificate_of_the_truth_and_of_a_saddle():
    objective, x, λ = exact_problem(0)
    good = pal.certify(objective, x, λ, epsilon=1e-6)
    assert good.gradient <= 1e-12
    assert good.second_order
    objective, x, λ = stalled_problem(0)
    stalled = pal.certify(objective, x, λ, epsilon=1e-3)
    assert stalled.first_order
    assert stalled.splitting < -1e-3
    assert stalled.hessian >= stalled.splitting
    far = pal.certify(objective, x + 1, λ, epsilon=1e-9)
    assert far.outcome is Stationarity.STEEP
    assert not far.second_order


def test_curvature_that_was_not_resolved_is_not_certified():
    """A saddle: a stalled point with its candidates doubled. Few iterations see only a part of the spectrum."""
    objective, x, λ = stalled_problem(0)
    doubled = (torch.cat([x, x]), torch.cat([λ, λ]) / 2)
    assert pal.certify(objective, *doubled, epsilon=1e-6, iterations=100).outcome is Stationarity.SADDLE
    for iterations in (1, 2, 3):
        assert not pal.certify(objective, *doubled, epsilon=1e-6, iterations=iterations).second_order


def test_the_certificate_equals_dense_eigenvalues():
    objective, x, λ = exact_problem(1)
    x = x + 0.3 * torch.randn_like(x)
    found = pal.certify(objective, x, λ, iterations=200)
    product = objective.hessian(x, λ)
    H = torch.stack([product(e.reshape(x.shape)).flatten() for e in torch.eye(x.numel(), dtype=x.dtype)])
    T2 = objective.target_norm_squared
    assert found.hessian == pytest.approx(float(torch.linalg.eigvalsh(H)[0] / T2), rel=1e-6)
    S = pal.splitting.matrix(objective, x, λ)
    assert found.splitting == pytest.approx(float(torch.linalg.eigvalsh(S)[:, 0].min() / T2), rel=1e-6)


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor holds that any operation returns."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for t in result if isinstance(result, tuple | list) else [result]:
            if isinstance(t, torch.Tensor):
                self.numbers = max(self.numbers, t.numel())
        return result


def test_the_certificate_of_a_run_in_chunks_takes_no_more_memory_than_the_run():
    k, d, chunk = 12, 20, 2
    torch.manual_seed(0)
    initial, final = (pal.networks.MLP(d, (7,)).double() for _ in range(2))
    objective = pal.NTK(final, initial.state_dict()).by_autograd()
    batches = []
    objective._network.module.register_forward_pre_hook(lambda module, args: batches.append(len(args[0])))
    rec = pal.reconstruct(
        objective,
        image_shape=d,
        candidates=k,
        steps=6,
        splitting=pal.Splitting(rounds=1, direction="none"),
        execution=pal.Execution(memory=chunk * 6 * 8 * 3 * d / 1e9),
        progress=False,
    )
    in_run = max(batches)
    assert in_run <= 4  # so many are looked at to find the size of a chunk
    batches.clear()
    with Largest() as certificate:
        assert rec.certify(iterations=20).splitting < 1
    assert max(batches) <= in_run
    assert certificate.numbers <= max(3 * k, BASIS * chunk) * d


def test_a_run_in_chunks_is_certified_by_the_splitting_matrices_alone():
    """A few Lanczos directions for all candidates may miss the least eigenvalue, which would be no bound."""
    torch.manual_seed(1)
    initial, final = (pal.networks.MLP(12, (9,)).double() for _ in range(2))
    objective = pal.NTK(final, initial.state_dict(), sharpness=5.0)
    x, λ = torch.randn(8, 12).double(), torch.randn(8).double()
    whole = pal.certify(objective, x, λ, iterations=100)
    objective.chunk = 1
    chunked = pal.certify(objective, x, λ, iterations=100)
    assert chunked.hessian == chunked.splitting
    assert chunked.hessian <= whole.hessian + 1e-6
    assert chunked.splitting == pytest.approx(whole.splitting, abs=1e-6)


@pytest.mark.parametrize("chunk", [1, 3])
def test_the_certificate_does_not_depend_on_chunks(chunk):
    objective, x, λ = exact_problem(1, n=4, d=3, width=20)
    x = x + 0.3 * torch.randn_like(x)
    whole = pal.certify(objective, x, λ)
    objective.chunk = chunk
    found = pal.certify(objective, x, λ, iterations=60)
    assert found.gradient == pytest.approx(whole.gradient, rel=1e-10)
    assert found.splitting == pytest.approx(whole.splitting, rel=1e-6)
    assert found.found == pytest.approx(whole.found, rel=1e-4)
    assert found.hessian <= whole.found + 1e-9


def test_divergence_names_the_step_and_leaves_the_last_good_state_on_disk(tmp_path):
    path = tmp_path / "state.safetensors"
    run = {"optimiser": SGD(learning_rate=1e200), "splitting": None, "record_every": 7, "checkpoint": path}
    with pytest.raises(DivergenceError) as error:
        small(**run)
    assert 0 < error.value.step < 30
    tensors, description = pal.storage.load_tensors(path)
    assert description["step"] <= error.value.step
    assert all(t.isfinite().all() for t in tensors.values())


def test_the_prior_counts_in_the_objective():
    weak, strong = (small(priors=(TotalVariation(weight=w),), splitting=None, steps=100) for w in (1e-6, 10.0))
    roughness = [float(rec.images.diff(dim=-1).abs().mean()) for rec in (weak, strong)]
    assert roughness[1] < 0.5 * roughness[0]


def test_priors_may_be_strong_at_first_and_weak_in_the_end():
    """Penalties are recorded at their strength of the moment, which falls geometrically within each phase."""
    rec = small(priors=(TotalVariation(weight=1.0),), prior_strength=(10.0, 0.1), splitting=None, steps=40)
    shares = [entry["objective"] - entry["loss"] for entry in rec.history]
    roughness = float(TotalVariation(weight=1.0).value(rec.images, rec.multipliers))
    assert shares[0] > 5 * shares[-1]
    assert shares[-1] == pytest.approx(0.1 * 100 ** (1 / 40) * roughness, rel=0.05)
    constant = small(priors=(TotalVariation(weight=1.0),), splitting=None, steps=40)
    again = small(priors=(TotalVariation(weight=0.5),), prior_strength=(2.0, 2.0), splitting=None, steps=40)
    assert torch.allclose(constant.images, again.images, atol=1e-12)


def test_a_constant_rate_neither_falls_nor_restarts():
    rec = small(schedule="constant", sharpness=(50.0, 50.0))
    records = [entry for entry in rec.history if "loss" in entry]
    assert {entry["rate"] for entry in records} == {0.02}
    assert {entry["sharpness"] for entry in records} == {50.0}
    assert len(rec.images) > 4


NONSENSE = [
    {"candidates": 0},
    {"steps": 0},
    {"sharpness": (0.0, 1.0)},
    {"prior_strength": (1.0, 0.0)},
    {"record_every": 0},
    {"schedule": "linear"},
    {"splitting": None, "merging": pal.merging.Merging()},
]


@pytest.mark.parametrize("options", NONSENSE)
def test_settings_that_make_no_sense_are_refused(options):
    with pytest.raises(InvalidInputError):
        small(**options)


def test_priors_may_be_given_one_several_or_summed():
    from palimpsest.solver.priors import Box

    several = small(priors=(Box(), TotalVariation()))
    assert torch.equal(small(priors=Box() + TotalVariation()).images, several.images)
    assert not torch.equal(small(priors=Box()).images, several.images)

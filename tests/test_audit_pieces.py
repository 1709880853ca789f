"""The pieces of an audit: preflight, plan, agreement, ranking, floor, controls and options."""

import inspect
from dataclasses import fields, replace

import pytest
import torch
from torch import nn

import palimpsest as pal
from audited import SHAPE, fitted_mlp, mlp
from palimpsest.auditing import agreement, controls, evidence, plan, ranking, verdict
from palimpsest.auditing.floor import floor
from palimpsest.auditing.ladder import Attacker, attackers
from palimpsest.auditing.options import Options
from palimpsest.auditing.preflight import preflight
from palimpsest.auditing.subject import subject
from palimpsest.scoring import Outcome
from synthetic import exact_problem


def methods(ours, **options):
    """The method of each rung, or None."""
    rungs = attackers(ours, preflight(ours), Options(**options), scored=False)
    return {each.name: each.method for each in rungs}


def untimed(found, options, method="ntk"):
    return plan.untimed_plan(Attacker("W0", method, "", samples=options.samples), found, options)


def test_the_preflight_counts_images_and_tells_the_start():
    found = preflight(fitted_mlp())
    assert found.related
    assert found.samples == 8
    assert found.bound <= 8
    assert not found.unusable
    assert 0 < found.moved < 1


def test_a_start_that_is_not_ones_own_is_noticed():
    ours = fitted_mlp(steps=20)
    torch.manual_seed(99)
    stranger = replace(ours, initial=mlp().state_dict())
    assert preflight(stranger).related is False
    assert methods(stranger) == {"W": "kkt", "W0": None, "C": None, "O": None, "T": None}
    same = replace(ours, initial=ours.model.state_dict())
    assert preflight(same).unusable == "the weights never moved"


def test_an_untrained_first_layer_has_nothing_beyond_its_noise():
    torch.manual_seed(0)
    plain = subject(mlp, mlp().state_dict(), image_shape=SHAPE)
    assert preflight(plain).beyond_noise == 0
    assert preflight(plain).bound == 0


class Tempered(nn.Module):
    """A network with a learnable temperature, a parameter without dimensions."""

    def __init__(self):
        super().__init__()
        self.body, self.temperature = mlp(), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.body(x) / self.temperature


def test_parameters_without_dimensions_are_examined_too():
    torch.manual_seed(0)
    start, body = Tempered(), preflight(subject(mlp, mlp().state_dict(), image_shape=SHAPE))
    end = {name: t + 0.01 for name, t in start.state_dict().items()}
    for initial in (start.state_dict(), None):
        found = preflight(subject(Tempered, end, initial=initial, image_shape=SHAPE))
        assert (found.parameters, found.units, found.still_units) == (body.parameters + 1, body.units, 0)


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm2d(1), nn.Linear(64, 1)

    def forward(self, x):
        return self.head(self.norm(x).flatten(1))


def test_statistics_that_change_in_training_show_live_batch_normalisation():
    torch.manual_seed(0)
    network = Normalised()
    start = {name: t.clone() for name, t in network.state_dict().items()}
    tuned = start | {"head.weight": start["head.weight"] + 0.1}
    network.train()(torch.rand(8, *SHAPE))
    live = tuned | {name: t.clone() for name, t in network.state_dict().items() if name.startswith("norm.")}
    rounded = {name: t.half() if t.is_floating_point() else t for name, t in live.items()}

    def layers(end, **known):
        return preflight(subject(Normalised, end, image_shape=SHAPE, **known)).live_layers

    assert layers(tuned, initial=start) == layers(tuned) == 0
    assert layers(live, initial=start) == 1
    assert layers(live) == 0  # pretraining may have made these statistics
    assert layers(live, initial=rounded | {"head.weight": start["head.weight"]}) == 0
    middle = live | {"head.weight": start["head.weight"] + 0.05}
    assert layers(live, initial=start, checkpoints=[start, middle]) == 1


def test_methods_follow_outputs_and_weight_decay():
    def classes():
        return pal.networks.MLP(SHAPE, hidden=(20,), outputs=3)

    several = subject(classes, classes().state_dict(), image_shape=SHAPE)
    assert methods(several)["W"] == "multiclass"
    assert methods(several, weight_decay=True)["W"] == "kkt-signed"


@pytest.mark.parametrize("seconds", [30.0, 180.0, 3600.0])
@pytest.mark.parametrize("rate", [5.0, 60.0, 2000.0])
def test_plans_fit_into_the_time_there_is(seconds, rate):
    found = preflight(fitted_mlp(steps=20))
    made = plan.timed_plan(untimed(found, Options()), Options(), plan.Budget(seconds, rate, 100.0))
    assert plan.Budget(seconds, rate, 100.0).cost(made, controls=True) <= seconds or made.steps == plan.FEWEST_STEPS
    assert [role for role, _ in made.runs(controls=True)][:4] == ["subject", "subject", "negative", "negative"]


@pytest.mark.parametrize(
    ("samples", "bound", "candidates"), [(None, 5, 80), (None, 60, 120), (None, None, 80), (3, 5, 10)]
)
def test_a_bound_alone_does_not_lower_the_number_of_candidates(samples, bound, candidates):
    found = replace(preflight(fitted_mlp(steps=20)), bound=bound)
    assert untimed(found, Options(samples=samples)).candidates == candidates


@pytest.mark.parametrize(
    ("changes", "whitened"),
    [
        ({}, True),
        ({"method": "path"}, True),
        ({"method": "gradient"}, True),
        ({"method": "kkt"}, False),
        ({"rule": "adam"}, False),
        ({"live": True}, False),
        ({"directions": 3}, False),
    ],
)
def test_changes_of_convolutional_networks_are_whitened_where_that_reads_more(changes, whitened):
    attacker = replace(Attacker("W0", "ntk", "", samples=5), **changes)
    found = preflight(fitted_mlp())
    convolutional = replace(found, convolutional=True, pixels=3072)
    made, dense = (plan.untimed_plan(attacker, each, Options(samples=5)) for each in (convolutional, found))
    assert (made.whitening == plan.WHITENED) == whitened
    assert made.cosines == whitened
    assert dense.whitening is None
    assert (made.total_variation > dense.total_variation) == whitened
    given = plan.untimed_plan(attacker, convolutional, Options(samples=5, total_variation=0.2))
    assert given.total_variation == 0.2


def test_the_preflight_sees_convolutions():
    network = subject(patches, patches().state_dict(), image_shape=SHAPE)
    assert preflight(network).convolutional
    assert not preflight(fitted_mlp()).convolutional


def patches() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 1))


def test_options_replace_what_would_be_chosen():
    found = preflight(fitted_mlp(steps=20))
    options = Options(candidates=7, steps=33, restarts=5, tangents=2, total_variation=0.0, control_steps=9)
    made = plan.timed_plan(untimed(found, options), options, plan.Budget(1.0, 1.0, 1.0))
    assert (made.candidates, made.steps, made.restarts, len(made.at), made.total_variation) == (7, 33, 5, 2, 0.0)
    assert made.control_steps == 9


KIND = ranking.Kind("ntk", "everywhere", "dense", "one")


def noise(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_what_restarts_share_is_merged_and_ranked_first():
    faces = noise(2, *SHAPE, seed=0)
    runs = [
        agreement.Run(torch.cat([noise(3, *SHAPE, seed=s), faces + 0.1 * noise(2, *SHAPE, seed=s + 9), faces]),
                      torch.ones(7), 0.1)
        for s in (1, 2, 3)
    ]  # fmt: skip
    found = agreement.agree(runs)
    assert len(found) == 2 + 9
    assert (found.agreement[:2] > 0.99).all()
    assert (found.agreement[2:] < 0.6).all()
    ranked = ranking.rank(found, KIND)
    assert (ranked.probability.diff() <= 0).all()
    assert {tuple(image.flatten().tolist()) for image in ranked.images[:2]} == {
        tuple(f.flatten().tolist()) for f in faces
    }


def test_candidates_that_contribute_nothing_do_not_count():
    same = noise(4, *SHAPE, seed=0)
    runs = [agreement.Run(same, torch.full((4,), 1e-9), 1.0) for _ in range(2)]
    nothing = ranking.rank(agreement.agree(runs), KIND)
    assert len(nothing) == 0
    assert verdict.judge(evidence.Evidence(nothing, nothing)).outcome is Outcome.UNDECIDED


def test_what_explains_nothing_is_not_likely_however_far_restarts_agree():
    """Every restart may fall into the same blob; that is no training image."""
    blob = noise(1, *SHAPE, seed=0)
    runs = [agreement.Run(blob, torch.full((1,), 1e-3), 1.0) for _ in range(3)]
    found = ranking.rank(agreement.agree(runs), KIND)
    assert len(found) == 1
    assert found.probability[0] < evidence.LIKELY


def test_the_floor_is_zero_at_the_truth_and_high_elsewhere():
    objective, x, _ = exact_problem(0, n=3)
    assert floor(objective, x) < 1e-6
    assert floor(objective, torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))) > 0.1


def test_the_floor_keeps_multipliers_of_margin_methods_at_or_above_zero():
    torch.manual_seed(0)
    objective = pal.KKT(pal.networks.MLP(6, (20,)).double(), sharpness=5.0)
    x, λ, y = torch.randn(3, 6).double(), torch.tensor([0.5, 1.0, 2.0]).double(), torch.tensor([1, -1, 1])
    objective.target = objective.represent(x, λ, y)
    assert floor(objective, x, y) < 1e-6
    objective.target = objective.represent(x, -λ, y)
    assert floor(objective, x, y) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("factor", [0.3, 4.0])
def test_a_control_moves_as_far_as_the_subject(factor):
    ours = fitted_mlp()
    with torch.no_grad():
        for name, θ in ours.model.named_parameters():
            θ.copy_(ours.initial[name] + factor * (θ - ours.initial[name]))
    public = controls.public_images(8, SHAPE, 1, seed=0)
    made = untimed(preflight(ours), Options(samples=8))
    control = controls.trained_control(ours, made, public, torch.device("cpu"))
    way = controls.way(control, ours, made)
    assert evidence.AS_FAR <= way <= 2


def test_shuffling_keeps_values_and_loses_places():
    ours = fitted_mlp(steps=20)
    lost = dict(controls.shuffled(ours, "ntk", seed=0).model.named_parameters())
    for name, θ in ours.model.named_parameters():
        learnt, disorder = θ - ours.initial[name], lost[name] - ours.initial[name]
        assert torch.allclose(learnt.flatten().sort().values, disorder.flatten().sort().values, atol=1e-6)
    assert not torch.equal(ours.model.layers[0].weight, controls.shuffled(ours, "kkt", seed=0).model.layers[0].weight)


@pytest.mark.parametrize(
    ("shape", "count", "outputs"), [((1, 8, 8), 6, 1), ((3, 32, 32), 10, 4), ((1, 20, 16), 150, 10)]
)
def test_public_images_take_any_shape(shape, count, outputs):
    public = controls.public_images(count, shape, outputs, seed=0)
    assert public.images.shape == (count, *shape)
    assert public.held_out.shape[1:] == shape
    assert set(public.labels.tolist()) == ({-1, 1} if outputs == 1 else set(range(outputs)))


def test_the_options_of_the_command_line_are_those_of_the_function():
    parameters = inspect.signature(pal.audit).parameters
    for option in fields(Options):
        parameter = parameters[option.name]
        assert (parameter.default, parameter.annotation) == (option.default, option.type), option.name
        assert f"        {option.name}: " in pal.audit.__doc__

"""Audits of networks that were trained by Adam."""

import copy
import json
from dataclasses import replace
from itertools import product

import pytest
import torch

import palimpsest as pal
from audited import QUICK, SHAPE, mlp, truth
from palimpsest.auditing.controls import public_images, shuffled, trained_control
from palimpsest.auditing.doubts import doubts
from palimpsest.auditing.floor import floor
from palimpsest.auditing.ladder import attackers
from palimpsest.auditing.moving import by_adam, by_descent, distance, moved_as_far
from palimpsest.auditing.options import Options
from palimpsest.auditing.plan import Budget, timed_plan, untimed_plan
from palimpsest.auditing.preflight import preflight
from palimpsest.auditing.ranking import calibration, kind
from palimpsest.auditing.reading import posed
from palimpsest.auditing.subject import subject
from palimpsest.auditing.verdict import _training
from palimpsest.errors import InvalidInputError
from palimpsest.objectives.binding import parameters_of
from palimpsest.runs.problems import problem
from test_audit_verdict import BLIND

ANY = Options()
PAIRS = list(product(("ntk", "path", "gradient"), ("sgd", "adam")))


@pytest.fixture(scope="module")
def trained():
    """Data, the states of a network on the way, and the state of its optimiser."""
    data = pal.datasets.load("digits", per_class=4, held_out_per_class=20, seed=5)
    torch.manual_seed(0)
    model = mlp()
    rule, states = torch.optim.Adam(model.parameters(), lr=1e-3), [copy.deepcopy(model.state_dict())]
    for _ in range(3):
        for _ in range(20):
            rule.zero_grad()
            (model(data.train.images - 0.5)[:, 0] - data.train.labels).square().mean().backward()
            rule.step()
        states.append(copy.deepcopy(model.state_dict()))
    return data, states, rule.state_dict()


def examined(states, **options):
    return subject(mlp, options.pop("trained", states[-1]), initial=states[0], image_shape=SHAPE, **options)


def rules(of, options=ANY):
    return {rung.name: rung.rule for rung in attackers(of, preflight(of), options, scored=False)}


def test_the_option_or_the_state_says_that_it_was_adam(trained):
    _, states, state = trained
    plain = examined(states, checkpoints=states)
    assert set(rules(plain).values()) == {"sgd"}
    chosen = rules(plain, Options(optimiser="adam"))
    assert (chosen["W0"], chosen["C"], chosen["W"], chosen["O"]) == ("adam", "adam", "sgd", "sgd")
    full = examined(states, trained={"model": states[-1], "optimizer": state})
    assert rules(full)["W0"] == "adam"
    assert rules(full, Options(optimiser="sgd"))["W0"] == "sgd"
    fresh = {"model": states[-1], "optimizer": state | {"state": {}}}  # without a moment that could be read
    assert rules(examined(states, trained=fresh))["W0"] == "adam"


def test_an_optimiser_that_does_not_fit_raises_a_doubt(trained):
    _, states, state = trained
    plain, full = examined(states), examined(states, trained={"model": states[-1], "optimizer": state})
    assert doubts(plain, None, rule="adam") == doubts(full, None, rule="adam") == doubts(full, None) == ()
    assert len(doubts(full, None, rule="sgd")) == 1
    assert len(doubts(plain, None, rule="adam", counted=27)) == 1  # Adam would have moved every direction
    assert not doubts(plain, None, rule="sgd", counted=27)
    momentum = torch.optim.SGD(mlp().parameters(), momentum=0.9).state_dict()
    by_sgd = examined(states, trained={"model": states[-1], "optimizer": momentum})
    assert len(doubts(by_sgd, None, rule="adam")) == 1


def test_a_plan_has_stages_and_its_kind_is_not_calibrated(trained):
    _, states, _ = trained
    ours, options = examined(states, checkpoints=states), Options(optimiser="adam", samples=8)
    found = {rung.name: rung for rung in attackers(ours, preflight(ours), options, scored=False)}
    for name, few, many in (("W0", 3, 5), ("C", 1, 2)):
        plan = untimed_plan(found[name], preflight(ours), options)
        assert (plan.rule, plan.within, len(plan.at)) == ("adam", "everywhere", few)
        assert len(timed_plan(plan, options, Budget(1e6, 100.0, 100.0)).at) == many
        assert kind(ours, plan) not in calibration().kinds


def test_an_audit_reads_more_if_it_knows_of_adam(trained, tmp_path):
    data, states, _ = trained
    options = QUICK | {"samples": 8, "steps": 300, "rungs": ("W0", "C"), "truth": truth(data), "initial": states[0]}
    options |= {"image_shape": SHAPE, "checkpoints": states}
    found = {}
    for name in ("sgd", "adam"):
        audit = pal.audit(mlp, states[-1], out=tmp_path / name, optimiser=name, **options)
        found[name] = [audit.readings[rung] for rung in ("W0", "C")]
        written = json.loads((tmp_path / name / "audit.json").read_text())
        assert {reading["plan"]["rule"] for reading in written["readings"]} == {name}
    (without, knowing), (_, on_the_way) = zip(*found.values(), strict=True)
    assert knowing.score.ssim.mean() > without.score.ssim.mean() + 0.03
    assert knowing.positive.way > 0.9 > without.positive.way  # the control, too, is trained by Adam
    assert on_the_way.floor < without.floor - 0.2
    assert knowing.floor < without.floor - 0.2


@pytest.mark.parametrize("training", [by_adam, by_descent])
def test_a_control_moves_as_far_as_it_should(training):
    torch.manual_seed(0)
    model, images, y = mlp(), torch.rand(6, *SHAPE) - 0.5, torch.tensor([1.0, -1, 1, -1, 1, -1])
    moved = moved_as_far(training, model, 1.5, images, y, 4000)
    assert 1.35 < distance(parameters_of(moved.model), moved.initial) < 2.2
    assert all(torch.equal(t, moved.initial[name]) for name, t in model.state_dict().items())


def test_the_floor_of_one_step_is_low_and_that_of_other_images_is_not():
    torch.manual_seed(0)
    images, y = torch.rand(4, *SHAPE) - 0.5, torch.tensor([1.0, -1, 1, -1])
    model = mlp()
    initial = copy.deepcopy(model.state_dict())
    rule = torch.optim.Adam(model.parameters(), lr=1e-3)
    (model(images)[:, 0] - y).square().sum().backward()
    rule.step()
    objective = pal.AdamPath(model, [initial, model.state_dict()], at=(0.0,), softness=0.01)
    assert floor(objective, images) < 0.05
    assert floor(objective, torch.rand(4, *SHAPE) - 0.5) > 0.3


def test_controls_have_the_memory_of_the_network(trained):
    """Checkpoints continue Adam's mean of squares, and the controls must be read with the same equations."""
    _, states, _ = trained
    ours = examined(states, checkpoints=states)
    options = Options(optimiser="adam", samples=4, control_steps=100)
    rung = next(each for each in attackers(ours, preflight(ours), options, scored=False) if each.name == "C")
    plan = replace(untimed_plan(rung, preflight(ours), options), control_steps=100)
    public = public_images(4, SHAPE, 1, seed=0)
    made = (ours, shuffled(ours, "path", seed=0), trained_control(ours, plan, public, torch.device("cpu")))
    assert [posed(each, plan)[0].memories for each in made] == [[3]] * 3


def test_only_readings_of_changes_are_told_about_adam():
    advice = {(method, rule): _training(replace(BLIND, method=method, rule=rule)) for method, rule in PAIRS}
    assert {pair for pair, words in advice.items() if "--optimiser adam" in words} == {("ntk", "sgd"), ("path", "sgd")}


def test_the_span_is_refused(trained):
    _, states, _ = trained
    model = mlp()
    model.load_state_dict(states[-1])
    with pytest.raises(InvalidInputError):
        problem("ntk", model, states[0], within="span", rule="adam")

"""Audits of networks that were trained with live batch normalisation."""

import copy
import math

import pytest
import torch
from torch import nn

import palimpsest as pal
from palimpsest.auditing import controls, reading
from palimpsest.auditing.case import Case, Clock
from palimpsest.auditing.ladder import attackers, was_live
from palimpsest.auditing.options import Options
from palimpsest.auditing.plan import untimed_plan
from palimpsest.auditing.preflight import preflight
from palimpsest.auditing.subject import subject
from palimpsest.errors import InvalidInputError, UnsupportedNetworkError
from palimpsest.runs.problems import problem

SHAPE, N = (1, 8, 8), 6


def dense_first():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 1))


def convolutional():
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 1))


def trained(make):
    """The weights before and after, and the optimiser's state."""
    torch.manual_seed(0)
    model, x, y = make().train(), torch.rand(N, *SHAPE), torch.arange(N) % 2 * 2.0 - 1
    start = copy.deepcopy(model.state_dict())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for _ in range(30):
        optimiser.zero_grad()
        (model(x)[:, 0] - y).square().mean().backward()
        optimiser.step()
    return start, {"model": model.state_dict(), "optimizer": optimiser.state_dict()}


def examined(make, start, end):
    return subject(make, end, initial=start, image_shape=SHAPE)


def planned(ours, options=Options(samples=N)):  # noqa: B008  frozen
    """The plans of all rungs that can be read, by name."""
    found = preflight(ours)
    rungs = attackers(ours, found, options, scored=False)
    return {rung.name: untimed_plan(rung, found, options) for rung in rungs if rung.method}


@pytest.mark.parametrize("make", [dense_first, convolutional])
def test_all_candidates_are_one_batch_and_the_span_is_not_searched(make):
    plans = planned(examined(make, *trained(make)))
    assert {name: (p.live, p.within) for name, p in plans.items()} == {
        "W": (False, "everywhere"), "W0": (True, "everywhere"), "O": (True, "everywhere"),
    }  # fmt: skip
    assert {plans[name].candidates for name in ("W0", "O")} == {N}


def test_the_user_may_overrule_the_statistics():
    ours = examined(convolutional, *trained(convolutional))
    assert not planned(ours, Options(samples=N, batch_norm="fixed"))["W0"].live
    found = preflight(examined(convolutional, None, trained(convolutional)[1]))
    assert not was_live(found, Options())
    assert was_live(found, Options(batch_norm="live"))


def test_networks_without_batch_normalisation_refuse_the_option(tmp_path):
    model = pal.networks.MLP(SHAPE, hidden=(3,))
    with pytest.raises(InvalidInputError, match="--batch-norm"):
        pal.audit(lambda: copy.deepcopy(model), model.state_dict(), image_shape=SHAPE, out=tmp_path, batch_norm="live")


def test_the_objective_of_a_live_rung_is_live_and_takes_its_images_everywhere():
    ours = examined(dense_first, *trained(dense_first))
    made, space = reading.posed(ours, planned(ours)["W0"])
    assert (made.live, space) == (True, None)
    with pytest.raises(InvalidInputError, match="everywhere"):
        problem("ntk", ours.model, ours.initial, within="span", image_shape=SHAPE, live=True)


@pytest.mark.parametrize("rung", ["W0", "O"])
@pytest.mark.parametrize("n", [2, 3, 5, N])
def test_positive_controls_are_trained_live(rung, n, tmp_path):
    ours = examined(convolutional, *trained(convolutional))
    plan = planned(ours, Options(samples=n, control_steps=5))[rung]
    case = Case(tmp_path, "", ours, Options(samples=n), None, torch.device("cpu"), Clock(math.inf))
    control = controls.trained_control(ours, plan, controls.control_images(case, plan), case.device)
    buffers = dict(ours.model.named_buffers())
    assert all(torch.equal(t, buffers[name]) for name, t in control.model.named_buffers())
    changed = [
        bool((t != dict(ours.model.named_parameters())[name]).any()) for name, t in control.model.named_parameters()
    ]
    assert any(changed)


def test_a_live_batch_of_one_image_has_a_named_error(tmp_path):
    ours = examined(dense_first, *trained(dense_first))
    plan = planned(ours, Options(samples=1))["W0"]
    case = Case(tmp_path, "", ours, Options(samples=1), None, torch.device("cpu"), Clock(math.inf))
    with pytest.raises(UnsupportedNetworkError):
        controls.trained_control(ours, plan, controls.control_images(case, plan), case.device)


def test_an_audit_of_final_weights_alone_says_why_it_does_not_decide(tmp_path):
    _, end = trained(convolutional)
    found = pal.audit(
        convolutional, end["model"], image_shape=SHAPE, out=tmp_path, samples=N, batch_norm="live", steps=3, restarts=2,
        control_steps=3, minutes=60.0,
    )  # fmt: skip
    assert found.report.name == "report.html"
    assert found.verdict.reason == pal.auditing.reasons.Reason.LIVE_NORMALISATION


def test_an_option_against_the_statistics_is_a_doubt(tmp_path):
    start, end = trained(convolutional)
    found = pal.audit(
        convolutional, end["model"], initial=start, image_shape=SHAPE, out=tmp_path, samples=N, batch_norm="fixed",
        steps=3, restarts=2, tangents=1, controls=False, control_steps=3, minutes=60.0, rungs=["W0"],
    )  # fmt: skip
    assert any("--batch-norm" in doubt for doubt in found.doubts)

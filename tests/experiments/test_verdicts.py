"""The experiments on verdicts, at a size of seconds, and how they count."""

import json

import audit_cosines
import audit_networks
import audit_verdicts
import outsiders
import pytest
import torch

import palimpsest as pal
from palimpsest.auditing.floor import floor
from palimpsest.auditing.reasons import Reason

LEAKS = {"name": "mlp-sgd", "holds them": True, "recovered": 9, "with images": "leakage", "reason": None, "rung": "C"}
EMPTY = {"name": "mlp-private", "holds them": False, "recovered": 0, "with images": "leakage", "reason": None}
WITHHELD = LEAKS | {"with images": "no verdict", "training": "SGD"}
BY_ADAM = WITHHELD | {"training": "Adam, batches of 5", "floors": {"checkpoints": 0.8}, "reason": Reason.UNDESCRIBED}
NOISE = {"name": "cnn-noise", "holds them": False, "recovered": 0}


@pytest.mark.parametrize(
    ("row", "right"),
    [
        (LEAKS, True),
        (EMPTY, False),
        (LEAKS | {"with images": "no evidence"}, False),
        (LEAKS | {"with images": "no evidence", "recovered": 5}, True),
        (EMPTY | {"with images": "no evidence"}, True),
        (EMPTY | {"with images": "no verdict", "reason": Reason.NOISE}, True),
        (EMPTY | {"with images": "no verdict", "reason": Reason.LIVE_NORMALISATION}, False),
        (WITHHELD | {"reason": Reason.UNCERTAIN}, True),
        (WITHHELD | {"reason": Reason.UNMATCHED}, False),
        (WITHHELD | {"reason": Reason.UNDESCRIBED, "floors": {"checkpoints": 0.8}}, True),
        (WITHHELD | {"reason": Reason.UNDESCRIBED, "floors": {"checkpoints": 0.2}}, False),
        (WITHHELD | {"reason": Reason.UNDESCRIBED, "rung": "W", "rungs": {"W": {"floor": 0.9}}}, True),
        (BY_ADAM | {"rungs": {"C": {"floor": 0.2}}}, False),
        (BY_ADAM | {"rungs": {"C": {"floor": 0.9}}}, True),
    ],
)
def test_a_verdict_is_right_if_it_is_true_or_withheld_for_a_true_reason(row, right):
    assert audit_networks.right(row, "with images") is right


@pytest.mark.parametrize(("outcome", "right"), [("leakage", True), ("no evidence", False)])
def test_a_network_that_was_trained_on_noise_holds_it(outcome, right):
    assert audit_networks.right(NOISE | {"without images": outcome}, "without images") is right
    assert audit_networks.right(NOISE | {"with images": outcome}, "with images") is (outcome == "no evidence")


def test_networks_that_hold_nothing_have_true_reasons():
    every = list(outsiders.outsiders())
    assert [each.name for each in every] == list(audit_networks.NAMES)
    assert {each.name for each in every if not each.holds} == set(audit_networks.WITHHELD)


def test_audits_of_convolutional_networks_are_compared_by_pixels_and_by_cosines():
    rows = audit_cosines.read("cnn-sgd", audit_cosines.SEEDS[0], small=True)
    assert [(row["searched"], row["rate"]) for row in rows] == list(audit_cosines.WAYS)
    assert len({row["loss"] for row in rows}) == len(rows)


@pytest.mark.parametrize("name", ["mlp-adam", "mlp-private"])
def test_a_small_audit_of_an_outsiders_network(name):
    outsider = next(each for each in outsiders.outsiders(small=True) if each.name == name)
    row = audit_networks.audited(outsider, seed=1, small=True)
    assert json.loads(json.dumps(row)) == row
    assert set(row["rungs"]) == {"W", "W0"} | ({"O"} if "optimiser" in outsider.keeps else set())
    assert row["accuracy"] is not None
    assert row["rungs"]["W0"]["floor"] is not None


@pytest.mark.parametrize("at", [(0.5,), (0.15, 0.85)])
def test_floors_are_those_of_the_method(at):
    torch.manual_seed(0)
    x, y = torch.randn(4, 1, 5, 5), torch.arange(4) % 3
    left = outsiders.train(outsiders.Perceptron(25, 30, 3), x, y, rule="SGD", rate=0.2, batch=2, epochs=30)
    exact = audit_networks.unexplained(left.model, left.initial, left.final, x, at=at)
    assert 0 < exact < 1
    assert floor(pal.NTK(left.model, left.initial, at=at), x) == pytest.approx(exact, rel=0.02)


def test_private_training_bounds_what_an_image_can_change():
    """Without noise, each step moves the weights by at most the rate times the clipping norm."""
    torch.manual_seed(0)
    x, y = 5 * torch.randn(6, 1, 5, 5), torch.arange(6) % 2
    model = outsiders.Perceptron(25, 8)
    left = outsiders.train_privately(model, x, y, epsilon=1e9, rate=0.5, clip=0.1, steps=1)
    moved = torch.cat([(left.final[name] - t).flatten() for name, t in left.initial.items()]).norm()
    assert 0 < moved <= 0.5 * 0.1 * 1.01


def test_judged_without_images_an_audit_does_not_know_them():
    row = audit_verdicts.audited(audit_verdicts.cases(seed=7)[21], small=True)
    assert json.dumps(row)
    assert set(row["rungs"]) == {"W", "W0", "C"}
    assert not any(
        "given images" in rung["sentence without images"] or "recovered" in rung["sentence without images"]
        for rung in row["rungs"].values()
    )


def test_empty_networks_are_of_five_families_and_three_kinds():
    empty = [case for case in audit_verdicts.cases() if case.kind != "leaking"]
    assert len(empty) >= 40
    assert {case.network for case in empty} == set(audit_verdicts.FACTORIES)
    assert len({(case.kind, case.network) for case in empty}) == 15


@pytest.mark.parametrize("kind", ["noise", "permuted"])
def test_empty_networks_keep_the_size_of_a_training(kind):
    case = next(case for case in audit_verdicts.cases(seed=7) if case.kind == kind)
    start = {"weight": torch.zeros(200, 50), "count": torch.tensor(3)}
    states = [start, {"weight": torch.rand(200, 50), "count": torch.tensor(3)}]
    (_, made) = audit_verdicts.emptied(case, states)
    assert not torch.equal(made["weight"], states[1]["weight"])
    assert float(made["weight"].norm()) == pytest.approx(float(states[1]["weight"].norm()), rel=0.05)


def row(kind, with_images, without_images, recovered=0):
    return {"kind": kind, "with images": with_images, "without images": without_images, "recovered": recovered}


def test_false_claims_and_misses_are_counted():
    none = "no evidence"
    assert audit_verdicts.false_claims([row("noise", none, "leakage"), row("permuted", "leakage", none)]) == 2
    assert (
        audit_verdicts.false_claims([row("other images", none, "leakage"), row("leaking", "leakage", "leakage")]) == 0
    )
    assert audit_verdicts.missed([row("leaking", none, none, 6), row("leaking", none, none, 5)]) == 1

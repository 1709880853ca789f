"""Ranks and probabilities: which kinds of networks are calibrated, and what counts as real."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranking_map import command, fitting, page
from torch import nn

import palimpsest as pal
from audited import SHAPE, fitted_mlp
from palimpsest.auditing import ranking
from palimpsest.auditing.agreement import Agreed
from palimpsest.auditing.plan import Plan
from palimpsest.auditing.shown import by_mixture, shows
from palimpsest.auditing.subject import subject

ROOT = Path(__file__).parents[1]
SHIPPED, TABLE = (json.loads(path.read_text(encoding="utf-8")) for path in (command.SHIPPED, command.TABLE))
AGREED = Agreed(
    torch.zeros(3, *SHAPE), torch.tensor([0.99, 0.9, 0.2]), torch.ones(3), 0.3, 0.9, torch.full((3,), -1)
)  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "family"),
    [
        ([nn.Flatten(), nn.Linear(64, 3)], "dense"),
        ([nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 1)], "convolutional"),
        ([nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 1)], "other"),
    ],
)
def test_a_kind_is_what_an_audit_sees(layers, family):
    model = nn.Sequential(*layers)
    examined = subject(lambda: model, model.state_dict(), image_shape=SHAPE)
    plan = Plan("ntk", "span", (0.5,), 8, 10, 2, 0.1, 4, 1, 0)
    found = ranking.kind(examined, plan)
    assert found == ranking.Kind("ntk", "span", family, "several" if family == "dense" else "one")


def test_kinds_that_were_not_validated_are_not_calibrated():
    known = next(iter(ranking.calibration().kinds))
    assert ranking.rank(AGREED, known).calibrated
    for change in ({"method": "none"}, {"within": "none"}, {"network": "none"}, {"outputs": "none"}):
        assert not ranking.rank(AGREED, replace(known, **change)).calibrated


def test_more_agreement_is_likelier():
    for kind in ranking.calibration().kinds:
        p = ranking.rank(AGREED, kind).probability
        assert p[0] > 0.5 > p[2]


def test_the_shipped_map_passes_its_own_criterion():
    passed = [row["kind"] for row in TABLE["kinds"] if row["calibrated"]]
    assert SHIPPED["kinds"] == passed
    assert SHIPPED["coefficients"] == TABLE["coefficients"]
    for row in TABLE["kinds"]:
        full = [each for each in row["bins"] if each["n"] >= 20]
        close = all(abs(each["estimated"] - each["observed"]) <= 0.1 for each in full)
        enough = row["networks"] >= 3 and row["candidates"] >= 50
        assert row["calibrated"] == (enough and close and any(each["bin"] == 4 for each in full))
    assert page.table(TABLE["kinds"]) in (ROOT / "docs" / "ranking.md").read_text(encoding="utf-8")


def test_the_table_is_that_of_the_results():
    every = command.finished(command.RESULTS)
    fit, others = command.parts(every)
    assert fitting.fit_map(fit, tuple(SHIPPED["coefficients"])) == pytest.approx(SHIPPED["coefficients"], abs=0.01)
    assert command.by_kind(others, fit, SHIPPED["coefficients"]) == TABLE["kinds"]
    assert not {each.network["seed"] for each in fit} & {each.network["seed"] for each in others}


def test_bins_that_are_off_or_missing_are_not_calibrated():
    low = {"bin": 0, "n": 19, "estimated": 0.1, "observed": 1.0}
    middle = {"bin": 2, "n": 20, "estimated": 0.5, "observed": 0.42}
    high = {"bin": 4, "n": 20, "estimated": 0.9, "observed": 0.82}
    assert fitting.calibrated([low, middle, high], 3)
    assert not fitting.calibrated([low, middle, high], 2)
    assert not fitting.calibrated([middle, high], 3)
    assert not fitting.calibrated([low, middle, high | {"observed": 0.79}], 3)
    assert not fitting.calibrated([low | {"n": 20}, middle, high], 3)
    assert not fitting.calibrated([low, middle | {"n": 100}, high | {"n": 19}], 3)


def test_the_fit_finds_the_map_behind_the_labels():
    b = {"constant": -1.0, "agreement": 2.0}
    kind = ranking.Kind("ntk", "everywhere", "dense", "one")
    generator = torch.Generator().manual_seed(0)
    agreement = torch.rand(4000, generator=generator)
    agreed = replace(AGREED, images=torch.zeros(1).expand(4000, *SHAPE), agreement=agreement, copies=torch.ones(4000),
                     explained=1.0, originals=torch.full((4000,), -1))  # fmt: skip
    real = torch.rand(4000, generator=generator) < ranking.probability(agreed, kind, b)
    read = fitting.Read({"permuted": False, "training": "adam"}, kind, agreed, real.double().numpy(), 0)
    assert fitting.fit_map([read], tuple(b)) == pytest.approx(b, abs=0.25)
    assert all(abs(row["estimated"] - row["observed"]) < 0.06 for row in fitting.bins([read], b))


def test_a_mixture_of_training_images_is_not_one_of_them():
    data = pal.datasets.load("digits", per_class=5, seed=3)
    members, others = (data.centred(part.images) for part in (data.train, data.held_out))
    c = torch.randn(100, len(members), generator=torch.Generator().manual_seed(7))
    mixtures = torch.einsum("ki,ichw->kchw", c, members)
    assert shows(members, members, others, within="span").all()
    assert not shows(others, members, others, within="everywhere").any()
    chance = [float(shows(mixtures, members, others, within=space).double().mean()) for space in ("span", "everywhere")]
    assert chance[0] <= 0.1 < chance[1]
    assert 0.4 < by_mixture(members) < 1
    assert shows(members[:0], members, others, within="span").shape == (0,)


def test_networks_are_read_once(tmp_path, capsys):
    words = ["--small", "--results", str(tmp_path / "results"), "--scratch", str(tmp_path / "scratch")]
    command.main(words)
    assert capsys.readouterr().out.count("real") == 2
    command.main(words)
    assert capsys.readouterr().out == ""
    every = command.finished(tmp_path / "results")
    assert len(every) == 2
    assert all(len(each.real) == len(each.agreed) > 0 for each in every)
    page.figure(command.by_kind(every, every, SHIPPED["coefficients"]), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_the_record_of_an_uncalibrated_kind_does_not_have_probabilities(tmp_path):
    ours = fitted_mlp(steps=20)
    found = pal.audit(
        ours.fresh, ours.model.state_dict(), initial=ours.initial, image_shape=SHAPE, out=tmp_path / "audit",
        steps=5, restarts=2, tangents=1, control_steps=5, controls=False, rungs=("W",),
    )  # fmt: skip
    (reading,) = json.loads((tmp_path / "audit" / "audit.json").read_text())["readings"]
    assert not found.ranking.calibrated
    assert reading["estimates"]["calibrated"] is False
    assert [reading["estimates"][name] for name in ("expected", "highest", "by_chance")] == [None] * 3
    assert "probability" not in found.report.read_text().partition('id="candidates"')[2].partition("</section>")[0]

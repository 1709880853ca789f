"""The membership test inside an audit."""

import csv
from dataclasses import replace
from html import unescape

import pytest
import torch

import palimpsest as pal
from audited import SHAPE, mlp
from palimpsest.auditing import compare, exchange, load, members
from palimpsest.auditing.floor import Floor
from palimpsest.files.schema import built

TINY = {"image_shape": SHAPE, "steps": 2, "restarts": 2, "tangents": 1, "controls": False, "rungs": ("W0",)}


@pytest.fixture(scope="module")
def images():
    return torch.rand(132, *SHAPE, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def fit(images):
    torch.manual_seed(0)
    return pal.train(mlp(), images[:16] - 0.5, torch.arange(16) % 2 * 2 - 1, steps=200)


def truth(images, start=0, held_out=100):
    others = images[32 : 32 + held_out]
    return pal.auditing.Truth(images[start : start + 16], torch.arange(16) % 2, others, mean=0.5)


def audit(fit, given, out, **more):
    return pal.audit(mlp, fit.model.state_dict(), **{"initial": fit.initial, "truth": given, "out": out} | TINY | more)


def test_training_images_are_told_from_held_out_ones(images, fit, tmp_path):
    """All training images are named. Other images are not. Few held-out ones and the final weights decide nothing."""
    audits = {"trained": (0, 100, "W0"), "other": (16, 100, "W0"), "few": (0, 19, "W0"), "final": (0, 100, "W")}
    for name, (start, held_out, rung) in audits.items():
        audit(fit, truth(images, start, held_out), tmp_path / name, rungs=(rung,))
    trained, other, few, final = (load(tmp_path / name).membership for name in audits)
    assert (trained.outcome, trained.named, trained.tested, trained.held_out) == ("leakage", 16, 16, 100)
    assert (other.outcome, other.named) == ("no evidence", 0)
    assert few is None
    assert final is None
    with (tmp_path / "trained" / "images.csv").open(newline="") as file:
        assert {row["membership_p_value"] for row in csv.DictReader(file)} == {f"{1 / 101:.4g}"}
    assert trained.sentence in unescape((tmp_path / "trained" / "report.html").read_text())
    changes = compare(tmp_path / "trained", tmp_path / "other")
    assert [(row.old, row.new) for row in changes.rows if "membership" in row.what] == [(trained.auc, other.auc)]


def test_an_unrelated_start_is_not_tested(images, fit, tmp_path):
    torch.manual_seed(5)
    found = audit(fit, truth(images), tmp_path / "audit", initial=mlp().state_dict(), rungs=None)
    assert found.preflight.related is False
    assert found.membership is None


def test_a_test_without_time_is_made_with_more_minutes_alone(images, fit, tmp_path, monkeypatch):
    given, share = truth(images), members.SHARE
    monkeypatch.setattr(members, "SHARE", 0.0)
    assert audit(fit, given, tmp_path / "audit", minutes=1).membership is None
    monkeypatch.setattr(members, "SHARE", share)
    assert audit(fit, given, tmp_path / "audit", minutes=1).membership is None  # as in the report that was written
    assert audit(fit, given, tmp_path / "audit", minutes=2).membership is not None


def test_traces_are_those_of_the_rung_whose_changes_were_tested(images, fit, tmp_path):
    middle = {name: (t + fit.model.state_dict()[name]) / 2 for name, t in fit.initial.items()}
    found = audit(fit, truth(images), tmp_path / "audit", checkpoints=[middle], rungs=("W0", "C"))
    assert [found.readings[name].trace is None for name in ("W0", "C")] == [True, False]
    assert "2 parts" in found.membership.knowledge


def test_a_mean_of_the_training_images_is_noticed_before_some_are_left_out():
    """The network never saw these images. Their own mean holds a part of each."""
    faces = pal.datasets.load("faces", per_class=50, held_out_per_class=50, seed=2)
    given, others = faces.train.images, faces.held_out.images
    own = given.mean(0)
    mean, std = exchange.fair(given, others, own, 1.0)
    torch.testing.assert_close(mean, torch.cat([given, others]).mean(0))
    rows = exchange.chosen(100, 20)
    assert exchange.fair(given[rows], others[rows], mean, std)[0] is mean


def test_folders_of_an_older_version_are_read():
    assert built(Floor, {"floor": 0.1, "trace": 0.5}).floor == 0.1


def test_doubts_about_the_files_reach_the_sentence(images, fit, tmp_path):
    found = audit(fit, truth(images), tmp_path / "audit")
    assert "doubt" not in found.membership_sentence
    assert "doubt" in replace(found, doubts=("a file is wrong",)).membership_sentence

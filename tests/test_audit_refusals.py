"""Audits refuse wrong use, files and options in one sentence, before the folder is taken."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import outsider
import palimpsest as pal
from audited import SHAPE, mlp
from palimpsest.auditing.subject import factory, subject
from palimpsest.cli.main import main
from palimpsest.errors import InvalidInputError, UnsupportedNetworkError

TESTS = Path(__file__).parent


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise RuntimeError('boom\\nmore')", "importing .* failed with RuntimeError: boom; run it"),
        ("import nothing_of_this_name", "ModuleNotFoundError"),
        ("def make(:", "SyntaxError"),
        ("import sys; sys.exit(3)", "SystemExit"),
        ("other = 1", "function make"),
    ],
)
def test_a_file_that_cannot_be_imported_is_told_in_one_sentence(code, reason, tmp_path):
    path = tmp_path / "broken_network.py"
    path.write_text(code)
    with pytest.raises(InvalidInputError, match=reason) as told:
        factory(f"{path}:make")
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("name", ["nowhere.py:make", "no.such.package:make", "make", "module:", ":make", "a:b c"])
def test_names_that_lead_nowhere_are_refused(name):
    with pytest.raises(InvalidInputError):
        factory(name)


def test_a_module_in_the_working_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "their_models.py").write_text("import torch\ndef make(): return torch.nn.Linear(3, 1)\n")
    monkeypatch.chdir(tmp_path)
    assert isinstance(factory("their_models:make")(), nn.Linear)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda wide: None, "--network-args"),
        (lambda: "a network", "returned a str"),
    ],
)
def test_factories_that_fail_are_told_in_one_sentence(make, reason):
    with pytest.raises(InvalidInputError, match=reason):
        subject(make, {}, image_shape=SHAPE)


def test_layers_that_cannot_be_handled_are_named():
    class Stepped(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Hardswish()
            self.head = nn.Linear(64, 1)

        def forward(self, x):
            return self.head(self.gate(x.flatten(1)))

    with pytest.raises(UnsupportedNetworkError, match=r"gate.*hardswish"):
        subject(Stepped, Stepped().state_dict(), image_shape=SHAPE)
    with pytest.raises(InvalidInputError, match="1,9,9"):
        subject(mlp, mlp().state_dict(), image_shape=(1, 9, 9))
    with pytest.raises(InvalidInputError, match="1,28,28"):
        subject(mlp, mlp().state_dict(), image_shape=(8, 8))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"--shape": "eight"}, "channels, height and width"),
        ({"--weights": "missing.pt"}, "missing.pt"),
        ({"--network": "nowhere.py:make"}, "nowhere.py"),
        ({"--minutes": "0"}, "minutes is 0.0"),
        ({"--seed": "-1"}, "seed is -1"),
        ({"--rungs": "W0"}, "--initial"),
        ({"--rungs": "C"}, "--checkpoints"),
        ({"--rungs": "O"}, "--weights"),
        ({"--mean": "grey", "--data": "digits.npz"}, "grey"),
        ({"--std": "0", "--data": "digits.npz"}, "standard deviation is 0"),
        ({"--std": "nan", "--data": "digits.npz"}, "standard deviation is nan"),
        ({"--data": "nowhere.npz"}, "there is no nowhere.npz"),
        ({"--held-out": "digits.npz"}, "--data"),
    ],
)
def test_wrong_use_is_one_sentence_and_leaves_nothing_behind(change, reason, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.save(outsider.convolutional().state_dict(), "final.pt")
    np.savez("digits.npz", images=np.zeros((4, 8, 8)), labels=np.arange(4) % 2)
    arguments = {"--out": "audit", "--network": f"{TESTS / 'outsider.py'}:convolutional", "--weights": "final.pt"}
    arguments |= {"--shape": "1,8,8"} | change
    assert main(["audit", *(word for item in arguments.items() for word in item)]) == 2
    complaint = capsys.readouterr().err
    assert reason in complaint
    assert complaint.count("\n") == 1
    assert not Path("audit").exists()


def test_what_cannot_be_is_refused_before_the_folder_is_taken(tmp_path):
    make = outsider.convolutional
    with pytest.raises(InvalidInputError, match="'steps'"):
        pal.audit(make, make().state_dict(), image_shape=(1, 8, 8), out=tmp_path / "audit", step=3)
    with pytest.raises(InvalidInputError, match="lambda"):
        pal.audit(make(), make().state_dict(), image_shape=(1, 8, 8), out=tmp_path / "audit")
    same = torch.rand(3, 1, 8, 8)
    with pytest.raises(InvalidInputError, match=r"2.*3"):
        pal.auditing.Truth(same, torch.arange(3), torch.stack([torch.zeros(1, 8, 8), same[2]]))
    assert not (tmp_path / "audit").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("minutes", value) for value in (0, -1.0, float("nan"), float("inf"), "10")],
        *[("samples", value) for value in (0, "3")],
        *[("steps", value) for value in (0, 2.5)],
        *[("total-variation", value) for value in (-1, float("nan"))],
        *[("tangents", value) for value in (3, "1", True)],
        *[("rungs", value) for value in ((), ("T",), "W")],
        ("restarts", 1),
        ("candidates", 0),
        ("control-steps", 0),
        ("controls", 1),
        ("weight-decay", "no"),
        ("seed", -1),
    ],
)
def test_a_wrong_option_is_refused_by_name_in_one_sentence(name, value, tmp_path):
    options, make = {name.replace("-", "_"): value}, outsider.convolutional
    with pytest.raises(InvalidInputError, match=f"^--{name} .*;[^;\n]*$"):
        pal.audit(make, make().state_dict(), image_shape=(1, 8, 8), out=tmp_path / "audit", **options)
    assert not (tmp_path / "audit").exists()

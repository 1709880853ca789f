"""What is audited: whatever a factory returns, wherever its code is, and however the weights were saved."""

import argparse
import random
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import palimpsest as pal
from palimpsest.auditing.agreement import ALIKE, SIMILAR, Run, agree
from palimpsest.auditing.preflight import preflight
from palimpsest.auditing.ranking import Kind, calibration, probability, rank
from palimpsest.auditing.subject import factory, subject
from palimpsest.cli.main import main
from palimpsest.errors import InvalidInputError, UnsupportedNetworkError, WeightsError
from palimpsest.scoring.metrics import pairwise_ncc

SHAPE = (1, 8, 8)
QUICK = {"candidates": 6, "steps": 60, "restarts": 2, "tangents": 1, "control_steps": 40}


def mlp():
    return pal.networks.MLP(SHAPE, hidden=(40, 40))


def trained(make=mlp, **options):
    """A network trained on a few digits, and its start."""
    data = pal.datasets.load("digits", per_class=2, seed=0)
    torch.manual_seed(0)
    fit = pal.train(make(), data.train.images - 0.5, data.train.labels, **{"steps": 500, **options})
    return fit.model, fit.initial


# --- factories -----------------------------------------------------------------------------------


def test_a_factory_that_returns_one_network_again_and_again_is_as_good_as_any(tmp_path):
    model, initial = trained()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    found = {}
    known = {"initial": initial, "image_shape": SHAPE, "rungs": ["W0"]}
    for name, make in {"fresh": mlp, "same": lambda: model}.items():
        out = tmp_path / name / "audit"
        found[name] = pal.audit(make, model.state_dict(), out=out, **known, **QUICK)
    assert found["same"].plan.method == "ntk"
    fresh, same = (pal.auditing.load(tmp_path / name / "audit") for name in ("fresh", "same"))
    assert replace(fresh, inputs=same.inputs) == same
    assert torch.equal(found["same"].ranking.images, found["fresh"].ranking.images)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_controls_of_such_a_factory_do_not_start_at_the_trained_weights():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 1))
    ours = subject(lambda: model, model.state_dict(), image_shape=SHAPE)
    assert not torch.equal(ours.fresh()[1].weight, model[1].weight)
    assert torch.equal(ours.model[1].weight, model[1].weight)


class Token(nn.Module):
    """A parameter whose initialisation only its constructor knows."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.full((64,), 0.3))
        self.head = nn.Linear(64, 1)

    def forward(self, x):
        return self.head(torch.relu(x.flatten(1) + self.token))


def test_parameters_without_a_way_to_reset_them_are_not_left_trained():
    model = Token()
    ours = subject(lambda: model, model.state_dict(), image_shape=SHAPE)
    fresh = ours.fresh().token.detach()
    assert not torch.equal(fresh, model.token)
    assert 0.1 < float(fresh.square().mean().sqrt()) < 0.9


CODE = """
import torch
import neighbour

class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        import neighbour_of_the_factory
        self.layer = torch.nn.Linear(64, 1)

    def forward(self, x):
        import neighbour_of_the_network
        return self.layer(x.flatten(1))

make = Network
"""


def test_a_file_takes_no_other_modules_name_and_finds_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    first = sys.path[0]
    (tmp_path / "random.py").write_text(CODE)
    for name in ("neighbour", "neighbour_of_the_factory", "neighbour_of_the_network"):
        (tmp_path / f"{name}.py").write_text("")
    make = factory(f"{tmp_path / 'random.py'}:make")
    ours = subject(make, make().state_dict(), image_shape=SHAPE)
    assert ours.outputs == 1
    assert sys.modules["random"] is random
    assert sys.path[0] == first


def test_two_files_of_one_name_are_two_modules(tmp_path):
    for folder, width in (("a", 3), ("b", 4)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "net.py").write_text(f"import torch\ndef make(): return torch.nn.Linear(64, {width})\n")
    makes = [factory(f"{tmp_path / folder / 'net.py'}:make") for folder in "ab"]
    assert [make().out_features for make in makes] == [3, 4]


def test_lazy_layers_take_their_shape_from_the_images():
    def lazy():
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(5), nn.ReLU(), nn.LazyLinear(1))

    model = lazy()
    model(torch.zeros(1, *SHAPE))
    ours = subject(lazy, model.state_dict(), image_shape=SHAPE)
    assert torch.equal(ours.model[1].weight, model[1].weight)
    assert ours.fresh()[1].weight.shape == (5, 64)


class Named(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.body, self.wrap = mlp(), wrap

    def forward(self, x):
        return self.wrap(self.body(x))


@pytest.mark.parametrize(
    "wrap",
    [lambda y: {"logits": y, "hidden": y}, lambda y: SimpleNamespace(loss=None, logits=y)],
    ids=["dict", "object"],
)
def test_logits_among_several_outputs_are_read(wrap, tmp_path):
    model = Named(wrap)
    ours = subject(lambda: Named(wrap), model.state_dict(), image_shape=SHAPE)
    assert torch.equal(ours.model(torch.zeros(1, *SHAPE)), model.body(torch.zeros(1, *SHAPE)))
    few = QUICK | {"steps": 5, "control_steps": 2}
    assert pal.audit(lambda: Named(wrap), model.state_dict(), image_shape=SHAPE, out=tmp_path / "a", **few).finished


def test_other_outputs_are_refused():
    with pytest.raises(UnsupportedNetworkError):
        subject(lambda: Named(lambda y: (y, y)), Named(None).state_dict(), image_shape=SHAPE)


# --- tied weights --------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.head, self.norm = nn.Linear(12, 1), nn.BatchNorm1d(12)
        self.c.weight = self.b.weight

    def forward(self, x):
        h = self.norm(torch.relu(self.a(x.flatten(1))))
        return self.head(torch.relu(self.c(torch.relu(self.b(h)))))


@pytest.mark.parametrize("knows_start", [True, False])
def test_tied_weights_are_audited_to_the_end(knows_start, tmp_path):
    model, initial = trained(Tied, steps=50)
    out, start = tmp_path / "audit", initial if knows_start else None
    found = pal.audit(Tied, model.state_dict(), initial=start, image_shape=SHAPE, out=out, **QUICK)
    assert found.finished
    assert found.positive is not None
    saved, _ = pal.storage.load_tensors(out / found.attacker.name / "control.safetensors")
    assert torch.equal(saved["final/b.weight"], saved["final/c.weight"])
    if knows_start:
        assert torch.equal(saved["initial/b.weight"], initial["b.weight"])
        assert not torch.equal(saved["final/b.weight"], model.b.weight)


def test_of_tied_weights_one_name_is_enough_and_two_must_agree():
    model = Tied()
    given = {name: t + 1 for name, t in model.state_dict().items()}
    del given["c.weight"]
    pal.weights.fit_into(model, given)
    assert torch.equal(model.c.weight, given["b.weight"])
    with pytest.raises(WeightsError):
        pal.weights.fit_into(model, given | {"c.weight": given["b.weight"] + 1})


# --- files ---------------------------------------------------------------------------------------


def checkpoint(path, **content):
    torch.save(content, path)
    return path


def test_it_is_said_which_weights_do_not_fit(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text("import torch\ndef make(): return torch.nn.Linear(8, 1)\n")
    torch.save(nn.Linear(8, 1).state_dict(), "good.pt")
    torch.save({"net": nn.Linear(7, 1).state_dict()}, "bad.pt")
    for weights, initial in (("bad.pt", "good.pt"), ("good.pt", "bad.pt")):
        arguments = ["--network", "net.py:make", "--weights", weights, "--initial", initial, "--shape", "1,8,8"]
        assert main(["audit", "--out", "audit", *arguments]) == 2
        complaint = capsys.readouterr().err
        assert "bad.pt, entry 'net'" in complaint
        assert ("the final weights" in complaint) == (weights == "bad.pt")
        assert ("the initial weights" in complaint) == (initial == "bad.pt")


def test_the_log_says_what_was_read(tmp_path):
    model, initial = trained()
    path = checkpoint(tmp_path / "final.pt", net={f"net.{n}": t.half() for n, t in model.state_dict().items()}, epoch=3)
    found = pal.audit(mlp, path, initial=initial, image_shape=SHAPE, out=tmp_path / "audit", controls=False, **QUICK)
    log = (tmp_path / "audit" / "log.txt").read_text()
    assert "final.pt, entry 'net'" in log
    assert "float16 to float32" in log
    assert found.preflight.samples is None
    assert "--samples" in found.report.read_text()


def test_the_command_takes_keys(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text("import palimpsest\ndef make(): return palimpsest.networks.MLP((1, 8, 8), (9,))\n")
    one, two = (pal.networks.MLP(SHAPE, (9,)).state_dict() for _ in range(2))
    checkpoint("final.pt", ema={"state_dict": one}, net=two)
    checkpoint("start.pt", ema=one, swa=two)
    arguments = ["--network", "net.py:make", "--weights", "final.pt", "--initial", "start.pt", "--shape", "1,8,8"]
    few = "--candidates 2 --steps 2 --restarts 2 --tangents 1 --control-steps 1 --no-controls".split()
    assert main(["audit", "--out", "audit", *arguments, *few]) == 2
    assert "net, ema.state_dict;" in capsys.readouterr().err
    keys = ["--key", "ema.state_dict", "--initial-key", "swa"]
    assert main(["audit", "--out", "audit", *arguments, *keys, *few]) != 2
    assert (tmp_path / "audit" / "report.html").exists()


def test_a_whole_training_checkpoint_is_read(tmp_path):
    model = mlp()
    optimiser = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, *SHAPE)).sum().backward()
    optimiser.step()
    args = argparse.Namespace(lr=0.1, device=torch.device("cpu"), dtype=torch.bfloat16, sizes=[1, 2], name=None)
    rest = {"optimizer": optimiser.state_dict(), "epoch": 3, "rng": torch.get_rng_state(), "loss": torch.tensor(0.1)}
    path = checkpoint(tmp_path / "last.pt", model=model.state_dict(), args=args, **rest)
    assert subject(mlp, path, image_shape=SHAPE).remarks
    assert pal.weights.load(path).keys() == model.state_dict().keys()
    loaded = torch.load(path, weights_only=False)
    assert (
        subject(mlp, loaded, image_shape=SHAPE, key="model").remarks == subject(mlp, loaded, image_shape=SHAPE).remarks
    )


def test_patches_are_not_counted_as_images():
    class Patches(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Linear(16, 30), nn.Linear(120, 1)

        def forward(self, x):
            patches = x.unfold(2, 4, 4).unfold(3, 4, 4).reshape(len(x), 4, 16)
            return self.head(torch.relu(self.embed(patches)).flatten(1))

    model, initial = trained(Patches, steps=50)
    found = preflight(subject(Patches, model.state_dict(), initial=initial, image_shape=SHAPE))
    assert found.samples is None
    assert found.bound is None
    with pytest.raises(InvalidInputError):
        pal.span(model, initial)


# --- candidates that show the same picture -------------------------------------------------------


def noise(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def alike(a, b):
    return float(pairwise_ncc(a[None], b[None]))


KIND = Kind("ntk", "everywhere", "dense", "one")


def test_poor_copies_are_shown_once_and_similar_faces_both():
    common = noise(*SHAPE, seed=0)
    faces = [common + 0.6 * noise(*SHAPE, seed=s) for s in (1, 2)]
    assert SIMILAR < alike(*faces) < ALIKE
    runs = []
    for restart in range(3):
        copies = [faces[0] + 0.9 * noise(*SHAPE, seed=10 + restart), 3 * faces[1] + 2]
        assert SIMILAR < alike(faces[0], copies[0]) < ALIKE
        runs.append(Run(torch.stack([*faces, *copies]), torch.ones(4), 0.1))
    agreed = agree(runs)
    assert len(agreed) == 2 + 3
    shown = rank(agreed, KIND)
    assert len(shown) == 2
    assert {max((0, 1), key=lambda i: alike(image, faces[i])) for image in shown.images} == {0, 1}
    p = probability(agreed, KIND, calibration().coefficients)
    assert torch.equal(shown.probability, p.sort(descending=True).values[:2])


def test_a_similar_face_that_one_restart_found_alone_is_kept_if_nothing_vouches_for_the_other():
    common = noise(*SHAPE, seed=0)
    faces = [common + 0.6 * noise(*SHAPE, seed=s) for s in (1, 2)]
    runs = [Run(face[None], torch.ones(1), 0.1) for face in faces]
    assert len(rank(agree(runs), KIND)) == 2

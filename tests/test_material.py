"""Checkpoints, the optimiser's state and federated updates as material of runs and audits, and what is refused."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch

import palimpsest as pal
from audited import QUICK, SHAPE, mlp, truth
from palimpsest.auditing import controls, reading
from palimpsest.auditing.case import Case, Clock
from palimpsest.auditing.floor import floor
from palimpsest.auditing.ladder import attackers
from palimpsest.auditing.options import Options
from palimpsest.auditing.plan import untimed_plan
from palimpsest.auditing.preflight import preflight
from palimpsest.auditing.subject import subject
from palimpsest.cli.main import main
from palimpsest.runs import estimates
from palimpsest.scoring import Outcome

NETWORK = "palimpsest.networks:MLP"
MLP = ["--network", NETWORK, "--network-args", '{"image_shape": [1, 8, 8], "hidden": [60, 60]}', "--shape", "1,8,8"]


@pytest.fixture(scope="module")
def digits():
    return pal.datasets.load("digits", per_class=2, held_out_per_class=20, seed=0)


def descended(model, images, labels, optimiser, steps):
    for _ in range(steps):
        optimiser.zero_grad()
        (model(images).squeeze(1) - labels).square().mean().backward()
        optimiser.step()
    return copy.deepcopy(model.state_dict())


@pytest.fixture(scope="module")
def training(digits, tmp_path_factory):
    """A folder of training checkpoints step-0.pt, step-20.pt, …, each with the state of SGD, and their weights."""
    torch.manual_seed(0)
    folder, model = tmp_path_factory.mktemp("training"), mlp()
    optimiser = torch.optim.SGD(model.parameters(), lr=2e-3, momentum=0.9)
    images, labels = digits.train.images - 0.5, digits.train.labels.float()
    states = [copy.deepcopy(model.state_dict())]
    states += [descended(model, images, labels, optimiser, 20) for _ in range(3)]
    for number, state in enumerate(states):
        torch.save({"step": 20 * number, "model": state, "optimizer": optimiser.state_dict()}, folder / f"{number}.pt")
    return folder, states


def planned(ours, method, **options):
    """The plan of the rung that is read by this method."""
    found, options = preflight(ours), Options(**options)
    rungs = attackers(ours, found, options, scored=False)
    return untimed_plan(next(rung for rung in rungs if rung.method == method), found, options)


# --- run folders ---------------------------------------------------------------------------------


def test_weights_that_a_training_kept_are_read_and_remembered(tmp_path, capsys, monkeypatch):
    counted = []
    monkeypatch.setattr(estimates, "check_reconstruction", lambda *_, tangents, **__: counted.append(tangents))
    out, read = str(tmp_path / "run"), ["--candidates", "6", "--steps", "10", "--splitting", "without"]
    trained = "--data digits --per-class 1 --hidden 12 --steps 30 --keep 2 --device cpu"
    assert main(["train", "--out", out, *trained.split()]) == 0
    kept = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert [path.name for path in kept] == ["step-00000010.safetensors", "step-00000020.safetensors"]
    command = ["reconstruct", out, *read, "--checkpoints", str(kept[0].parent)]
    assert main(command) == 0
    assert counted == [3]
    saved = tmp_path / "run" / "reconstruction.safetensors"
    made = saved.read_bytes()
    tensors, _ = pal.storage.load_tensors(saved)
    assert tensors["without/multipliers"].shape == (6, 3, 1)  # candidates, segments, tangent points
    assert main(command) == 0
    assert saved.read_bytes() == made
    others = [*command[:-1], str(kept[1])]
    assert main(others) == 2  # other weights on the way
    assert main([*others, "--again"]) == 0
    torch.save({name: t + 0.1 for name, t in pal.weights.load(kept[1]).items()}, tmp_path / "1.pt")
    torch.save({name: t + 0.2 for name, t in pal.weights.load(kept[1]).items()}, tmp_path / "2.pt")
    moved = [*command[:-1], str(tmp_path / "1.pt")]
    assert main([*moved, "--again"]) == 0
    (tmp_path / "2.pt").replace(tmp_path / "1.pt")
    assert main(moved) == 2  # the same name, but other weights
    capsys.readouterr()
    for wrong in (["--method", "path"], ["--method", "ntk", "--checkpoints", str(kept[0])]):
        assert main(["reconstruct", out, *read, "--again", *wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1


# --- audits --------------------------------------------------------------------------------------


def test_every_rung_is_read_and_judged(digits, training, tmp_path):
    folder, states = training
    options = {"image_shape": SHAPE, "truth": truth(digits), **QUICK | {"control_steps": 100}}
    options["initial"] = states[0]
    found = pal.audit(mlp, folder / "3.pt", checkpoints=folder, out=tmp_path / "audit", **options)
    assert {name: each.plan.method for name, each in found.readings.items()} == {
        "W": "kkt", "W0": "ntk", "C": "path", "O": "gradient"
    }  # fmt: skip
    assert [each.plan.within for each in found.readings.values()] == ["everywhere", "span", "span", "span"]
    assert (found.preflight.samples, found.readings["C"].attacker.segments) == (4, 3)
    for name in ("W0", "C", "O"):
        assert found.readings[name].verdict.outcome is Outcome.LEAKAGE
        assert found.readings[name].score.verdict.confidence == 0.99
    assert found.readings["O"].floor < 0.1
    assert found.readings["O"].negative.probability.max() < 0.5
    assert found.verdict.outcome is Outcome.LEAKAGE
    assert found.attacker.name == found.verdict.of
    stored = json.loads((tmp_path / "audit" / "audit.json").read_text())
    assert [rung["name"] for rung in stored["rungs"]] == ["W", "W0", "C", "O", "T"]
    assert [each["name"] for each in stored["readings"]] == ["W", "W0", "C", "O"]
    for each in stored["readings"]:
        ranked = found.readings[each["name"]].ranking
        assert each["estimates"]["calibrated"] == ranked.calibrated
        assert (each["estimates"]["highest"] is None) == (not ranked.calibrated)
    assert stored["rungs"][1]["outcome"] == "leakage"
    assert stored["rungs"][1]["adds"] == found.rungs[1].adds > 0
    assert stored["rungs"][4]["outcome"] is None
    assert {each["answer"] for each in stored["publication"][1:]} == {"do not publish"}
    page = found.report.read_text()
    for rung in found.rungs:
        assert (f'id="rung-{rung.attacker.name}"' in page) == (rung.attacker.name not in (found.attacker.name, "T"))
    for name, each in found.readings.items():
        saved, _ = pal.storage.load_tensors(tmp_path / "audit" / name / "ranking.safetensors")
        assert torch.equal(saved["images"], each.ranking.images)
    again = pal.audit(mlp, folder / "3.pt", checkpoints=folder, out=tmp_path / "audit", **options)
    assert again.report.read_text() == page
    with pytest.raises(pal.errors.RunFolderError):  # the same audit without a checkpoint is another one
        pal.audit(mlp, folder / "3.pt", checkpoints=states[:2], out=tmp_path / "audit", **options)


def test_a_client_is_read_out_of_its_updates(digits, tmp_path):
    torch.manual_seed(0)
    model, images, labels = mlp(), digits.train.images - 0.5, digits.train.labels.float()
    θ = copy.deepcopy(model.state_dict())
    for number in (1, 2):
        model.load_state_dict(θ)
        torch.save(θ, tmp_path / f"round-{number}-global.pt")
        client = descended(model, images, labels, torch.optim.SGD(model.parameters(), lr=0.01), 5)
        torch.save(client, tmp_path / f"round-{number}-client.pt")
        θ = {name: t + 0.01 * torch.randn_like(t) for name, t in client.items()}  # the other clients
    torch.save(θ, tmp_path / "global.pt")
    found = pal.audit(
        mlp, tmp_path / "global.pt", updates=str(tmp_path / "round-*.pt"), image_shape=SHAPE, truth=truth(digits),
        out=tmp_path / "audit", rungs=["C"], **QUICK | {"controls": False},
    )  # fmt: skip
    assert (found.plan.method, found.preflight.samples, found.attacker.segments) == ("path", 4, 2)
    assert found.verdict.outcome is Outcome.LEAKAGE
    assert list(found.readings) == ["C"]


@pytest.mark.parametrize("method", ["path", "gradient"])
def test_controls_have_the_values_or_the_length_of_the_subject(method, training):
    folder, _ = training
    ours = subject(mlp, folder / "3.pt", checkpoints=folder, image_shape=SHAPE)
    lost = controls.shuffled(ours, method, seed=0)

    def targets(found):
        changes = [{name: end[name] - start[name] for name in end} for start, end in found.segments]
        return changes if method == "path" else [found.moment]

    for T, permuted in zip(targets(ours), targets(lost), strict=True):
        for name, t in T.items():
            assert torch.allclose(t.flatten().sort().values, permuted[name].flatten().sort().values, atol=1e-6)
        assert not torch.equal(T["layers.1.weight"], permuted["layers.1.weight"])
    plan = planned(ours, method, samples=4)
    public = controls.public_images(4, SHAPE, 1, seed=0)
    control = controls.trained_control(ours, plan, public, torch.device("cpu"))
    assert controls.way(control, ours, plan) >= 0.9
    assert (method == "path") == bool(control.segments)
    assert all(torch.equal(a[name], b[name]) for (a, _), (b, _) in zip(control.segments, ours.segments, strict=False)
               for name in a)  # fmt: skip


@pytest.mark.parametrize("rounded", [False, True])
def test_a_control_is_searched_in_its_span_only_if_the_subject_is(rounded, training, tmp_path):
    states = [{name: t.half() if rounded else t for name, t in state.items()} for state in training[1]]
    ours = subject(mlp, states[-1], checkpoints=states, image_shape=SHAPE)
    case = Case(tmp_path, "", ours, Options(samples=4), None, torch.device("cpu"), Clock(math.inf))
    plan = planned(ours, "path", samples=4)
    problems = reading.PosedByRole(case, plan)
    for role in ("subject", "negative", "positive"):
        problem, space = problems.of(role)
        assert (space is None, problem.whitening == 0) == (rounded, rounded)


@pytest.mark.parametrize(
    ("optimiser", "steps"),
    [
        (lambda θ: torch.optim.SGD(θ, lr=0.01, momentum=0.8), 15),
        (lambda θ: torch.optim.Adam(θ, betas=(0.9, 0.99)), 30),
        (lambda θ: torch.optim.AdamW([{"params": [t], "lr": 1e-3} for t in θ]), 30),
    ],
    ids=["SGD", "Adam", "groups"],
)
@pytest.mark.parametrize("outputs", [1, 3])
def test_the_control_of_a_moment_is_a_sum_over_moving_weights_too(optimiser, steps, outputs):
    def make():
        return pal.networks.MLP(SHAPE, (20,), outputs)

    torch.manual_seed(0)
    model = make()
    rule = optimiser(list(model.parameters()))
    model(torch.randn(4, *SHAPE)).square().sum().backward()
    rule.step()
    ours = subject(make, {"model": model.state_dict(), "optimizer": rule.state_dict()}, image_shape=SHAPE)
    plan = planned(ours, "gradient", samples=6)
    public = controls.public_images(6, SHAPE, outputs, seed=0)
    control = controls.trained_control(ours, plan, public, torch.device("cpu"))
    assert controls.remembered_steps(ours) == steps
    assert control.moment.keys() == ours.moment.keys()
    assert 0.01 < floor(reading.posed(control, plan)[0], public.images) < 0.3  # one gradient: 0
    short = replace(plan, control_steps=5)
    assert controls.way(control, ours, short) == pytest.approx(5 / steps)


def test_settings_that_are_not_sound_leave_no_control(training):
    content = torch.load(training[0] / "3.pt", weights_only=True)
    content["optimizer"]["param_groups"][0] |= {"momentum": "much", "betas": (0.9,), "lr": None}
    ours = subject(mlp, content, image_shape=SHAPE)
    plan = planned(ours, "gradient", samples=4)
    with pytest.raises(pal.errors.InvalidInputError):
        controls.trained_control(ours, plan, controls.public_images(4, SHAPE, 1, seed=0), torch.device("cpu"))


# --- wrong use -----------------------------------------------------------------------------------


def saved(folder, **states):
    folder.mkdir()
    for name, state in states.items():
        torch.save(state, folder / f"{name.replace('_', '-')}.pt")
    return folder


def wrong_material(tmp_path, states):
    """What may be wrong: the options that say it."""
    other = pal.networks.MLP(SHAPE, hidden=(60, 50)).state_dict()
    start, middle, _, end = states
    truncated = saved(tmp_path / "truncated", s1=start, s2=middle)
    (truncated / "s2.pt").write_bytes((truncated / "s2.pt").read_bytes()[:2000])
    folders = {
        "other network": saved(tmp_path / "other", s1=start, s2=other),
        "equal": saved(tmp_path / "equal", s1=start, s2=middle, s3=middle),
        "truncated": truncated,
        "without order": saved(tmp_path / "unordered", first=start, second=middle),
        "none": tmp_path / "nothing",
        "only the end": saved(tmp_path / "end", s1=end),
    }
    updates = saved(tmp_path / "updates", round_1_global=start, round_1_client=middle)
    return {name: ["--checkpoints", str(folder)] for name, folder in folders.items()} | {
        "no optimiser": ["--rungs", "O"],
        "no checkpoints": ["--rungs", "C"],
        "both": ["--checkpoints", str(folders["equal"]), "--updates", str(updates)],
        "names of no round": ["--updates", str(folders["equal"])],
        "a round without a client": ["--updates", str(updates / "round-1-global.pt")],
    }


def test_wrong_material_is_refused_in_one_sentence(training, tmp_path, capsys):
    _, states = training
    torch.save(states[-1], tmp_path / "final.pt")
    for name, options in wrong_material(tmp_path, states).items():
        command = ["audit", "--out", str(tmp_path / "audit"), *MLP, "--weights", str(tmp_path / "final.pt"), *options]
        assert main(command) == 2, name
        assert capsys.readouterr().err.count("\n") == 1, name
        assert not (tmp_path / "audit").exists(), name


def test_checkpoints_of_other_precisions_are_converted_and_named(training, tmp_path):
    _, (start, middle, _, end) = training
    folder = saved(
        tmp_path / "mixed",
        s1=start,
        s2={name: t.double() for name, t in middle.items()},
        s3={name: t.bfloat16() for name, t in end.items()},
    )
    found = subject(mlp, end, checkpoints=folder, image_shape=SHAPE)
    assert {t.dtype for segment in found.segments for state in segment for t in state.values()} == {torch.float32}
    assert len(found.segments) == 3
    assert sum("float64" in remark for remark in found.remarks) == 1
    assert sum("bfloat16" in remark for remark in found.remarks) == 1

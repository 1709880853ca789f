"""Auditing networks that were trained by somebody else's script: verdicts, controls, resuming and refusals."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

import outsider
import palimpsest as pal
from audited import QUICK, SHAPE, fitted_mlp, mlp, trained, truth
from killing import Moment, killed, prepared, report
from palimpsest.auditing import controls, evidence, moving, plan, speed, verdict
from palimpsest.auditing.case import Case, Clock
from palimpsest.auditing.ladder import Attacker
from palimpsest.auditing.options import Options
from palimpsest.auditing.page import render_audit
from palimpsest.auditing.preflight import preflight
from palimpsest.auditing.subject import subject
from palimpsest.auditing.verdict import OUT_OF_TIME
from palimpsest.cli.main import main
from palimpsest.errors import InvalidInputError, PalimpsestError, TrainingDivergedError
from palimpsest.runs.folder import RunFolder
from palimpsest.scoring import Outcome

TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def digits() -> pal.datasets.DataSet:
    return pal.datasets.load("digits", per_class=2, held_out_per_class=20, seed=0)


# --- the verdict, end to end ---------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "tangents"), [("convolutional", 2), ("residual", 1)])
def test_networks_of_an_outside_script_that_leak_are_found_out(kind, tangents, digits, tmp_path):
    initial, final = trained(getattr(outsider, kind), digits)
    torch.save(final, tmp_path / "final.pt")
    torch.save(initial, tmp_path / "start.pt")
    found = pal.audit(
        f"{TESTS / 'outsider.py'}:{kind}",
        tmp_path / "final.pt",
        initial=tmp_path / "start.pt",
        image_shape=SHAPE,
        out=tmp_path / "audit",
        truth=truth(digits),
        rungs=("W0",),
        **QUICK | {"tangents": tangents},
    )
    assert found.verdict.outcome is Outcome.LEAKAGE
    assert found.verdict.readable
    assert found.score.verdict.outcome is Outcome.LEAKAGE
    assert found.floor < 0.5
    assert evidence.bar(found.negative) < evidence.LIKELY
    assert found.accuracy == 1
    assert [each.answer for each in found.publications[:3]] == ["not tested", "not tested", "do not publish"]
    page = found.report.read_text()
    assert found.verdict.sentence in page
    assert "Positive control" in page
    assert json.loads((tmp_path / "audit" / "audit.json").read_text())["verdict"]["outcome"] == "leakage"
    saved, _ = pal.storage.load_tensors(tmp_path / "audit" / "W0" / "ranking.safetensors")
    assert torch.equal(saved["images"], found.ranking.images)


def test_no_evidence_takes_a_control_that_is_as_hard(digits, tmp_path):
    """The same weights, their change permuted: nothing to read. What may be said of it depends on the control."""
    initial, final = trained(outsider.convolutional, digits)
    ours = subject(outsider.convolutional, final, initial=initial, image_shape=SHAPE)
    empty = controls.shuffled(ours, "ntk", seed=9).model.state_dict()

    def audited(name, **options):
        given = {"initial": initial, "image_shape": SHAPE, "out": tmp_path / name, "rungs": ["W0"]} | QUICK | options
        return pal.audit(outsider.convolutional, empty, **given)

    found = audited("as-hard")
    assert found.verdict.outcome is Outcome.UNDECIDED  # nothing says whether the method describes this training
    assert found.verdict.readable
    assert found.positive.easier is None
    assert found.positive.way >= evidence.AS_FAR
    assert found.score is None
    as_hard = evidence.Evidence(found.ranking, found.negative, found.positive, floor=0.1)
    assert verdict.judge(as_hard).outcome is Outcome.NO_EVIDENCE
    lazy = audited("lazy", control_steps=2)
    assert lazy.verdict.outcome is Outcome.UNDECIDED
    assert lazy.positive.way < evidence.AS_FAR
    assert audited("unknown-number", samples=None, candidates=8).verdict.outcome is Outcome.UNDECIDED
    assert audited("no-control", controls=False).verdict.outcome is Outcome.UNDECIDED


def test_images_that_the_network_was_not_trained_on_are_noticed(digits, tmp_path):
    initial, final = trained(outsider.convolutional, digits)
    other = pal.datasets.load("digits", per_class=10, held_out_per_class=10, seed=5)
    half = pal.auditing.Truth(other.train.images, torch.arange(20) % 2, other.held_out.images, mean=0.5)
    found = pal.audit(
        outsider.convolutional, final, initial=initial, image_shape=SHAPE, out=tmp_path / "audit", truth=half,
        rungs=("W0",), **QUICK | {"candidates": 8, "control_steps": 20, "steps": 60},
    )  # fmt: skip
    assert found.accuracy < 0.75
    assert found.verdict.outcome is Outcome.NO_VERDICT


@pytest.mark.parametrize("knows_start", [True, False])
def test_untrained_networks_are_not_called_leaking(knows_start, tmp_path):
    torch.manual_seed(0)
    first, second = (outsider.convolutional().state_dict() for _ in range(2))
    options, numbers = QUICK | {"steps": 60, "controls": False}, torch.random.get_rng_state()
    found = pal.audit(
        outsider.convolutional,
        first,
        initial=second if knows_start else None,
        image_shape=SHAPE,
        out=tmp_path / "audit",
        **options,
    )
    assert torch.equal(torch.random.get_rng_state(), numbers)  # the caller's random numbers stay what they are
    assert found.preflight.related is (False if knows_start else None)
    assert found.plan.method == "kkt"
    assert found.verdict.outcome is Outcome.UNDECIDED
    assert found.positive is None


# --- reliability ---------------------------------------------------------------------------------


def test_killed_audits_resume_to_the_same_report(tmp_path):
    arguments = prepared(tmp_path)
    reports = []
    for name, moments in (("whole", []), ("torn", [Moment("W0/plan.json"), Moment("W/runs/negative-0.checkpoint", 2)])):
        out = tmp_path / name / "audit"
        assert killed(arguments, out, moments) == len(moments)
        reports.append(report(out))
        assert not list(out.rglob("*.checkpoint"))
    assert reports[0] == reports[1]


def tiny(out, **options):
    torch.manual_seed(0)
    model = pal.networks.MLP(SHAPE, hidden=(20,))
    initial = {name: t.clone() for name, t in model.state_dict().items()}
    data = pal.datasets.load("digits", per_class=2, seed=0)
    fit = pal.train(model, data.train.images - 0.5, data.train.labels, steps=100)
    quick = {"candidates": 4, "steps": 20, "restarts": 2, "tangents": 1, "control_steps": 1, "controls": False}
    quick |= {"rungs": ("W0",)}
    return pal.audit(
        lambda: pal.networks.MLP(SHAPE, hidden=(20,)),
        fit.model.state_dict(),
        initial=initial,
        image_shape=SHAPE,
        out=out,
        **quick | options,
    )


@pytest.mark.parametrize(("method", "options"), [
    ("ntk", {"rungs": ("W0",)}),
    ("kkt-signed", {"rungs": ("W",), "weight_decay": True}),
    ("multiclass", {"rungs": ("W",)}),
])  # fmt: skip
def test_networks_with_several_outputs_are_audited_too(method, options, tmp_path):
    torch.manual_seed(0)

    def classes():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 3))

    initial = classes().state_dict()
    final = {name: t + 0.1 * torch.randn_like(t) for name, t in initial.items()}
    few = {"samples": 5, "steps": 10, "restarts": 2, "tangents": 2, "control_steps": 5}
    found = pal.audit(classes, final, initial=initial, image_shape=SHAPE, out=tmp_path / "audit", **few | options)
    assert found.plan.method == method
    assert found.plan.control_images == 5
    assert found.verdict.outcome is Outcome.UNDECIDED


def test_when_time_runs_out_there_is_a_report_and_the_same_command_goes_on(tmp_path, caplog):
    out = tmp_path / "audit"
    stopped = tiny(out, minutes=1e-3)
    assert stopped.verdict.outcome is Outcome.NO_VERDICT
    assert not stopped.finished
    assert (stopped.summary[0], stopped.summary[-1]) == (stopped.verdict.sentence, OUT_OF_TIME)
    assert OUT_OF_TIME in stopped.report.read_text()
    with caplog.at_level("INFO", "palimpsest"):
        done = tiny(out)
    assert "--out" in caplog.text
    assert done.finished
    assert OUT_OF_TIME not in done.summary
    assert tiny(out).verdict.outcome is not Outcome.NO_VERDICT
    tiny(tmp_path / "fresh" / "audit")
    assert report(out) == report(tmp_path / "fresh" / "audit")


def test_an_unfinished_audit_is_not_called_complete_and_units_are_counted_in_all_layers(tmp_path):
    found = tiny(tmp_path / "audit")
    assert found.verdict.outcome is Outcome.UNDECIDED
    page = render_audit(replace(found, finished=False), None, "audit")
    assert "complete" not in page
    assert page.index("units of all layers") < page.index("The first layer")


def test_too_few_held_out_images_leave_the_verdict_to_the_estimates(digits, tmp_path):
    found = tiny(tmp_path / "audit", truth=replace(truth(digits), held_out=None))
    assert not found.compared
    assert found.score.verdict.outcome is Outcome.NO_VERDICT
    assert "training images recovered" not in found.report.read_text()


def test_weights_that_never_moved_are_refused_before_the_folder_is_taken(tmp_path):
    weights = mlp().state_dict()
    for rungs in (None, ["W"]):
        with pytest.raises(InvalidInputError, match="--initial"):
            pal.audit(mlp, weights, initial=weights, image_shape=SHAPE, out=tmp_path / "audit", rungs=rungs)
    assert not (tmp_path / "audit").exists()


def test_a_terminal_shows_the_plan_the_classes_and_every_restart(digits, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.chdir(tmp_path)
    initial, final = trained(outsider.convolutional, digits)
    torch.save(initial, "start.pt")
    torch.save({"model": final, "ema": initial}, "final.pt")
    for name, images in {"stripes": digits.train.images[:2], "circle": digits.train.images[2:]}.items():
        Path("images", name).mkdir(parents=True)
        for i, image in enumerate(images):
            Image.fromarray((255 * image[0]).byte().numpy()).save(Path("images", name, f"{i}.png"))
    words = ["--network", f"{TESTS / 'outsider.py'}:convolutional", "--weights", "final.pt", "--initial", "start.pt"]
    words += ["--shape", "1,8,8", "--data", "images", "--mean", "0.5", "--no-controls"]
    words += ["--steps", "5", "--restarts", "3", "--tangents", "1", "--control-steps", "1", "--rungs", "W0"]
    assert main(["audit", "--out", "audit", *words]) == 0
    told = capsys.readouterr().err
    for each in ("plan: 3 restarts", "circle = 0, stripes = 1", "entry 'model'", "ema", "%"):
        assert each in told
    assert [told.count(f"{number} of 3") for number in (1, 2, 3)] == [1, 1, 1]
    assert "circle = 0" in Path("audit", "log.txt").read_text()


def test_the_speed_of_training_leaves_out_the_first_call(monkeypatch):
    clock, calls = [0.0], []

    def training(*_, steps, **__):
        clock[0] += 0.1 * steps + (0 if calls else 10.0)
        calls.append(steps)

    monkeypatch.setattr(speed, "train", training)
    monkeypatch.setattr(speed.time, "monotonic", lambda: clock[0])
    ours = fitted_mlp(steps=2)
    case = Case(Path(), "", ours, Options(), None, torch.device("cpu"), Clock(0.0))
    made = plan.untimed_plan(Attacker("W0", "ntk", ""), preflight(ours), Options())
    assert speed._training_rate(case, made) == pytest.approx(10)


def test_a_control_that_cannot_be_trained_is_tried_once(tmp_path, monkeypatch, caplog):
    def diverging(*_, **__):
        raise TrainingDivergedError(3, "lower the learning rate")

    monkeypatch.setattr(moving, "train", diverging)
    with caplog.at_level("INFO", "palimpsest"):
        found = tiny(tmp_path / "audit", controls=True)
    assert found.positive is None
    assert found.finished
    assert caplog.text.count("training the positive control") == 1
    assert caplog.text.count("there is no positive control: training became non-finite") == 1


def test_a_folder_holds_one_audit_by_one_process(tmp_path):
    out = tmp_path / "audit"
    tiny(out)
    with pytest.raises(PalimpsestError, match=r"holds another run \(with other seed\)"):
        tiny(out, seed=1)
    for command in ("reconstruct", "report"):
        assert main([command, str(out)]) == 2
    hold = "with RunFolder(sys.argv[1]).locked(): print('held', flush=True); input()"
    code = f"import sys\nfrom palimpsest.runs.folder import RunFolder\n{hold}"
    other = subprocess.Popen(
        [sys.executable, "-c", code, out], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "held\n"
    with pytest.raises(PalimpsestError, match="another run"):
        tiny(out)
    other.communicate("\n")


def test_leftovers_of_a_killed_write_are_nobodys_work(tmp_path):
    (tmp_path / ".config.json.x1y2.part").write_bytes(b"half")
    with RunFolder(tmp_path).locked(create=True):
        pass


def test_traces_tell_other_images_from_a_training_that_the_method_does_not_describe(tmp_path):
    data = pal.datasets.load("digits", per_class=8, held_out_per_class=30, seed=1)
    torch.manual_seed(0)
    network = mlp()
    initial = {name: t.clone() for name, t in network.state_dict().items()}
    optimiser = torch.optim.Adam(network.parameters(), lr=2e-3)
    x, y = data.train.images - 0.5, data.train.labels.float()
    for rows in [part for _ in range(40) for part in torch.randperm(16).split(2)]:
        optimiser.zero_grad()
        (network(x[rows]).squeeze(1) - y[rows]).square().mean().backward()
        optimiser.step()
    ours = truth(data)
    other = replace(ours, images=ours.held_out[:16], labels=ours.labels, held_out=ours.held_out[16:])
    trained = network.state_dict()
    found = {
        name: pal.audit(mlp, trained, initial=initial, image_shape=SHAPE, truth=given, out=tmp_path / name, steps=5,
                        restarts=2, tangents=1, control_steps=5, controls=False, rungs=("W0",))
        for name, given in (("ours", ours), ("other", other))
    }  # fmt: skip
    assert all(each.floor > 0.5 for each in found.values())
    assert found["ours"].trace < 0.01
    assert found["other"].trace > 0.1

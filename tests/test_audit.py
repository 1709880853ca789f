"""Auditing networks that were trained by somebody else's script: verdicts, controls, resuming and refusals."""

import inspect
import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import outsider
import palimpsest as pal
from killing import Moment, killed, prepared
from palimpsest.auditing import agreement, controls, plan, ranking, speed, verdict
from palimpsest.auditing.case import Case, Clock
from palimpsest.auditing.floor import floor
from palimpsest.auditing.options import Options
from palimpsest.auditing.page import render_audit
from palimpsest.auditing.preflight import preflight
from palimpsest.auditing.subject import factory, subject
from palimpsest.auditing.verdict import OUT_OF_TIME
from palimpsest.cli.main import main
from palimpsest.errors import InvalidInputError, PalimpsestError, TrainingDivergedError, UnsupportedNetworkError
from palimpsest.runs.folder import RunFolder
from palimpsest.scoring import Outcome
from synthetic import exact_problem

TESTS = Path(__file__).parent
SHAPE = (1, 8, 8)
QUICK = {"samples": 4, "steps": 150, "restarts": 2, "tangents": 1, "control_steps": 400}


@pytest.fixture(scope="module")
def digits() -> pal.datasets.DataSet:
    return pal.datasets.load("digits", per_class=2, held_out_per_class=20, seed=0)


def trained(make, data, **options):
    """(initial, final) weights of an outsider's network."""
    torch.manual_seed(0)
    model = make()
    initial = {name: t.clone() for name, t in model.state_dict().items()}
    outsider.train(model, data.train.images - 0.5, data.train.labels.float(), **options)
    return initial, model.state_dict()


def truth(data) -> pal.auditing.Truth:
    labels = (data.train.labels > 0).long()
    return pal.auditing.Truth(data.train.images, labels, data.held_out.images, mean=torch.full(SHAPE, 0.5))


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
        **QUICK | {"tangents": tangents},
    )
    assert found.verdict.outcome is Outcome.LEAKAGE
    assert found.verdict.readable
    assert found.score.verdict.outcome is Outcome.LEAKAGE
    assert found.floor < 0.5
    assert found.negative.probability.max() < verdict.LIKELY
    assert found.accuracy == 1
    assert found.summary == [found.verdict.sentence]
    page = found.report.read_text()
    assert found.verdict.sentence in page
    assert "Positive control" in page
    assert json.loads((tmp_path / "audit" / "audit.json").read_text())["verdict"]["outcome"] == "leakage"
    saved, _ = pal.storage.load_tensors(tmp_path / "audit" / "ranking.safetensors")
    assert torch.equal(saved["images"], found.ranking.images)


def test_no_evidence_takes_a_control_that_is_as_hard(digits, tmp_path):
    """The same weights, their change permuted: nothing to read. What may be said of it depends on the control."""
    initial, final = trained(outsider.convolutional, digits)
    ours = subject(outsider.convolutional, final, initial=initial, image_shape=SHAPE)
    empty = controls.shuffled(ours, "ntk", seed=9).state_dict()

    def audited(name, **options):
        given = {"initial": initial, "image_shape": SHAPE, "out": tmp_path / name} | QUICK | options
        return pal.audit(outsider.convolutional, empty, **given)

    found = audited("as-hard")
    assert found.verdict.outcome is Outcome.UNDECIDED  # nothing says whether the method describes this training
    assert found.verdict.readable
    assert found.positive.easier is None
    assert found.positive.way >= verdict.AS_FAR
    assert found.score is None
    as_hard = verdict.Evidence(found.ranking, found.negative, found.positive, floor=0.1)
    assert verdict.judge(as_hard).outcome is Outcome.NO_EVIDENCE
    lazy = audited("lazy", control_steps=2)
    assert lazy.verdict.outcome is Outcome.UNDECIDED
    assert lazy.positive.way < verdict.AS_FAR
    assert audited("unknown-number", samples=None, candidates=8).verdict.outcome is Outcome.UNDECIDED
    assert audited("no-control", controls=False).verdict.outcome is Outcome.UNDECIDED


def test_images_that_the_network_was_not_trained_on_are_noticed(digits, tmp_path):
    initial, final = trained(outsider.convolutional, digits)
    other = pal.datasets.load("digits", per_class=10, held_out_per_class=10, seed=5)
    half = pal.auditing.Truth(other.train.images, torch.arange(20) % 2, other.held_out.images, mean=0.5)
    found = pal.audit(
        outsider.convolutional, final, initial=initial, image_shape=SHAPE, out=tmp_path / "audit", truth=half,
        **QUICK | {"candidates": 8, "control_steps": 20, "steps": 60},
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
    for name, moments in (("whole", []), ("torn", [Moment("plan.json"), Moment("runs/negative-0.checkpoint", 2)])):
        out = tmp_path / name / "audit"
        assert killed(arguments, out, moments) == len(moments)
        reports.append((out / "report.html").read_bytes())
        assert not list(out.rglob("*.checkpoint"))
    assert reports[0] == reports[1]


def tiny(out, **options):
    torch.manual_seed(0)
    model = pal.networks.MLP(SHAPE, hidden=(20,))
    initial = {name: t.clone() for name, t in model.state_dict().items()}
    data = pal.datasets.load("digits", per_class=2, seed=0)
    fit = pal.train(model, data.train.images - 0.5, data.train.labels, steps=100)
    quick = {"candidates": 4, "steps": 20, "restarts": 2, "tangents": 1, "control_steps": 1, "controls": False}
    return pal.audit(
        lambda: pal.networks.MLP(SHAPE, hidden=(20,)),
        fit.model.state_dict(),
        initial=initial,
        image_shape=SHAPE,
        out=out,
        **quick | options,
    )


@pytest.mark.parametrize("method", [None, "kkt-signed", "multiclass"])
def test_networks_with_several_outputs_are_audited_too(method, tmp_path):
    torch.manual_seed(0)

    def classes():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 3))

    initial = classes().state_dict()
    final = {name: t + 0.1 * torch.randn_like(t) for name, t in initial.items()}
    few = {"samples": 5, "steps": 10, "restarts": 2, "tangents": 2, "control_steps": 5}
    found = pal.audit(classes, final, initial=initial, image_shape=SHAPE, out=tmp_path / "audit", method=method, **few)
    assert found.plan.method == (method or "ntk")
    assert found.plan.control_images == 5
    assert found.verdict.outcome is Outcome.UNDECIDED


def test_when_time_runs_out_there_is_a_report_and_the_same_command_goes_on(tmp_path, caplog):
    out = tmp_path / "audit"
    stopped = tiny(out, minutes=1e-3)
    assert stopped.verdict.outcome is Outcome.NO_VERDICT
    assert not stopped.finished
    assert stopped.summary == [stopped.verdict.sentence, OUT_OF_TIME]
    assert OUT_OF_TIME in stopped.report.read_text()
    with caplog.at_level("INFO", "palimpsest"):
        done = tiny(out)
    assert "--out" in caplog.text
    assert done.finished
    assert OUT_OF_TIME not in done.summary
    assert tiny(out).verdict.outcome is not Outcome.NO_VERDICT
    assert tiny(out).report.read_bytes() == tiny(tmp_path / "fresh" / "audit").report.read_bytes()


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
    for method in (None, "kkt"):
        with pytest.raises(InvalidInputError, match="--initial"):
            pal.audit(mlp, weights, initial=weights, image_shape=SHAPE, out=tmp_path / "audit", method=method)
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
    words += ["--steps", "5", "--restarts", "3", "--tangents", "1", "--control-steps", "1"]
    assert main(["audit", "--out", "audit", *words]) == 0
    told = capsys.readouterr().err
    for each in ("plan: 3 restarts", "circle = 0, stripes = 1", "entry 'model'", "ema", "%"):
        assert each in told
    assert [told.count(f"{number} of 3") for number in (1, 2, 3)] == [1, 1, 1]
    assert "circle = 0" in Path("audit", "log.txt").read_text()


def test_the_speed_of_training_leaves_out_the_first_call(monkeypatch):
    clock, calls = [0.0], []

    def training(*_, steps, **__):
        clock[0] += 0.1 * steps + (0 if calls else 100.0)
        calls.append(steps)

    monkeypatch.setattr(speed, "train", training)
    monkeypatch.setattr(speed.time, "monotonic", lambda: clock[0])
    ours = fitted_mlp(steps=2)
    case = Case(Path(), "", ours, Options(), None, torch.device("cpu"), Clock(0.0))
    assert speed._training_rate(case, plan.untimed_plan(preflight(ours), Options())) == pytest.approx(10)


def test_a_control_that_cannot_be_trained_is_tried_once(tmp_path, monkeypatch, caplog):
    def diverging(*_, **__):
        raise TrainingDivergedError(3, "lower the learning rate")

    monkeypatch.setattr(controls, "train", diverging)
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


# --- the pieces ----------------------------------------------------------------------------------


def mlp():
    return pal.networks.MLP(SHAPE, hidden=(60, 60))


def fitted_mlp(**options):
    data = pal.datasets.load("digits", per_class=4, seed=1)
    torch.manual_seed(0)
    model = mlp()
    fit = pal.train(model, data.train.images - 0.5, data.train.labels, **options)
    return subject(mlp, fit.model.state_dict(), initial=fit.initial, image_shape=SHAPE)


def test_the_preflight_counts_images_and_tells_the_start():
    found = preflight(fitted_mlp())
    assert found.related
    assert found.samples == 8
    assert found.bound <= 8
    assert found.method == "ntk"
    assert 0 < found.moved < 1


def test_a_start_that_is_not_ones_own_is_noticed():
    ours = fitted_mlp(steps=20)
    torch.manual_seed(99)
    stranger = replace(ours, initial=mlp().state_dict())
    assert preflight(stranger).related is False
    assert preflight(stranger).method == "kkt"
    same = replace(ours, initial=ours.model.state_dict())
    assert preflight(same).why.startswith("the weights never moved")


def test_an_untrained_first_layer_has_nothing_beyond_its_noise():
    torch.manual_seed(0)
    plain = subject(mlp, mlp().state_dict(), image_shape=SHAPE)
    assert preflight(plain).beyond_noise == 0
    assert preflight(plain).bound == 0


def test_methods_follow_outputs_and_weight_decay():
    def classes():
        return pal.networks.MLP(SHAPE, hidden=(20,), outputs=3)

    several = subject(classes, classes().state_dict(), image_shape=SHAPE)
    assert preflight(several).method == "multiclass"
    assert preflight(several, weight_decay=True).method == "kkt-signed"
    assert preflight(several, method="kkt-signed").why == "chosen by the user"


@pytest.mark.parametrize("seconds", [30.0, 180.0, 3600.0])
@pytest.mark.parametrize("rate", [5.0, 60.0, 2000.0])
def test_plans_fit_into_the_time_there_is(seconds, rate):
    found = preflight(fitted_mlp(steps=20))
    made = plan.timed_plan(plan.untimed_plan(found, Options()), Options(), plan.Budget(seconds, rate, 100.0))
    spent = len(made.runs(controls=True)) * made.steps * len(made.at) / rate + made.control_steps / 100.0
    assert spent <= seconds or made.steps == plan.FEWEST_STEPS
    assert [role for role, _ in made.runs(controls=True)][:4] == ["subject", "subject", "negative", "negative"]


@pytest.mark.parametrize(
    ("samples", "bound", "candidates"), [(None, 5, 80), (None, 60, 120), (None, None, 80), (3, 5, 10)]
)
def test_a_bound_alone_does_not_lower_the_number_of_candidates(samples, bound, candidates):
    found = replace(preflight(fitted_mlp(steps=20)), bound=bound)
    assert plan.untimed_plan(found, Options(samples=samples)).candidates == candidates


def test_options_replace_what_would_be_chosen():
    found = preflight(fitted_mlp(steps=20))
    options = Options(candidates=7, steps=33, restarts=5, tangents=2, total_variation=0.0, control_steps=9)
    made = plan.timed_plan(plan.untimed_plan(found, options), options, plan.Budget(1.0, 1.0, 1.0))
    assert (made.candidates, made.steps, made.restarts, len(made.at), made.total_variation) == (7, 33, 5, 2, 0.0)
    assert made.control_steps == 9


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
    ranked = ranking.rank(found)
    assert (ranked.probability.diff() <= 0).all()
    assert {tuple(image.flatten().tolist()) for image in ranked.images[:2]} == {
        tuple(f.flatten().tolist()) for f in faces
    }


def test_candidates_that_contribute_nothing_do_not_count():
    same = noise(4, *SHAPE, seed=0)
    runs = [agreement.Run(same, torch.full((4,), 1e-9), 1.0) for _ in range(2)]
    nothing = ranking.rank(agreement.agree(runs))
    assert len(nothing) == 0
    assert verdict.judge(verdict.Evidence(nothing, nothing)).outcome is Outcome.UNDECIDED


def test_what_explains_nothing_is_not_likely_however_far_restarts_agree():
    """Every restart may fall into the same blob; that is no training image."""
    blob = noise(1, *SHAPE, seed=0)
    runs = [agreement.Run(blob, torch.full((1,), 1e-3), 1.0) for _ in range(3)]
    found = ranking.rank(agreement.agree(runs))
    assert len(found) == 1
    assert found.probability[0] < verdict.LIKELY


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
    made = plan.untimed_plan(preflight(ours), Options())
    fit = controls.trained_control(ours, made, public, torch.device("cpu"))
    way = controls.distance(fit.model, fit.initial) / controls.distance(ours.model, ours.initial)
    assert verdict.AS_FAR <= way <= 2


def test_shuffling_keeps_values_and_loses_places():
    ours = fitted_mlp(steps=20)
    lost = dict(controls.shuffled(ours, "ntk", seed=0).named_parameters())
    for name, θ in ours.model.named_parameters():
        learnt, disorder = θ - ours.initial[name], lost[name] - ours.initial[name]
        assert torch.allclose(learnt.flatten().sort().values, disorder.flatten().sort().values, atol=1e-6)
    assert not torch.equal(ours.model.layers[0].weight, controls.shuffled(ours, "kkt", seed=0).layers[0].weight)


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


# --- refusals ------------------------------------------------------------------------------------


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
        (lambda wide: None, "without arguments"),
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
        ({"--method": "ntk"}, "needs the weights before training"),
        ({"--method": "multiclass"}, "one output per class"),
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
        ("method", "foo"),
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

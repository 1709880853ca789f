"""The ladder of attackers: which rungs are read, what each adds, the headline of all, and the shared time."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import palimpsest as pal
from audited import QUICK, SHAPE, fitted_mlp, mlp
from palimpsest.auditing.audit import share_of_time
from palimpsest.auditing.ladder import NO_TIME, NOT_CHOSEN, Attacker, attackers
from palimpsest.auditing.options import Options
from palimpsest.auditing.plan import MARGIN, untimed_plan
from palimpsest.auditing.preflight import preflight
from palimpsest.auditing.reading import AuditEffort
from palimpsest.auditing.reasons import Reason
from palimpsest.auditing.result import Audit, Reading, Rung, decisive
from palimpsest.auditing.verdict import OUT_OF_TIME, judge
from palimpsest.scoring import Outcome, score
from palimpsest.scoring import judge as compared
from test_audit_verdict import BLIND, READ

LEAKAGE, NO_EVIDENCE, UNDECIDED, NO_VERDICT = Outcome
METHODS = {"W": "kkt", "W0": "ntk", "C": "path", "O": "gradient"}
MADE = torch.randn(6, *SHAPE, generator=torch.Generator().manual_seed(0))


def reading(name, outcome=LEAKAGE, *, found=None, likely=0, images=None, recovered=None):
    """A reading of a rung. ``images`` are its likely candidates, ``recovered`` the training images that it shows."""
    attacker = Attacker(name, METHODS[name], "")
    verdict = replace(judge(BLIND), outcome=outcome, likely=likely, of=name)
    verdict = replace(verdict, found=outcome is LEAKAGE if found is None else found)
    plan = untimed_plan(attacker, preflight(OURS), Options(samples=4))
    scored, ranking = None, BLIND.ranking
    if images is not None:
        p = torch.full((len(images),), 0.9)
        ranking = replace(READ, images=images, probability=p, agreement=p)
    if recovered is not None:
        held_out = torch.randn(40, *SHAPE, generator=torch.Generator().manual_seed(1))
        scored = score(MADE[recovered], MADE, held_out=held_out)
    evidence = vars(replace(BLIND, ranking=ranking, comparison=None if scored is None else scored.verdict))
    return Reading(
        **evidence,
        attacker=attacker,
        verdict=verdict,
        plan=plan,
        candidates=MADE,
        score=scored,
        effort=AuditEffort(2, 1.0, 4, 1.0, ()),
    )


OURS = fitted_mlp(steps=5)


@pytest.mark.parametrize(
    ("outcomes", "of"),
    [
        ({"W": LEAKAGE, "O": LEAKAGE}, "W"),
        ({"W0": NO_EVIDENCE, "O": LEAKAGE}, "O"),
        ({"W0": NO_VERDICT, "O": UNDECIDED}, "O"),
        ({"W0": UNDECIDED, "O": NO_VERDICT}, "W0"),
        ({"W0": NO_EVIDENCE, "O": NO_VERDICT}, "O"),
        ({"W0": NO_EVIDENCE, "O": NO_EVIDENCE}, "W0"),
        ({"W": UNDECIDED, "W0": NO_EVIDENCE}, "W0"),  # the stronger attacker finds nothing either
        ({"W": NO_VERDICT, "W0": NO_EVIDENCE, "C": NO_EVIDENCE}, "C"),
        ({"W": NO_EVIDENCE, "W0": NO_VERDICT}, "W0"),
        ({"W": LEAKAGE, "W0": NO_EVIDENCE}, "W"),
        ({"W": NO_EVIDENCE, "W0": LEAKAGE, "C": UNDECIDED}, "W0"),
    ],
)
def test_the_headline_is_the_greatest_worry(outcomes, of):
    assert decisive([reading(name, outcome) for name, outcome in outcomes.items()]).attacker.name == of


def test_a_trace_on_a_lower_rung_is_not_overruled():
    assert decisive([reading("W", UNDECIDED, found=True), reading("W0", NO_EVIDENCE)]).attacker.name == "W"


@pytest.mark.parametrize(("outcome", "of"), [(NO_VERDICT, "W0"), (UNDECIDED, "W0"), (LEAKAGE, "W")])
def test_of_equal_verdicts_the_reason_is_that_of_the_rung_that_knows_most(outcome, of):
    equal = [reading(name, outcome, found=True) for name in ("W", "W0")]
    assert decisive([*equal, reading("O", outcome, found=True)]).attacker.name == of


def test_of_several_leaks_the_one_that_exposes_most_is_the_headline():
    few, many = reading("W0", recovered=[0, 1]), reading("C", recovered=[0, 1, 2, 3])
    assert decisive([few, many]).attacker.name == "C"
    assert decisive([few, reading("C", recovered=[2, 3])]).attacker.name == "W0"


def test_a_rung_adds_the_images_that_no_lower_one_exposes():
    first, second = reading("W0", recovered=[0, 1]), reading("O", recovered=[1, 2, 3])
    assert (first.exposes, second.exposes) == (2, 3)
    assert second.beyond([first]) == 2
    assert second.beyond([reading("W", UNDECIDED), reading("W0", NO_EVIDENCE)]) == 3
    assert first.beyond([]) is None  # nothing to compare with
    assert reading("W0", UNDECIDED, likely=3).beyond([first]) is None
    assert reading("W0", NO_EVIDENCE).beyond([reading("W", UNDECIDED)]) == 0


def test_without_training_images_likely_candidates_are_counted():
    first = reading("W0", likely=2, images=MADE[:3])
    second = reading("O", likely=3, images=torch.stack([2 * MADE[1], MADE[2], MADE[4]]))
    assert second.beyond([first]) == 2  # the third image of the lower rung is not likely


def folded(*readings, reasons=()):
    rungs = [Rung(each.attacker, each, "", each.exposes, each.beyond(list(readings[:i])))
             for i, each in enumerate(readings)]  # fmt: skip
    rungs += [Rung(Attacker(name, "kkt", ""), None, reason) for name, reason in reasons]
    rungs.sort(key=lambda rung: list(METHODS).index(rung.attacker.name))
    return Audit.of(tuple(rungs), preflight(OURS), Path("report.html"))


def test_every_set_of_files_that_leaks_is_named():
    found = folded(reading("W", NO_EVIDENCE), reading("W0", recovered=[0, 1]), reading("O", recovered=[1]))
    assert [rung.adds for rung in found.rungs] == [None, 2, 0]
    assert {each.rungs: (each.answer, each.exposes) for each in found.publications} == {
        ("W",): ("no evidence, not a clearance", 0),
        ("W", "O"): ("do not publish", 1),  # it gives the image away on its own, too
        ("W", "W0"): ("do not publish", 2),
        ("W", "W0", "C"): ("do not publish", 2),
        ("W", "W0", "C", "O"): ("do not publish", 2),
    }
    assert found.finished


def test_a_rung_without_time_leaves_the_audit_unfinished():
    found = folded(reading("W0", recovered=[0]), reasons=[("W", NO_TIME)])
    assert not found.finished
    assert found.advice.endswith(OUT_OF_TIME)
    assert folded(reading("W0", recovered=[0]), reasons=[("W", NOT_CHOSEN)]).finished


def test_nothing_found_is_no_verdict_if_a_rung_could_not_be_read():
    nothing = reading("W0", NO_EVIDENCE)
    failed = Rung(Attacker("C", "path", ""), None, "the loss diverged", failed=True)
    ladder = (Rung(nothing.attacker, nothing, ""), failed)
    assert Audit.of(ladder, preflight(OURS), Path("report.html")).verdict.outcome is NO_VERDICT
    assert folded(nothing).verdict.outcome is NO_EVIDENCE
    assert folded(nothing, reasons=[("W", NO_TIME)]).verdict.outcome is NO_EVIDENCE  # W0 knows all that W does
    assert folded(nothing, reasons=[("C", NO_TIME)]).verdict.reason is Reason.OUT_OF_TIME
    weakest = Rung(Attacker("W", "kkt", ""), None, "the loss diverged", failed=True)
    assert Audit.of((weakest, ladder[0]), preflight(OURS), Path("report.html")).verdict.outcome is NO_EVIDENCE
    assert folded(reading("W0", recovered=[0]), reasons=[("C", "x")]).verdict.outcome is LEAKAGE


def test_more_looks_do_not_turn_a_suspicion_into_nothing():
    members, others = torch.linspace(0.5, 0.74, 10), torch.linspace(0.1, 0.75, 10)
    for looks in (1, 4):
        comparison = compared(members, others, looks=looks)
        assert comparison.outcome is not LEAKAGE
        verdict = judge(replace(BLIND, comparison=comparison, looks=looks))
        assert verdict.found


# --- which rungs can be read ---------------------------------------------------------------------


def rungs(ours, **options):
    return {each.name: each for each in attackers(ours, preflight(ours), Options(**options), scored=True)}


def test_rungs_without_material_say_so():
    bare = rungs(replace(OURS, initial=None))
    assert [name for name, each in bare.items() if each.method is not None] == ["W"]
    for name, option in (("W0", "--initial"), ("C", "--checkpoints"), ("O", "weights")):
        assert option in bare[name].why
    torch.manual_seed(7)
    assert rungs(replace(OURS, initial=mlp().state_dict()))["W0"].method is None  # of another training
    start, end = OURS.initial, OURS.model.state_dict()
    assert rungs(replace(OURS, segments=((start, end),)))["C"].method is None  # nothing between them
    assert rungs(replace(OURS, initial=None, segments=((start, end),)))["C"].method == "path"  # one round
    assert rungs(replace(OURS, remarks=("the optimiser's state is not read: it is odd",)))["O"].why.endswith("odd")


def adam_trained(steps, rate, hidden):
    data = pal.datasets.load("digits", per_class=10, seed=0)
    torch.manual_seed(0)
    model = pal.networks.MLP(SHAPE, hidden=hidden)
    start = {name: t.clone() for name, t in model.state_dict().items()}
    rule, labels = torch.optim.Adam(model.parameters(), lr=rate), data.train.labels.float()
    for _ in range(steps):
        rule.zero_grad()
        (model(data.centred(data.train.images)).squeeze(1) - labels).square().mean().backward()
        rule.step()
    return model, start


@pytest.mark.parametrize(("steps", "rate", "hidden"), [(3, 1e-4, (200,)), (20, 1e-3, (1000, 1000))])
def test_the_false_gap_of_adam_is_not_a_span(steps, rate, hidden):
    model, start = adam_trained(steps, rate, hidden)
    shown = pal.span(model, start)
    assert shown.samples > 40  # of 20 images: the layer shows no more directions
    ours = replace(OURS, model=model, initial=start)
    assert preflight(ours).samples is None
    assert rungs(ours)["W0"].directions is None


def test_a_span_of_more_directions_than_images_is_not_searched():
    assert rungs(fitted_mlp(), samples=8)["W0"].directions == 8
    assert rungs(fitted_mlp(), samples=7)["W0"].directions is None


def test_the_first_checkpoint_is_no_given_start():
    ours = fitted_mlp(steps=20)
    chain = replace(ours, segments=((ours.initial, ours.model.state_dict()),), start_given=False)
    found = rungs(chain)
    assert (found["W0"].method, found["C"].method) == (None, "path")
    assert rungs(replace(chain, start_given=True))["C"].method is None  # W0 reads the same


# --- the shared time -----------------------------------------------------------------------------


def test_the_strongest_rung_is_read_first_and_the_rest_when_there_is_time(tmp_path):
    ours = fitted_mlp(steps=20)
    options = {"steps": 5, "restarts": 2, "tangents": 1, "control_steps": 1, "controls": False}
    options |= {"initial": ours.initial, "image_shape": SHAPE, "out": tmp_path / "audit"}
    stopped = pal.audit(mlp, ours.model.state_dict(), minutes=1e-3, **options)
    assert list(stopped.readings) == ["W0"]
    assert stopped.rungs[0].reason == NO_TIME
    done = pal.audit(mlp, ours.model.state_dict(), **options)
    assert list(done.readings) == ["W", "W0"]
    assert done.rungs[0].reason == ""


def test_a_rung_that_was_read_keeps_the_time_that_its_plan_left():
    first, last = Attacker("W0", "ntk", ""), Attacker("W", "kkt", "")
    share = share_of_time(first, read={}, ahead=[first, last])
    assert share == pytest.approx(0.75)
    left = 1 - MARGIN * share
    assert left * share_of_time(last, read={"W0": None}, ahead=[last]) == pytest.approx(0.25)
    assert share_of_time(last, read={}, ahead=[last]) == 1  # the first could not be read


def test_rungs_that_are_not_chosen_are_listed(tmp_path):
    ours = fitted_mlp(steps=20)
    options = QUICK | {"steps": 5, "controls": False, "rungs": ["W"]}
    given = {"initial": ours.initial, "image_shape": SHAPE, "out": tmp_path / "audit"}
    found = pal.audit(mlp, ours.model.state_dict(), **given, **options)
    assert {rung.attacker.name: rung.reason == NOT_CHOSEN for rung in found.rungs} == {
        "W": False, "W0": True, "C": False, "O": False, "T": False
    }  # fmt: skip
    assert (found.plan.method, found.attacker.knows) == ("kkt", "the final weights")
    assert sorted(path.name for path in (tmp_path / "audit").iterdir() if path.is_dir()) == ["W"]

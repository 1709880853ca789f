"""May these files be published? The answers that follow from the rungs of the ladder."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import palimpsest as pal
from audited import SHAPE, mlp
from palimpsest.auditing.ladder import NO_TIME, Attacker
from palimpsest.auditing.preflight import preflight
from palimpsest.auditing.publication import SETS, Answer, publications
from palimpsest.auditing.result import Audit, Rung
from palimpsest.auditing.verdict import LONGER
from palimpsest.scoring import judge as compared
from test_ladder import LEAKAGE, MADE, NO_EVIDENCE, NO_VERDICT, OURS, UNDECIDED, reading

NO, UNSURE, UNTESTED, NOTHING = Answer
NAMES = ("W", "W0", "C", "O")


def rungs(failed=(), **readings):
    """A ladder with these readings; the other rungs were not given, or failed."""
    for name in NAMES:
        if name in readings:
            yield Rung(readings[name].attacker, readings[name], "", readings[name].exposes)
        else:
            yield Rung(Attacker(name, None, ""), None, f"{name} is missing", failed=name in failed)


def answers(found):
    return [each.answer for each in found]


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [  # of W; W and O; W and W0; W, W0 and C; all
        ({"W": LEAKAGE}, [NO, NO, NO, NO, NO]),  # everybody who has more can do the same
        ({"W": NO_EVIDENCE, "W0": LEAKAGE}, [NOTHING, UNTESTED, NO, NO, NO]),
        ({"W": NO_EVIDENCE, "W0": NO_EVIDENCE, "C": LEAKAGE}, [NOTHING, UNTESTED, NOTHING, NO, NO]),
        ({"W": NO_EVIDENCE, "O": LEAKAGE}, [NOTHING, NO, UNTESTED, UNTESTED, NO]),
        ({"W": NO_VERDICT, "W0": NO_EVIDENCE}, [UNSURE, UNTESTED, NOTHING, UNTESTED, UNTESTED]),
        ({"W": LEAKAGE, "W0": NO_EVIDENCE, "C": NO_EVIDENCE, "O": NO_EVIDENCE}, [NO, NO, NO, NO, NO]),
        ({"W0": NO_EVIDENCE, "O": UNDECIDED}, [UNTESTED, UNTESTED, NOTHING, UNTESTED, UNTESTED]),
        ({"W": NO_EVIDENCE, "W0": NO_EVIDENCE, "C": NO_EVIDENCE, "O": NO_VERDICT},
         [NOTHING, UNSURE, NOTHING, NOTHING, UNSURE]),
        (dict.fromkeys(NAMES, NO_EVIDENCE), [NOTHING] * 5),
        ({"C": NO_EVIDENCE}, [UNTESTED, UNTESTED, UNTESTED, NOTHING, UNTESTED]),
    ],
)  # fmt: skip
def test_the_answer_is_the_greatest_worry_of_the_attackers_who_can_act(outcomes, expected):
    found = publications(list(rungs(**{name: reading(name, outcome) for name, outcome in outcomes.items()})))
    assert answers(found) == expected
    assert [each.rungs for each in found] == list(SETS.values())
    for each in found:
        assert bool(each.reason) == (each.answer is not NOTHING)
        assert (each.exposes == 0) if each.answer is NOTHING else each.answer is NO or each.exposes is None


def test_more_files_never_get_a_better_answer():
    """Sets of files that contain each other, over all outcomes of all rungs."""
    worry = [NOTHING, UNTESTED, UNSURE, NO]
    made = {(name, outcome): reading(name, outcome) for name in NAMES for outcome in (LEAKAGE, NO_EVIDENCE)}
    for bits in range(3**4):
        chosen = {name: (LEAKAGE, NO_EVIDENCE, None)[bits // 3**i % 3] for i, name in enumerate(NAMES)}
        found = publications(list(rungs(**{n: made[n, outcome] for n, outcome in chosen.items() if outcome})))
        leaks = {each.rungs: worry.index(each.answer) == 3 for each in found}
        assert all(leaks[b] >= leaks[a] for a in leaks for b in leaks if set(a) <= set(b))


def test_images_of_several_attackers_are_counted_once():
    found = publications(list(rungs(W0=reading("W0", recovered=[0, 1]), O=reading("O", recovered=[1, 2, 3]))))
    assert [each.exposes for each in found] == [None, 3, 2, 2, 4]
    likely = {"W0": reading("W0", likely=2, images=MADE[:2]), "C": reading("C", likely=2, images=MADE[1:3])}
    assert [each.exposes for each in publications(list(rungs(**likely)))] == [None, None, 2, 3, 3]


def test_a_trace_of_the_whole_set_exposes_no_single_image_but_is_not_published():
    members, others = torch.linspace(0.2, 0.8, 40), torch.cat([torch.linspace(0.1, 0.6, 39), torch.tensor([0.9])])
    whole = replace(reading("W", recovered=[0]), comparison=compared(members, others))
    assert whole.as_a_whole
    first, *_ = publications(list(rungs(W=whole, W0=reading("W0", recovered=[0, 1]))))
    assert (first.answer, first.exposes, "as a whole" in first.reason) == (NO, 0, True)
    both = publications(list(rungs(W=whole, W0=reading("W0", recovered=[1, 2]))))[2]
    assert both.exposes == 2  # matches that chance can explain are not counted


def test_nothing_found_is_no_answer_if_something_is_missing():
    nothing = reading("W", NO_EVIDENCE)
    assert answers(publications(list(rungs(W=replace(nothing, finished=False)))))[0] is UNSURE
    assert answers(publications(list(rungs(W=nothing, failed=["W0"]))))[:3] == [NOTHING, UNTESTED, UNSURE]
    assert answers(publications(list(rungs(C=reading("C", NO_EVIDENCE), failed=["W0"]))))[2:4] == [UNSURE, NOTHING]
    late = [Rung(Attacker("W", "kkt", ""), None, NO_TIME), *list(rungs(W0=reading("W0", NO_EVIDENCE)))[1:]]
    assert answers(publications(late))[:3] == [UNTESTED, UNTESTED, NOTHING]
    suspicion = reading("W", UNDECIDED, found=True)
    assert answers(publications(list(rungs(W=suspicion)))) == [UNSURE, *[UNTESTED] * 4]
    assert publications(late)[1].reason == "O is missing"  # more time would not help


def test_leakage_on_one_rung_keeps_the_advice_for_the_others():
    undecided = reading("W", NO_VERDICT)
    undecided = replace(undecided, verdict=replace(undecided.verdict, advice=f"Hold out more images. {LONGER}"))
    leak = reading("W0", recovered=[0])
    audit = Audit.of(tuple(rungs(W=undecided, W0=leak)), preflight(OURS), Path("report.html"))
    assert "Hold out more images" in audit.advice
    stopped = Audit.of(
        tuple(rungs(W=undecided, W0=replace(leak, finished=False))), preflight(OURS), Path("report.html")
    )
    assert "Hold out more images" in stopped.advice
    assert LONGER not in stopped.advice  # to continue, and to start again, cannot both be right


def test_a_reading_that_finds_less_does_not_contradict_the_one_before_it(tmp_path, monkeypatch):
    """W leaks and W0, which knows more, reads nothing: publishing both is no better, and the ladder says so."""
    outcomes = {"W": LEAKAGE, "W0": NO_EVIDENCE}

    module = sys.modules["palimpsest.auditing.audit"]
    monkeypatch.setattr(module, "attempt", lambda case, attacker, found: attacker.name)
    monkeypatch.setattr(module, "read_further", lambda attempts, *, complete: None)
    monkeypatch.setattr(module, "judged", lambda name, **_: reading(name, outcomes[name], likely=1))
    found = pal.audit(mlp, OURS.model.state_dict(), initial=OURS.initial, image_shape=SHAPE, out=tmp_path / "audit")
    assert [rung.despite for rung in found.rungs] == ["", "W", "", "", ""]
    assert "W leaks already" in found.report.read_text()
    assert set(answers(found.publications)) == {NO}


def test_wrong_files_make_nothing_found_undecided_and_leave_a_leak():
    doubts = ("the files may be swapped",)
    found = publications(list(rungs(W=reading("W", NO_EVIDENCE), W0=reading("W0", recovered=[0]))), doubts)
    assert answers(found)[:3] == [UNSURE, UNTESTED, NO]
    assert doubts[0] in found[0].reason
    audit = Audit.of(tuple(rungs(W=reading("W", NO_EVIDENCE))), preflight(OURS), Path("report.html"), doubts)
    assert audit.verdict.outcome is NO_VERDICT
    assert any(doubts[0] in line for line in audit.summary)

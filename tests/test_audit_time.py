"""The time of an audit: plans, further restarts, and the limit, on a machine whose clock the tests turn."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import palimpsest as pal
from audited import SHAPE, fitted_mlp, mlp
from killing import report
from palimpsest.auditing import attack, controls, further, plan, reading, speed
from palimpsest.auditing.case import Case, Clock, OutOfTimeError
from palimpsest.auditing.ladder import NO_TIME
from palimpsest.auditing.options import Options
from palimpsest.auditing.reasons import Reason
from palimpsest.errors import DivergenceError, InvalidInputError

OURS = fitted_mlp(steps=20)
MINUTES = 3.0


class Machine:
    """Takes ``1 / rate(now)`` seconds for a step. Nothing else takes time, except measuring its speed."""

    def __init__(self, rate):
        self.now, self.rate, self.steps = 0.0, rate, []

    def reconstruct(self, problem, *, candidates, steps, record_every, callbacks, **_):
        x = torch.randn(candidates, *SHAPE, generator=torch.Generator().manual_seed(len(self.steps)))
        state = SimpleNamespace(images=x, x=x, multipliers=None, labels=None)
        self.steps.append(steps)
        for callback in callbacks:
            callback.on_start(state)
        for _ in range(0, steps, record_every):
            self.now += record_every / self.rate(self.now)
            for callback in callbacks:
                callback.on_record(state, {})
        return state

    def measured(self, *_):
        self.now += 2.0
        return self.rate(self.now)


def contents(problem, x, multipliers, labels):
    return {"images": x, "contributions": torch.full((len(x),), 0.01)}, {"loss": 0.5}


@pytest.fixture
def machine(monkeypatch):
    """Puts a machine of a given speed under all audits of a test."""

    def start(rate) -> Machine:
        made = Machine(rate if callable(rate) else lambda now: rate)
        monkeypatch.setattr(Clock, "now", lambda *_: made.now)
        monkeypatch.setattr(reading, "reconstruct", made.reconstruct)
        monkeypatch.setattr(reading, "candidates", contents)
        monkeypatch.setattr(speed, "_reconstruction_rate", made.measured)
        return made

    return start


def audited(out, *, minutes=MINUTES, **options):
    # Fewer images than the span has directions: the search is everywhere, where states are images.
    few = {"samples": 7, "tangents": 1, "controls": False, "initial": OURS.initial} | options
    return pal.audit(mlp, OURS.model.state_dict(), image_shape=SHAPE, out=out, minutes=minutes, **few)


def later(when, before, after):
    return lambda now: before if now < when else after


@pytest.mark.parametrize("rungs", [("W0",), ("W", "W0")])
@pytest.mark.parametrize(
    "rate",
    [30.0, 100.0, later(60, 50.0, 35.0), later(20, 30.0, 70.0), lambda now: 40 + 20 * (now // 7 % 2)],
    ids=["slow", "fast", "slowing down", "speeding up", "uneven"],
)
def test_an_audit_uses_its_time_and_keeps_it(rate, rungs, machine, tmp_path):
    world = machine(rate)
    found = audited(tmp_path / "audit", rungs=rungs)
    assert found.finished
    assert sorted(found.readings) == sorted(rungs)
    assert 0.85 * 60 * MINUTES <= world.now <= 60 * MINUTES


@pytest.mark.parametrize("slower", [2, 10, 100])
def test_a_machine_that_stalls_does_not_break_the_limit(slower, machine, tmp_path):
    world = machine(later(20, 60.0, 60.0 / slower))
    audited(tmp_path / "audit")
    assert world.now <= 1.1 * 60 * MINUTES


def test_an_audit_that_more_effort_would_not_help_ends_early(machine, tmp_path, caplog):
    world = machine(1e5)
    with caplog.at_level("INFO", "palimpsest"):
        found = audited(tmp_path / "audit", rungs=["W0"])
    assert (found.plan.steps, found.plan.restarts) == (plan.MOST_STEPS, further.MOST)
    assert found.finished
    assert world.now < 0.5 * 60 * MINUTES
    assert f"{further.MOST} times" in caplog.text


def test_restarts_leave_the_time_to_judge_them(machine, tmp_path, monkeypatch):
    world, agree = machine(200.0), attack.agree

    def slowly(runs):
        world.now += 5.0 * len(runs)
        return agree(runs)

    monkeypatch.setattr(attack, "agree", slowly)
    found = audited(tmp_path / "audit", rungs=["W0"])
    assert found.plan.restarts > 2
    assert 0.85 * 60 * MINUTES <= world.now <= 1.1 * 60 * MINUTES


def test_one_restart_that_diverged_leaves_no_verdict(machine, tmp_path, monkeypatch):
    world = machine(1e5)

    def diverging(*arguments, **options):
        if len(world.steps) == 1:
            world.steps.append(0)
            raise DivergenceError(0, "the scale")
        return world.reconstruct(*arguments, **options)

    monkeypatch.setattr(reading, "reconstruct", diverging)
    found = audited(tmp_path / "audit", rungs=["W0"], restarts=2)
    assert found.effort.restarts == 1
    assert found.verdict.reason is Reason.TOO_FEW_READINGS
    assert "--seed" in found.advice


def test_given_restarts_are_not_added_to(machine, tmp_path):
    world = machine(1e5)
    assert audited(tmp_path / "audit", rungs=["W0"], restarts=2).plan.restarts == 2
    assert len(world.steps) == 4
    assert not (tmp_path / "audit" / "W0" / "restarts.json").exists()


def test_a_repeated_audit_has_the_same_restarts_and_report(machine, tmp_path):
    world, out = machine(60.0), tmp_path / "audit"
    first = audited(out)
    before, done = report(out), len(world.steps)
    again = audited(out, minutes=60)
    assert len(world.steps) == done
    assert report(out) == before
    assert again.plan == first.plan


def test_a_further_restart_is_written_down_before_it_begins(machine, tmp_path, monkeypatch):
    world, out = machine(60.0), tmp_path / "audit"
    planned = 4  # of the only rung: two of the network, and two of the negative control

    def torn(*arguments, **options):
        if len(world.steps) == planned:
            raise KeyboardInterrupt
        return world.reconstruct(*arguments, **options)

    monkeypatch.setattr(reading, "reconstruct", torn)
    with pytest.raises(KeyboardInterrupt):
        audited(out, rungs=["W0"])
    written = json.loads((out / "W0" / "restarts.json").read_text())["steps"]
    assert len(written) == 1
    monkeypatch.setattr(reading, "reconstruct", world.reconstruct)
    assert audited(out, rungs=["W0"]).plan.restarts > 2
    assert json.loads((out / "W0" / "restarts.json").read_text())["steps"][:1] == written
    assert world.steps[planned] == written[0]


def test_a_further_restart_without_time_is_taken_back(machine, tmp_path):
    world, out = machine(60.0), tmp_path / "audit"
    world.rate = lambda now: 3.0 if now > 150 else 60.0
    found = audited(out, rungs=["W0"])
    assert found.finished  # no verdict needs it
    kept = json.loads((out / "W0" / "restarts.json").read_text())["steps"]
    assert len(world.steps) - 4 == len(kept) + 1
    assert found.plan.restarts == found.effort.restarts == 2 + len(kept)
    assert world.now <= 1.1 * 60 * MINUTES


def test_a_rung_without_useful_time_waits_for_a_proper_plan(machine, tmp_path):
    world, out = machine(later(100, 30.0, 4.0)), tmp_path / "audit"
    first = audited(out)
    assert list(first.readings) == ["W0"]
    assert first.rungs[0].reason == NO_TIME
    assert not first.finished
    assert not (out / "W" / "plan.json").exists()
    world.rate = lambda now: 30.0
    done = audited(out, minutes=10)
    assert done.finished
    assert done.readings["W"].plan.steps > plan.FEWEST_STEPS
    assert done.readings["W0"].plan.steps == first.plan.steps


def test_a_time_that_is_too_short_for_every_rung_is_refused(machine, tmp_path):
    machine(1.0)
    with pytest.raises(InvalidInputError, match=r"--minutes \d") as refused:
        audited(tmp_path / "audit", minutes=1)
    enough = float(str(refused.value).split()[-1])
    assert audited(tmp_path / "audit", minutes=enough).readings


def test_a_busy_moment_does_not_refuse_an_audit(machine, tmp_path):
    machine(later(3, 0.1, 60.0))  # the first measurement ends before that, the second one after
    assert audited(tmp_path / "audit", rungs=["W0"]).finished


def test_the_clock_stops_a_run_whose_next_record_would_be_late(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(Clock, "now", lambda *_: now[0])
    clock = Clock(100.0)
    clock.on_start(None)
    now[0] = 40.0
    clock.on_record(None, {})
    now[0] = 80.0  # the next one is expected at 120
    with pytest.raises(OutOfTimeError):
        clock.on_record(None, {})


def test_the_clock_stops_the_training_of_a_control(tmp_path):
    case = Case(tmp_path, "", OURS, Options(samples=7), None, torch.device("cpu"), Clock(-math.inf))
    made = plan.Plan("ntk", "everywhere", (0.5,), 14, 100, 2, 0.1, 7, 400, 0)
    with pytest.raises(OutOfTimeError):
        controls.positive_control(case, made)
    assert not (tmp_path / "control.safetensors").exists()


def test_the_first_steps_of_a_slow_network_serve_as_its_speed(monkeypatch):
    now = [0.0]

    def training(*_, steps, **__):
        now[0] += 20.0 * steps

    monkeypatch.setattr(speed, "train", training)
    monkeypatch.setattr(speed.time, "monotonic", lambda: now[0])
    case = Case(Path(), "", OURS, Options(), None, torch.device("cpu"), Clock(0.0))
    made = plan.Plan("ntk", "everywhere", (0.5,), 14, 100, 2, 0.1, 7, 400, 0)
    assert speed._training_rate(case, made) == pytest.approx(1 / 20)
    assert now[0] == 20.0 * speed.WARM_UP_STEPS


def test_the_cost_of_a_plan_counts_everything():
    made = plan.Plan("ntk", "everywhere", (0.15, 0.85), 80, 100, 3, 0.1, 40, 50, 0)
    budget = plan.Budget(0.0, rate=10.0, training_rate=5.0, preparation=2.0, floor=30.0)
    assert budget.cost(made, controls=True) == 50 / 5 + 4 * 2 + (7 * 100 + 30) * 2 / 10
    assert budget.cost(made, controls=False) == 3 * 2 + (5 * 100 + 30) * 2 / 10

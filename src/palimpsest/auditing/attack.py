"""One rung of the ladder: all stages from the plan to the verdict."""

from dataclasses import asdict, dataclass, replace

from palimpsest.auditing.agreement import Run, agree, contributing
from palimpsest.auditing.case import Case, TooShortError
from palimpsest.auditing.controls import control_images, positive_control, way
from palimpsest.auditing.evidence import LIKELY, Evidence, PositiveControl, bar, believed
from palimpsest.auditing.floor import Floor, floor
from palimpsest.auditing.ladder import Attacker, was_live
from palimpsest.auditing.on_workers import read_on_workers
from palimpsest.auditing.plan import Budget, Plan, timed_plan, untimed_plan
from palimpsest.auditing.preflight import Preflight
from palimpsest.auditing.ranking import Ranking, kind, rank
from palimpsest.auditing.reading import AuditEffort, PosedByRole, read_all
from palimpsest.auditing.result import Reading
from palimpsest.auditing.shown import shows
from palimpsest.auditing.speed import measured_budget
from palimpsest.auditing.stages import cached_json
from palimpsest.auditing.verdict import LONGER, judge
from palimpsest.files.storage import digest
from palimpsest.runs.journal import note
from palimpsest.scoring import score

NEEDED = ("subject", "negative")  # roles of which every verdict needs two readings


@dataclass
class Attempt:
    """A rung whose plan was followed, before its verdict. Further restarts may join its runs."""

    case: Case  # its owner stands for the plan, too
    attacker: Attacker
    plan: Plan
    tested: Floor | None  # the method on the given images
    live: bool  # whether batch normalisation was live, and the method does not describe that
    runs: dict[str, list[Run]]
    finished: bool  # whether there was time for the whole plan


def attempt(case: Case, attacker: Attacker, found: Preflight) -> Attempt:
    """Read the weights with this attacker's knowledge, as planned."""
    plan = _plan(case, attacker, found)
    case = replace(case, owner=digest(case.owner, asdict(plan)))  # the later files belong to this plan
    problems = PosedByRole(case, plan)
    tested = _floor(case, problems)
    read_on_workers(case, plan, plan.runs(controls=case.options.controls))
    live = was_live(found, case.options) and not plan.live
    return Attempt(case, attacker, plan, tested, live, *read_all(case, plan, problems))


def judged(tried: Attempt, *, looks: int, trace: float | None = None) -> Reading:
    """The verdict on a rung. ``looks`` is the number of rungs that may claim leakage, ``trace`` that of `Evidence`."""
    case, plan, runs = tried.case, tried.plan, tried.runs
    of, candidates = kind(case.subject, plan), contributing(runs["subject"])
    scored = case.truth.score(candidates, looks=looks) if case.truth is not None and len(candidates) else None
    negative = rank(agree(runs["negative"]), of) if min(len(runs[role]) for role in NEEDED) > 1 else None
    positive = _positive(case, plan, runs["positive"], negative, looks=looks)
    evidence = Evidence(
        ranking=believed(rank(agree(runs["subject"]), of), negative, positive),
        negative=negative,
        positive=positive,
        comparison=None if scored is None else scored.verdict,
        floor=None if tried.tested is None else tried.tested.floor,
        trace=trace,
        accuracy=None if case.truth is None else case.truth.accuracy(case.subject.model),
        majority=0.0 if case.truth is None else case.truth.majority(case.subject.outputs),
        method=plan.method,
        rule=plan.rule,
        samples=case.options.samples,
        controls=case.options.controls,
        finished=tried.finished,
        looks=looks,
        live=tried.live,
        rule_known=case.options.optimiser is not None or case.subject.rule is not None,
    )
    verdict = replace(judge(evidence), of=tried.attacker.name)
    if case.options.steps is not None:  # then more time alone changes nothing
        verdict = replace(verdict, advice=verdict.advice.replace(LONGER, LONGER.replace("--minutes", "--steps")))
    return Reading(
        **vars(evidence),
        attacker=tried.attacker,
        verdict=verdict,
        plan=plan,
        candidates=candidates,
        score=scored,
        effort=AuditEffort.of(runs),
    )


def _plan(case: Case, attacker: Attacker, found: Preflight) -> Plan:
    path = case.folder / "plan.json"
    if path.exists():
        note("following the plan in this folder; for a better result, give another --out and more --minutes")
    plan = cached_json(path, case.owner, Plan, lambda: _new_plan(case, attacker, found))
    nodes = f", tangent at {', '.join(map(str, plan.at))}" if plan.at else ""
    within = ", in the span of the images" if plan.within == "span" else ""
    note(f"plan: {plan.restarts} restarts of {plan.candidates} candidates, {plan.steps} steps each{nodes}{within}")
    return plan


def _new_plan(case: Case, attacker: Attacker, found: Preflight) -> Plan:
    if case.options.samples is None:
        note("the number of training images is unknown; give it by --samples if you know it")
    plan = untimed_plan(attacker, found, case.options)
    if case.options.complete:
        return timed_plan(plan, case.options, Budget(1.0, 1.0, 1.0))  # any, because all is chosen
    note("measuring the speed of this machine")
    costs = []
    for _ in range(2):  # a busy moment may pass
        budget = measured_budget(case, plan)
        timed = timed_plan(plan, case.options, budget)
        costs.append(budget.cost(timed, controls=case.options.controls))
        if case.options.steps is not None or costs[-1] <= case.clock.seconds_left:
            return timed
    raise TooShortError(min(costs))  # not even the fewest steps fit


def _floor(case: Case, problems: PosedByRole) -> Floor | None:
    if (truth := case.truth) is None:
        return None

    def compute() -> Floor:
        note("testing the method on the given images")
        found = floor(problems.of("subject")[0], truth.seen, truth.labels_for(case.subject.outputs).to(case.device))
        return Floor(found)

    return cached_json(case.folder / "floor.json", case.owner, Floor, compute)


def _positive(
    case: Case, plan: Plan, runs: list[Run], negative: Ranking | None, *, looks: int
) -> PositiveControl | None:
    """The positive control, ranked like the subject and compared with its public images."""
    if len(runs) < 2 or not len(agreed := agree(runs)):
        return None
    control, public = positive_control(case, plan), control_images(case, plan)
    ranking = rank(agreed, kind(case.subject, plan))
    likely = ranking.images[(ranking.probability >= LIKELY) & (ranking.probability > bar(negative))]
    return PositiveControl(
        ranking=ranking,
        comparison=score(contributing(runs), public.images, held_out=public.held_out, looks=looks).verdict,
        images=plan.control_images,
        samples=case.options.samples,
        way=way(control, case.subject, plan),
        likely=len(likely),
        real=int(shows(likely, public.images, public.held_out, within=plan.within).sum()),
        live=plan.live,
    )

"""`pal.audit`: from a network and its weights to a verdict and a report, in stages that are each done once.

config.json              the identity of the audit; a folder refuses another one             identity.py
preflight.json           the facts that are known before the reconstruction                  preflight.py
plan.json                every choice                                                        plan.py, speed.py
floor.json               whether the method describes the training, if its images are given  floor.py
optimiser/               the same files, for the optimiser's state alone
runs/ROLE-N.safetensors  the reconstructions of the subject and of both controls             reading.py
control.safetensors      the weights of the positive control                                 controls.py
ranking.safetensors      the candidates, the likeliest first                                 agreement.py, ranking.py
audit.json               the verdict and its numbers, for programs                           verdict.py, record.py
images.csv               an answer for each training image, if they are given                images.py
report.html              the verdict and the evidence behind it                              page.py
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from palimpsest.auditing import record
from palimpsest.auditing.agreement import Run, agree, contributing
from palimpsest.auditing.case import Case, Clock
from palimpsest.auditing.controls import control_images, positive_control, way
from palimpsest.auditing.floor import Floor, floor
from palimpsest.auditing.identity import claim
from palimpsest.auditing.options import Method, Minutes, Options, Restarts, Strength
from palimpsest.auditing.page import render_audit
from palimpsest.auditing.plan import Budget, Plan, timed_plan, untimed_plan
from palimpsest.auditing.preflight import Preflight, check_method, check_start, images_of_moment, preflight
from palimpsest.auditing.ranking import rank
from palimpsest.auditing.reading import posed, read_all
from palimpsest.auditing.speed import measured_budget
from palimpsest.auditing.stages import cached_json
from palimpsest.auditing.subject import Factory, subject
from palimpsest.auditing.truth import Truth
from palimpsest.auditing.verdict import Audit, Evidence, PositiveControl, combined, judge
from palimpsest.files.schema import Positive, check_options
from palimpsest.files.series import InMemory, Sources
from palimpsest.files.storage import digest, save_tensors, write_atomically
from palimpsest.runs.folder import RunFolder
from palimpsest.runs.journal import note
from palimpsest.scoring import score
from palimpsest.solver.reconstruction import refusing_unknown_keywords

RESERVE = 12.0  # seconds kept for ranking, scoring and the report
MOST_CLASSES = 20  # that the log names


@refusing_unknown_keywords
@torch.random.fork_rng(devices=[])  # does not change the caller's random numbers
def audit(
    network: str | Factory,
    weights: Path | str | Mapping[str, Tensor],
    *,
    image_shape: Sequence[int],
    out: Path | str,
    network_args: Mapping[str, Any] | None = None,
    initial: Path | str | Mapping[str, Tensor] | None = None,
    truth: Truth | None = None,
    checkpoints: Sources | InMemory | None = None,
    updates: Sources | None = None,
    key: str | None = None,
    initial_key: str | None = None,
    device: torch.device | str = "cpu",
    minutes: Minutes = 10.0,
    method: Method | None = None,
    weight_decay: bool = False,
    samples: Positive | None = None,
    candidates: Positive | None = None,
    steps: Positive | None = None,
    restarts: Restarts | None = None,
    tangents: Literal[1, 2] | None = None,
    control_steps: Positive | None = None,
    total_variation: Strength | None = None,
    controls: bool = True,
    seed: int = 0,
) -> Audit:
    """Audit a network that was trained anywhere: can its training images be read out of its weights?

    The audit writes ``audit.json`` and ``report.html`` into the run folder, and ``images.csv`` if the training images
    are given. After an interruption, the same call continues. The audit chooses every option that is None.

    Args:
        network: a function that makes the network, or its place: ``"package.module:function"`` or
            ``"path/to/file.py:function"``. It is called several times. ``lambda: model`` also works.
        weights: the trained weights, a state dict or a file that holds one. If it is a training checkpoint with the
            state of Adam, or of SGD with momentum, the audit also reads that state.
        image_shape: channels, height and width of the network's input.
        out: the run folder. If it holds this audit unfinished, the audit continues there.
        network_args: keyword arguments of that function, for example ``{"num_classes": 10}``.
        initial: the weights before training, if known. Far more can be read with them.
        truth: the training images, if you have them. Only the scores and the floor use them.
        checkpoints: weights on the way, if known: files, folders or patterns, or state dicts in order.
        updates: rounds of federated learning, to audit one client: files, folders or patterns with names such as
            round-03-global.pt and round-03-client.pt. The audit then reads the client's changes.
        key: the entry of the file that holds the weights, for example ``"ema.state_dict"``. Entries with usual names,
            and single entries, are found without it.
        initial_key: the same for the file of the initial weights.
        device: where to compute.
        minutes: the time limit in minutes, kept to within a tenth.
        method: ``"ntk"`` needs the initial weights, ``"path"`` checkpoints or updates, ``"gradient"`` the optimiser's
            state, ``"kkt"`` (one output) and ``"multiclass"`` long training, and ``"kkt-signed"`` weight decay. None
            chooses the best that the material allows, and reads the optimiser's state too.
        weight_decay: whether training used weight decay.
        samples: the number of training images, if known. The audit can often count them.
        candidates: the number of candidates per restart. None is twice the number of training images, and at least 80
            if that number is unknown.
        steps: the number of gradient steps per restart.
        restarts: the number of independent restarts, at least two.
        tangents: the number of tangent points of NTK, or of each segment of Path. Two recover more, at twice the cost.
        control_steps: the maximum number of training steps for the positive control.
        total_variation: the strength of the smoothness prior on images. 0 turns it off.
        controls: whether to run the positive control. The negative control always runs.
        seed: the seed of the candidates and the controls.

    Returns:
        The verdict, the candidates in order of probability, and everything behind them.

    Examples:
        >>> import palimpsest as pal, tempfile
        >>> _ = torch.manual_seed(0)
        >>> def make():
        ...     return pal.networks.MLP((1, 8, 8), hidden=(20,))
        >>> data = pal.datasets.load("digits", per_class=2, seed=0)
        >>> fit = pal.train(make(), data.train.images - 0.5, data.train.labels, steps=50)
        >>> found = pal.audit(make, fit.model.state_dict(), initial=fit.initial, image_shape=(1, 8, 8),
        ...                   out=tempfile.mkdtemp() + "/audit", steps=5, restarts=2, tangents=1, controls=False)
        >>> found.preflight.samples, found.report.name
        (4, 'report.html')
    """
    began, given = time.monotonic(), locals()
    options = check_options(Options(**{field.name: given[field.name] for field in fields(Options)}))
    examined = subject(
        network, weights, network_args=network_args, initial=initial, image_shape=image_shape, key=key,
        initial_key=initial_key, checkpoints=checkpoints, updates=updates,
    )  # fmt: skip
    check_start(examined)
    check_method(examined, method)
    with RunFolder(out).locked(create=True) as folder:
        claim(folder, examined, network, options, truth)
        if truth is not None and samples is None:
            options = replace(options, samples=len(truth.images))
        clock = Clock(began + 60 * minutes - RESERVE)
        case = Case(folder.path, folder.owner, examined, options, truth, torch.device(device), clock)
        found = _preflight(case)
        case = replace(case, options=replace(options, samples=options.samples or found.samples))
        result = _both(case, found) if method is None and examined.moment is not None else _reading(case, found)
        _save(case, result)
        return result


def _both(case: Case, found: Preflight) -> Audit:
    """Read the weights, and then the optimiser's state alone. Each may claim leakage, so each counts as one look."""
    result = _reading(replace(case, share=0.5), found, looks=2)
    folder = case.folder / "optimiser"
    folder.mkdir(exist_ok=True)
    note("reading the optimiser's state")
    options = replace(case.options, samples=images_of_moment(case.subject) or case.options.samples)
    inner = replace(case, folder=folder, owner=digest(case.owner, "optimiser"), options=options)
    gradient = replace(found, method="gradient", why="the optimiser's state is known", segments=1)
    other = _reading(inner, gradient, looks=2)
    return replace(result, optimiser=other, verdict=combined(result.verdict, other.verdict))


def _reading(case: Case, found: Preflight, *, looks: int = 1) -> Audit:
    """All stages from the plan to the verdict, by one method."""
    plan = _plan(case, found)
    case = replace(case, owner=digest(case.owner, asdict(plan)))  # the later files belong to this plan
    unexplained = _floor(case, plan)
    runs, finished = read_all(case, plan)
    ranking, candidates = rank(agree(runs["subject"])), contributing(runs["subject"])
    scored = case.truth.score(candidates, looks=looks) if case.truth is not None and len(candidates) else None
    evidence = Evidence(
        ranking=ranking,
        negative=rank(agree(runs["negative"])) if len(runs["negative"]) > 1 else None,
        positive=_positive(case, plan, runs["positive"]),
        comparison=None if scored is None else scored.verdict,
        floor=unexplained,
        accuracy=None if case.truth is None else case.truth.accuracy(case.subject.model),
        majority=0.0 if case.truth is None else case.truth.majority(case.subject.outputs),
        method=plan.method,
        samples=case.options.samples,
        controls=case.options.controls,
        finished=finished,
    )
    return Audit(
        **vars(evidence),
        verdict=judge(evidence),
        preflight=found,
        plan=plan,
        candidates=candidates,
        score=scored,
        report=case.folder / "report.html",
    )


def _preflight(case: Case) -> Preflight:
    note("examining the weights")

    def compute() -> Preflight:
        return preflight(case.subject, method=case.options.method, weight_decay=case.options.weight_decay)

    found = cached_json(case.folder / "preflight.json", case.owner, Preflight, compute)
    note(f"method {found.method}: {found.why}")
    if case.truth is not None:
        if case.truth.classes:
            named = [f"{name} = {number}" for number, name in enumerate(case.truth.classes)]
            note(f"classes: {', '.join(named[:MOST_CLASSES])}{', …' if len(named) > MOST_CLASSES else ''}")
        note(f"the network classifies {case.truth.accuracy(case.subject.model):.0%} of the given images correctly")
    return found


def _plan(case: Case, found: Preflight) -> Plan:
    path = case.folder / "plan.json"
    if path.exists():
        note("following the plan in this folder; for a better result, give another --out and more --minutes")
    plan = cached_json(path, case.owner, Plan, lambda: _new_plan(case, found))
    nodes = f", tangent at {', '.join(map(str, plan.at))}" if plan.at else ""
    note(f"plan: {plan.restarts} restarts of {plan.candidates} candidates, {plan.steps} steps each{nodes}")
    return plan


def _new_plan(case: Case, found: Preflight) -> Plan:
    if case.options.samples is None:
        note("the number of training images is unknown; give it by --samples if you know it")
    plan = untimed_plan(found, case.options)
    if case.options.complete:
        return timed_plan(plan, case.options, Budget(1.0, 1.0, 1.0))  # any, because all is chosen
    note("measuring the speed of this machine")
    return timed_plan(plan, case.options, measured_budget(case, plan))


def _floor(case: Case, plan: Plan) -> float | None:
    if (truth := case.truth) is None:
        return None

    def compute() -> Floor:
        note("testing the method on the given images")
        problem = posed(case.subject, plan)[0].to(case.device)
        return Floor(floor(problem, truth.seen, truth.labels_for(case.subject.outputs).to(case.device)))

    return cached_json(case.folder / "floor.json", case.owner, Floor, compute).floor


def _positive(case: Case, plan: Plan, runs: list[Run]) -> PositiveControl | None:
    """The positive control, ranked like the subject and compared with its public images."""
    if len(runs) < 2 or not len(agreed := agree(runs)):
        return None
    control, public = positive_control(case, plan), control_images(case, plan)
    return PositiveControl(
        ranking=rank(agreed),
        comparison=score(contributing(runs), public.images, held_out=public.held_out).verdict,
        images=plan.control_images,
        samples=case.options.samples,
        way=way(control, case.subject, plan),
    )


def _save(case: Case, result: Audit) -> None:
    for folder, read in ((case.folder, result), (case.folder / "optimiser", result.optimiser)):
        if read is not None:
            tensors = {name: getattr(read.ranking, name) for name in ("images", "probability", "agreement")}
            save_tensors(folder / "ranking.safetensors", tensors, {"what": "candidates, the likeliest first"})
    record.save(case, result)
    write_atomically(result.report, render_audit(result, case.truth, case.folder.name).encode())

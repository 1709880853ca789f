"""`pal.audit`: from a network and its weights to a verdict and a report, in stages that are each done once.

config.json              the identity of the audit; a folder refuses another one             identity.py
preflight.json           the facts that are known before the reconstruction                  preflight.py
membership.safetensors   traces of the given images in the weights, and of held-out ones     members.py
W/, W0/, C/, O/          a folder for each rung of the ladder of attackers                   ladder.py, attack.py
  plan.json              every choice                                                        plan.py, speed.py
  restarts.json          further restarts, in the time that the plans left                   further.py
  floor.json             whether the method describes the training, if its images are given  floor.py
  runs/ROLE-N.…          the reconstructions of the subject and of both controls             reading.py
  control.safetensors    the weights of the positive control                                 controls.py
  ranking.safetensors    the candidates, the likeliest first                                 agreement.py, ranking.py
audit.json               the verdict and its numbers, for programs                           result.py, record.py
images.csv               an answer for each training image, if they are given                images.py
report.html              the verdict and the evidence behind it                              page.py

Workers of an executor may do the reconstructions, several at a time (on_workers.py).
"""

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import Executor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from palimpsest.auditing import record
from palimpsest.auditing.attack import Attempt, attempt, judged
from palimpsest.auditing.case import Case, Clock, TooShortError
from palimpsest.auditing.checksums import checksums
from palimpsest.auditing.doubts import doubts
from palimpsest.auditing.further import read_further
from palimpsest.auditing.identity import claim
from palimpsest.auditing.ladder import (
    EFFORT,
    NO_TIME,
    NOT_CHOSEN,
    ORDER,
    Attacker,
    attackers,
    check_normalisation,
    check_rungs,
    was_live,
)
from palimpsest.auditing.members import known, members
from palimpsest.auditing.options import LEAST_RESERVE, RESERVE, Minutes, Options, Restarts, RungName, Strength
from palimpsest.auditing.page import WITHOUT_PICTURES, render_audit
from palimpsest.auditing.plan import MARGIN
from palimpsest.auditing.preflight import Preflight, check_start, preflight
from palimpsest.auditing.result import Audit, Reading, Rung
from palimpsest.auditing.stages import cached_json
from palimpsest.auditing.subject import Factory, subject
from palimpsest.auditing.truth import Truth
from palimpsest.errors import DivergenceError, InvalidInputError
from palimpsest.files.schema import Positive, check_options
from palimpsest.files.series import InMemory, Sources
from palimpsest.files.storage import digest, file_digest, save_tensors, write_atomically
from palimpsest.runs.folder import RunFolder
from palimpsest.runs.journal import note
from palimpsest.runs.problems import Rule
from palimpsest.scoring import Outcome
from palimpsest.solver.reconstruction import refusing_unknown_keywords

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
    rungs: tuple[RungName, ...] | None = None,
    optimiser: Rule | None = None,
    batch_norm: Literal["live", "fixed"] | None = None,
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
    redact: bool = False,
    executor: Executor | None = None,
) -> Audit:
    """Audit a network that was trained anywhere: can its training images be read out of its weights?

    The audit writes ``audit.json`` and ``report.html`` into the run folder, and ``images.csv`` if the training images
    are given. After an interruption, the same call continues. The audit chooses every option that is None.

    Args:
        network: a function that makes the network, or its place: ``"package.module:function"`` or
            ``"path/to/file.py:function"``. It is called several times. ``lambda: model`` also works.
        weights: the final weights, a state dict or a file that holds one. If it is a training checkpoint with the
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
        device: where to compute. ``"auto"`` is CUDA if there is one: here, and on each worker of an executor.
        minutes: the time limit in minutes, used and kept to within a tenth.
        rungs: the attackers to try: ``"W"`` knows the final weights, ``"W0"`` also the initial ones, ``"C"`` also
            checkpoints or updates, ``"O"`` also the optimiser's state. None tries all for which there is material.
        optimiser: the optimiser of the training, ``"adam"`` (also AdamW) or ``"sgd"``. It changes how ``"W0"`` and
            ``"C"`` read the change of the weights. None takes that of the optimiser's state, or ``"sgd"``.
        batch_norm: batch normalisation in training, ``"live"`` (by the statistics of each batch) or ``"fixed"``. None
            is live if the running statistics changed since the start of training.
        weight_decay: whether training used weight decay. It changes how ``"W"`` reads the final weights.
        samples: the number of training images, if known. The audit can often count them.
        candidates: the number of candidates per restart. None is twice the number of training images, and at least 80
            if that number is unknown.
        steps: the number of gradient steps per restart.
        restarts: the number of independent restarts, at least two. None is two, and up to twelve while there is time.
        tangents: the number of tangent points of NTK, or of each segment of Path. Two recover more, at twice the cost.
            After Adam, 1 and 2 stand for 3 and 5 points of NTK, and for 1 and 2 of each segment.
        control_steps: the maximum number of training steps for the positive control.
        total_variation: the strength of the smoothness prior on images. 0 turns it off.
        controls: whether to run the positive control. The negative control always runs.
        seed: the seed of the candidates and the controls.
        redact: whether to leave all pictures out of the report. The same call on a finished folder writes only the
            report again. The tensors in the folder still hold the candidates.
        executor: does the reconstructions on its workers, several at a time, with the same result: for example
            ``dask.distributed.Client("tcp://scheduler:8786").get_executor()``. None does them here.

    Returns:
        The verdict, the candidates in order of probability, and everything behind them: those of the rung with the
        greatest worry. ``rungs`` holds every rung, with its own verdict and what it adds to the lower ones.

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
    began, arguments = Clock.now(), locals()
    options = check_options(Options(**{field.name: arguments[field.name] for field in fields(Options)}))
    if not isinstance(executor, Executor | None):
        kind = type(executor).__name__
        raise InvalidInputError(
            f"the executor is a {kind}; give one of concurrent.futures, as client.get_executor() is"
        )
    checkpoints, updates = _kept(checkpoints), _kept(updates)
    examined = subject(
        network, weights, network_args=network_args, initial=initial, image_shape=image_shape, key=key,
        initial_key=initial_key, checkpoints=checkpoints, updates=updates,
    )  # fmt: skip
    check_start(examined)
    check_rungs(examined, options)
    check_normalisation(examined, options)
    if options.rungs:
        options = replace(options, rungs=tuple(name for name in ORDER if name in options.rungs))
    with RunFolder(out).locked(create=True) as folder:
        claim(folder, examined, network, options, truth)
        files = checksums(network, weights, initial=initial, checkpoints=checkpoints, updates=updates, truth=truth)
        if truth is not None and samples is None:
            options = replace(options, samples=len(truth.images))
        clock = Clock(began + 60 * minutes - options.reserve)
        case = Case(folder.path, folder.owner, examined, options, truth, device, clock, executor=executor)
        found = _preflight(case)
        counted = None if was_live(found, options) else found.samples
        case = replace(case, options=replace(options, samples=options.samples or counted))
        result = _climb(case, found, _doubts(case, found))
        _save(case, result)
        settings = folder.config["audit"]["options"] | {"config.json": file_digest(folder.path / "config.json")}
        page = render_audit(result, truth, folder.path.name, given=files, settings=settings, redact=redact)
        if not redact and result.report.exists() and WITHOUT_PICTURES in result.report.read_text():
            note("the report shows pictures again; give --redact to leave them out")
        write_atomically(result.report, page.encode())
        return result


def _kept(sources: Any) -> Any:
    """Sources that can be gone through twice: for the weights, and for the checksums."""
    return list(sources) if isinstance(sources, Iterator) else sources


def _climb(case: Case, found: Preflight, signs: tuple[str, ...]) -> Audit:
    """Read each rung that has its material. Each may claim leakage, so each counts as one look."""
    ladder = attackers(case.subject, found, case.options, scored=case.truth is not None)
    chosen = case.options.rungs or ORDER
    reasons: dict[str, str] = {each.name: each.why if each.method is None else NOT_CHOSEN for each in ladder}
    able = {each.name: each for each in ladder if each.method is not None and each.name in chosen}
    queue = [able[name] for name in ORDER if name in able]
    if not queue:
        why = "; ".join(reasons[name] for name in chosen)
        raise InvalidInputError(f"no rung can be read: {why}. Check these files, or choose other --rungs")
    told = members(case, found)
    attempts: dict[str, Attempt] = {}
    failed: set[str] = set()
    costs: list[float] = []  # seconds of the rungs that did not fit
    for i, attacker in enumerate(queue):
        name, folder = attacker.name, case.folder / attacker.name
        if case.clock.seconds_left < 0 and (attempts or costs) and not (folder / "plan.json").exists():
            reasons[name] = NO_TIME
            continue
        folder.mkdir(exist_ok=True)
        note(f"rung {name}, with {attacker.adds}, by {attacker.label}: {attacker.why}")
        options = replace(case.options, samples=attacker.samples)
        share = share_of_time(attacker, read=attempts, ahead=queue[i:])
        inner = replace(case, folder=folder, owner=digest(case.owner, name), options=options, share=share)
        try:
            attempts[name] = attempt(inner, attacker, found)
        except TooShortError as error:
            reasons[name] = NO_TIME
            costs.extend(error.args)
        except (DivergenceError, InvalidInputError) as error:
            reasons[name] = str(error)
            failed.add(name)
            if attacker is queue[-1] and not attempts:
                raise
    if not attempts:
        raise _too_short(case, sum(costs))
    read_further(list(attempts.values()), complete=NO_TIME not in reasons.values())
    traces = {} if told is None or told.doubt else {_traced(case): told.rates.verdict.p_value}
    readings = {name: judged(tried, looks=len(queue), trace=traces.get(name)) for name, tried in attempts.items()}
    return Audit.of(_rungs(ladder, readings, reasons, failed), found, case.folder / "report.html", signs, told)


def _traced(case: Case) -> str:
    """The rung whose changes the membership test looked at. Those of a federated client are not those of the rest."""
    return "C" if known(case).segments else "W0"


def share_of_time(attacker: Attacker, *, read: Mapping[str, Any], ahead: Sequence[Attacker]) -> float:
    """The share of the time left that a rung may use. Rungs that were read keep what their plans left."""
    kept = (1 - MARGIN) * sum(EFFORT[name] for name in read)
    return EFFORT[attacker.name] / (kept + sum(EFFORT[each.name] for each in ahead))


def _too_short(case: Case, seconds: float) -> InvalidInputError:
    """``seconds`` is what the shortest plans take of all rungs that were tried, besides the time that is spent."""
    given, reserve = case.options.minutes, case.options.reserve
    spent = 60 * given - reserve - case.clock.seconds_left
    enough = ((spent + seconds / MARGIN) / (1 - RESERVE) + LEAST_RESERVE) / 60
    minutes = max(math.ceil(enough), math.ceil(given) + 1)
    return InvalidInputError(f"at its present speed, this machine needs more time; give --minutes {minutes}")


def _rungs(
    ladder: list[Attacker], readings: Mapping[str, Reading], reasons: Mapping[str, str], failed: Set[str]
) -> tuple[Rung, ...]:
    """Every rung with its reading, and what it adds to those below it."""
    rungs: list[Rung] = []
    for attacker in ladder:
        reading = readings.get(attacker.name)
        if reading is None:
            note(f"rung {attacker.name} is not read: {reasons[attacker.name]}")
            rungs.append(Rung(attacker, None, reasons[attacker.name], failed=attacker.name in failed))
        else:
            lower = [rung.reading for rung in rungs if rung.reading is not None]
            above = [each.attacker.name for each in lower if each.verdict.outcome is Outcome.LEAKAGE]
            despite = above[0] if above and reading.verdict.outcome is not Outcome.LEAKAGE else ""
            rungs.append(Rung(attacker, reading, "", reading.exposes, reading.beyond(lower), despite=despite))
    return tuple(rungs)


def _preflight(case: Case) -> Preflight:
    note("examining the weights")

    found = cached_json(case.folder / "preflight.json", case.owner, Preflight, lambda: preflight(case.subject))
    if case.truth is not None:
        if case.truth.classes:
            named = [f"{name} = {number}" for number, name in enumerate(case.truth.classes)]
            note(f"classes: {', '.join(named[:MOST_CLASSES])}{', …' if len(named) > MOST_CLASSES else ''}")
        note(f"the network classifies {case.truth.accuracy(case.subject.model):.0%} of the given images correctly")
    return found


def _doubts(case: Case, found: Preflight) -> tuple[str, ...]:
    """Signs that the given files or options are wrong, also in the log."""
    signs = doubts(case.subject, case.truth, rule=case.options.optimiser, counted=found.samples)
    if case.options.optimiser == "adam" and case.subject.initial is None and not case.subject.segments:
        note("--optimiser adam changes nothing without weights before or during training; add --initial")
    if case.options.batch_norm == "fixed" and found.live_layers:
        signs += ("--batch-norm is fixed, but the running statistics changed in training",)
    for sign in signs:
        note(f"check the files: {sign}")
    return signs


def _save(case: Case, result: Audit) -> None:
    for name, reading in result.readings.items():
        tensors = {field: getattr(reading.ranking, field) for field in ("images", "probability", "agreement")}
        save_tensors(case.folder / name / "ranking.safetensors", tensors, {"what": "candidates, the likeliest first"})
    record.save(case, result)

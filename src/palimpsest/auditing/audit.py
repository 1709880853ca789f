"""`pal.audit`: from a network and its weights to a verdict and a report, in stages that are each done once.

config.json                what is audited and how; another audit in the same folder is refused
preflight.json             what the weights say before anything is read
plan.json                  every choice, made once
runs/ROLE-N.safetensors    the reconstructions: of the subject, of the negative and of the positive control
control.safetensors        the positive control's weights
ranking.safetensors        the candidates, the likeliest first
audit.json, report.html    the verdict and everything behind it
"""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from palimpsest.auditing import stages
from palimpsest.auditing.agreement import Run, agree
from palimpsest.auditing.controls import PublicImages, distance, public_images, shuffled, trained_control
from palimpsest.auditing.floor import floor
from palimpsest.auditing.identity import claim
from palimpsest.auditing.page import render_audit
from palimpsest.auditing.plan import Plan, Wishes, draft, fitted, fulfilled, measured_rate
from palimpsest.auditing.preflight import Method, Preflight, check_method, preflight
from palimpsest.auditing.ranking import Ranking, rank
from palimpsest.auditing.reading import Clock, OutOfTimeError, candidates, objective, read
from palimpsest.auditing.subject import Factory, Subject, subject
from palimpsest.auditing.truth import Truth
from palimpsest.auditing.verdict import AuditVerdict, Evidence, PositiveControl, judge
from palimpsest.errors import (
    DivergenceError,
    InvalidInputError,
    NoGradientError,
    PalimpsestError,
    TrainingDivergedError,
)
from palimpsest.files.schema import built
from palimpsest.files.storage import digest, save_tensors
from palimpsest.files.weights import fit_into
from palimpsest.objectives import Objective
from palimpsest.runs.folder import RunFolder
from palimpsest.runs.journal import note
from palimpsest.scoring import Outcome, Score, score
from palimpsest.training import train

RESERVE = 12.0  # seconds kept for ranking, scoring and the report
PROBE_STEPS = 20  # of training, to see how fast it is
UNTRAINABLE = (TrainingDivergedError, NoGradientError, InvalidInputError)  # why there may be no positive control
OUT_OF_TIME = "Out of time. Run the same command again with more --minutes to continue."


@dataclass(frozen=True)
class Options:
    """How to audit. The audit chooses every option that is None."""

    minutes: float = 10.0
    """Time limit in minutes, kept to within a tenth."""
    method: Method | None = None
    """ntk needs the initial weights, kkt (one output) and multiclass long training, kkt-signed weight decay."""
    weight_decay: bool = False
    """Whether training used weight decay."""
    samples: int | None = None
    """Number of training images, if known. The audit can often count them."""
    candidates: int | None = None
    """Candidates per restart. If omitted: twice the number of training images."""
    steps: int | None = None
    """Gradient steps per restart."""
    restarts: int | None = None
    """Number of independent restarts, at least two."""
    tangents: Literal[1, 2] | None = None
    """Tangent points of the NTK method. Two recover more, at twice the cost."""
    control_steps: int | None = None
    """Maximum number of training steps for the positive control."""
    total_variation: float | None = None
    """Strength of the smoothness prior on images; 0 turns it off."""
    controls: bool = True
    """Whether to run the positive control. The negative control always runs."""
    seed: int = 0
    """Seed of the candidates and the controls."""

    def __post_init__(self) -> None:
        if not 0 < self.minutes < float("inf"):
            raise InvalidInputError(f"minutes is {self.minutes}; give a positive number")
        if self.seed < 0:
            raise InvalidInputError(f"the seed is {self.seed}; give a number that is not negative")

    @property
    def wishes(self) -> Wishes:
        return Wishes(**{f.name: getattr(self, f.name) for f in fields(Wishes)})


@dataclass(frozen=True)
class Audit:
    """The result of an audit."""

    verdict: AuditVerdict
    """The headline. It takes everything below into account."""
    preflight: Preflight
    plan: Plan
    ranking: Ranking
    """Distinct candidates, the most likely first, as the network sees images."""
    negative: Ranking | None
    positive: PositiveControl | None
    """A control network that was trained on public images, read with the same effort."""
    score: Score | None
    """The candidates scored against the training images, if these were given."""
    floor: float | None
    """The share of the target that the training images leave unexplained. None without training images."""
    accuracy: float | None
    """Share of the training images that the network classifies correctly, if they were given."""
    samples: int | None
    """Number of training images, as given or as counted."""
    finished: bool
    """Whether there was time for everything that was planned."""
    report: Path

    @property
    def compared(self) -> bool:
        """Whether training images and enough held-out images were given. Their comparison then decides."""
        return self.score is not None and self.score.verdict.outcome is not Outcome.NO_VERDICT

    @property
    def told(self) -> list[str]:
        """The headline, and what to do for a better answer."""
        lines = [self.verdict.sentence, self.verdict.advice if self.finished else OUT_OF_TIME]
        return [line for line in lines if line]


@torch.random.fork_rng(devices=[])  # the caller's random numbers stay what they are
def audit(
    network: str | Factory,
    weights: Path | str | Mapping[str, Tensor],
    *,
    image_shape: Sequence[int],
    out: Path | str,
    initial: Path | str | Mapping[str, Tensor] | None = None,
    truth: Truth | None = None,
    key: str | None = None,
    initial_key: str | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Audit:
    """Audit a network that was trained anywhere: can its training images be read out of its weights?

    The audit writes ``audit.json`` and ``report.html`` into the run folder. After an interruption, the same call
    continues.

    Args:
        network: a function that makes the network, or its place: ``"package.module:function"`` or
            ``"path/to/file.py:function"``. It is called several times without arguments. ``lambda: model`` also works.
        weights: the trained weights, a state dict or a file that holds one.
        image_shape: channels, height and width of the network's input.
        out: the run folder. If it holds this audit unfinished, the audit continues there.
        initial: the weights before training, if known. Far more can be read with them.
        truth: the training images, if you have them. Only the scores and the floor use them.
        key: the entry of the file that holds the weights, for example ``"ema.state_dict"``. Entries with usual names,
            and single entries, are found without it.
        initial_key: the same for the file of the initial weights.
        device: where to compute.
        **options: the fields of `pal.auditing.Options`, for example ``minutes=30``.

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
    began = time.monotonic()
    if unknown := [name for name in options if name not in {field.name for field in fields(Options)}]:
        near = difflib.get_close_matches(unknown[0], [field.name for field in fields(Options)], 1)
        hint = f"did you mean {near[0]!r}?" if near else "see pal.auditing.Options"
        raise InvalidInputError(f"{unknown[0]!r} is no option of an audit; {hint}")
    chosen = Options(**options)
    _ = chosen.wishes  # what cannot be is refused before the folder is taken
    examined = subject(network, weights, initial=initial, image_shape=image_shape, key=key, initial_key=initial_key)
    check_method(examined, chosen.method)
    with RunFolder(out).locked(create=True) as folder:
        asked = {name: value for name, value in asdict(chosen).items() if name != "minutes"}
        claim(folder, examined, network, asked, truth)
        return _Auditor(folder, examined, chosen, truth, torch.device(device), began).run()


class _Auditor:
    """The stages of one audit, over its folder."""

    def __init__(
        self,
        folder: RunFolder,
        examined: Subject,
        options: Options,
        truth: Truth | None,
        device: torch.device,
        began: float,
    ) -> None:
        self.folder, self.subject, self.options, self.truth = folder, examined, options, truth
        self.device, self.owner = device, folder.owner
        self.clock = Clock(began + 60 * options.minutes - RESERVE)

    def run(self) -> Audit:
        found = self.examine()
        plan = self.plan(found)
        public = public_images(plan.control_images, self.subject.image_shape, self.subject.outputs, seed=plan.seed)
        floor = self.floor(plan)
        runs, finished = self.read_all(plan, public)
        ranking = rank(agree(runs["subject"]))
        negative = rank(agree(runs["negative"])) if len(runs["negative"]) > 1 else None
        scored = self.score(ranking)
        evidence = Evidence(
            ranking=ranking,
            negative=negative,
            positive=self.positive(runs["positive"], found, plan, public),
            comparison=None if scored is None else scored.verdict,
            floor=floor,
            accuracy=None if self.truth is None else self.truth.accuracy(self.subject.model),
            majority=0.0 if self.truth is None else self.truth.majority(self.subject.outputs),
            moved=found.moved != 0,
            method=plan.method,
            samples=self.samples(found),
        )
        return self.report(
            Audit(
                verdict=judge(evidence),
                preflight=found,
                plan=plan,
                ranking=ranking,
                negative=negative,
                positive=evidence.positive,
                score=scored,
                floor=evidence.floor,
                accuracy=evidence.accuracy,
                samples=evidence.samples,
                finished=finished,
                report=self.folder.path / "report.html",
            )
        )

    # --- before reading --------------------------------------------------------------------------

    def examine(self) -> Preflight:
        note("examining the weights")

        def find() -> dict[str, Any]:
            return preflight(self.subject, method=self.options.method, weight_decay=self.options.weight_decay).to_json()

        path = self.folder.path / "preflight.json"
        found = stages.facts(path, self.owner, find, lambda fields: built(Preflight, fields))
        note(f"method {found.method}: {found.why}")
        if found.warning:
            note(f"beware: {found.warning}")
        if self.truth is not None:
            note(f"the network classifies {self.truth.accuracy(self.subject.model):.0%} of the given images correctly")
        return found

    def plan(self, found: Preflight) -> Plan:
        def find() -> dict[str, Any]:
            wishes, controls = self.wishes, self.options.controls
            plan = draft(found, wishes, seed=self.options.seed)
            if wishes.complete:
                return fulfilled(plan, wishes).to_json()
            rate = measured_rate(self.problem(plan), self.subject.image_shape, plan.candidates)
            training_rate = self.training_rate(plan) if controls else 1.0
            left = max(1.0, self.clock.deadline - time.monotonic())
            return fitted(
                plan, wishes, seconds=left, rate=rate, training_rate=training_rate, controls=controls
            ).to_json()

        path = self.folder.path / "plan.json"
        if path.exists():
            note("following the plan this folder holds; for a better reading, give another --out and more --minutes")
        plan = stages.facts(path, self.owner, find, Plan.from_json)
        self.owner = digest(self.owner, plan.to_json())  # what is read belongs to this plan
        nodes = f", tangent at {', '.join(map(str, plan.at))}" if plan.at else ""
        note(f"plan: {plan.restarts} restarts of {plan.candidates} candidates, {plan.steps} steps each{nodes}")
        return plan

    @property
    def wishes(self) -> Wishes:
        """As asked for. Training images that are given are counted; nothing else of them is looked at here."""
        wishes = self.options.wishes
        known = None if self.truth is None else len(self.truth.images)
        return replace(wishes, samples=wishes.samples or known)

    def samples(self, found: Preflight) -> int | None:
        """How many training images there are, as given or as counted."""
        return self.wishes.samples or found.samples

    def problem(self, plan: Plan) -> Objective:
        return objective(self.subject.model, self.subject.initial, plan).to(self.device)

    def training_rate(self, plan: Plan) -> float:
        """Training steps a second of the positive control."""
        public = public_images(plan.control_images, self.subject.image_shape, self.subject.outputs, seed=plan.seed)
        began = time.monotonic()
        with suppress(PalimpsestError):
            model = self.subject.fresh().to(self.device)
            train(model, public.images, public.labels, steps=PROBE_STEPS, tolerance=1e-9)
        return PROBE_STEPS / (time.monotonic() - began)

    # --- reading ---------------------------------------------------------------------------------

    def read_all(self, plan: Plan, public: PublicImages) -> tuple[dict[str, list[Run]], bool]:
        """All planned reconstructions as far as time allows, and whether it did; a repeated audit does what is left."""
        runs: dict[str, list[Run]] = {"subject": [], "negative": [], "positive": []}
        impossible: set[str] = set()
        finished = True
        for role, number in plan.runs(controls=self.options.controls):
            if role in impossible:
                continue
            run: Run | None = None
            try:
                run = self.read_one(plan, role, number, public)
            except OutOfTimeError:
                if finished:
                    note(f"out of time in {role} {number + 1}")
                finished = False
                if role == "subject" and len(runs["subject"]) < 2:
                    run = self.so_far(plan)
            except UNTRAINABLE as error:
                if role != "positive":
                    raise
                self.subject.fresh()  # a factory that fails says nothing of the control, and is told as it is
                note(f"there is no {role} control: {error}")
                impossible.add(role)
            if run is not None and len(run.images):
                runs[role].append(run)
        if not runs["subject"]:
            raise DivergenceError(0, "the weights or their scale are beyond what this method can handle")
        return runs, finished

    def read_one(self, plan: Plan, role: str, number: int, public: PublicImages) -> Run:
        path = self.folder.path / "runs" / f"{role}-{number}.safetensors"
        checkpoint = path.with_suffix(".checkpoint")

        def find() -> tuple[dict[str, Tensor], dict[str, Any]]:
            if role != "subject":  # even without time, a report shows as much of the subject as there is
                self.clock.check()
            note(f"reading: {role} {number + 1}")
            problem = self.problem_of(role, plan, public)
            seed = 1000 * plan.seed + number
            return read(problem, self.subject.image_shape, plan, seed=seed, checkpoint=checkpoint, clock=self.clock)

        run = stages.tensors(path, digest(self.owner, role, number), find, _run)
        checkpoint.unlink(missing_ok=True)
        return run

    def so_far(self, plan: Plan) -> Run | None:
        """What the run that was stopped by the clock had come to."""
        state = self.clock.stopped_at
        if state is None:
            return None
        return _run(*candidates(self.problem(plan), state.x, state.multipliers, state.labels))

    def problem_of(self, role: str, plan: Plan, public: PublicImages) -> Objective:
        if role == "subject":
            return self.problem(plan)
        if role == "negative":
            model = shuffled(self.subject, plan.method, seed=plan.seed)
            return objective(model, self.subject.initial, plan).to(self.device)
        model, initial = self.control(plan, public)
        return objective(model, initial, plan).to(self.device)

    def control(self, plan: Plan, public: PublicImages) -> tuple[torch.nn.Module, dict[str, Tensor]]:
        """The positive control, trained once."""

        def find() -> tuple[dict[str, Tensor], dict[str, Any]]:
            note("training the positive control")
            fit = trained_control(self.subject, plan, public, self.device)
            parts = {"final": fit.model.state_dict(), "initial": fit.initial}
            named = {f"{part}/{name}": t for part, weights in parts.items() for name, t in weights.items()}
            return named, {"summary": fit.summary}

        def read(tensors: dict[str, Tensor], facts: dict[str, Any]) -> tuple[torch.nn.Module, dict[str, Tensor]]:
            parts: dict[str, dict[str, Tensor]] = {"final": {}, "initial": {}}
            for key, t in tensors.items():
                part, _, name = key.partition("/")
                parts[part][name] = t
            model = self.subject.fresh()
            fit_into(model, parts["final"])
            return model, parts["initial"]

        return stages.tensors(self.folder.path / "control.safetensors", self.owner, find, read)

    # --- judging ---------------------------------------------------------------------------------

    def positive(self, runs: list[Run], found: Preflight, plan: Plan, public: PublicImages) -> PositiveControl | None:
        """Ranked like the subject, and compared with its images, which are public."""
        if len(runs) < 2 or not len(agreed := agree(runs)):
            return None
        model, initial = self.control(plan, public)
        start = (self.subject.initial, initial) if plan.method == "ntk" else (None, None)
        return PositiveControl(
            ranking=rank(agreed),
            comparison=score(agreed.images, public.images, held_out=public.held_out).verdict,
            images=plan.control_images,
            samples=self.samples(found),
            way=distance(model, start[1]) / max(distance(self.subject.model, start[0]), 1e-300),
        )

    def score(self, ranking: Ranking) -> Score | None:
        if self.truth is None or not len(ranking):
            return None
        return self.truth.score(ranking.images)

    def floor(self, plan: Plan) -> float | None:
        if self.truth is None:
            return None
        truth = self.truth

        def find() -> dict[str, float]:
            problem = self.problem(plan)
            labels = truth.labels_for(self.subject.outputs).to(self.device)
            return {"floor": floor(problem, truth.seen, labels)}

        return stages.facts(self.folder.path / "floor.json", self.owner, find, lambda fields: float(fields["floor"]))

    def report(self, found: Audit) -> Audit:
        numbers = {name: getattr(found.ranking, name) for name in ("images", "probability", "agreement")}
        save_tensors(self.folder.path / "ranking.safetensors", numbers, {"what": "candidates, the likeliest first"})
        judged = {
            "verdict": found.verdict,
            "positive": found.positive and found.positive.comparison,
            "score": found.score and found.score.verdict,
        }
        summary: dict[str, Any] = {name: None if part is None else asdict(part) for name, part in judged.items()}
        summary |= {"floor": found.floor, "accuracy": found.accuracy, "finished": found.finished}
        self.folder.write("audit.json", (json.dumps(summary, indent=1) + "\n").encode())
        self.folder.write("report.html", render_audit(found, self.truth, self.folder.path.name).encode())
        return found


def _run(tensors: dict[str, Tensor], facts: dict[str, Any]) -> Run:
    return Run(tensors["images"], tensors["contributions"], float(facts["loss"]))

"""The ladder of attackers: what each of them knows, which method uses it, and why a rung cannot be read.

W     the final weights
W0    and the weights before training, or the seed that makes them
C     and weights on the way: checkpoints, or the updates of a federated client
O     and the optimiser's state
T     and the training images, which the audit uses for scores alone

Every attacker knows the architecture and, if the audit knows it, the number of training images.
"""

from dataclasses import dataclass, replace
from typing import Literal

from torch.nn.modules.batchnorm import _BatchNorm

from palimpsest.auditing.options import Options, RungName
from palimpsest.auditing.preflight import Preflight, images_of_moment, images_of_start
from palimpsest.auditing.subject import NOT_READ, Subject
from palimpsest.errors import InvalidInputError
from palimpsest.runs.problems import CHANGES, Method, Rule

Name = RungName | Literal["T"]
MATERIAL: dict[Name, str] = {
    "W": "the final weights",
    "W0": "the initial weights or the seed",
    "C": "the checkpoints or updates",
    "O": "the optimiser's state",
    "T": "the training images",
}
ORDER: tuple[RungName, ...] = ("C", "W0", "O", "W")  # in which rungs are read: if time runs out, the weakest is missing
EFFORT: dict[str, int] = {"W": 1, "W0": 3, "C": 3, "O": 3}  # shares of the time: W alone is seldom readable
SUM, ADAM = "is a sum of gradients at the images", "is what Adam makes of gradients at the images"
NOT_CHOSEN = "not chosen by --rungs"
NO_TIME = "too little time was left for it; run the same command again with more --minutes"
MISSING = (
    "membership tests by shadow models (the command membership tests given images without them)",
    "attacks that only query the network: model inversion, extraction",
    "searches with a generative model as the prior",
    "inference of attributes or properties of the training set",
    "a server of federated learning that manipulates the weights it sends",
)  # attacks that an audit does not try


@dataclass(frozen=True)
class Attacker:
    """A rung of the ladder: what this attacker has beyond the rung below, and how the audit uses it.

    Args:
        name: ``"W"``, ``"W0"``, ``"C"``, ``"O"`` or ``"T"``.
        method: the method that reads it. None if it cannot be read.
        why: why this method fits, or why the rung cannot be read.
        segments: the number of segments of the training whose change the method uses.
        samples: the number of training images behind the target, if known.
        directions: the number of dimensions of their span, if the first layer shows it beyond doubt. The audit then
            searches that span instead of all images.
        rule: the optimiser of the training. After Adam, the change of the weights is read in another way.
        live: whether the method takes the candidates as one batch, because batch normalisation was live in training.
    """

    name: Name
    method: Method | None
    why: str
    segments: int = 1
    samples: int | None = None
    directions: int | None = None
    rule: Rule = "sgd"
    live: bool = False

    @property
    def label(self) -> str:
        """The method, in words."""
        words = f"{self.method} for Adam" if self.rule == "adam" else str(self.method)
        return f"{words}, with live batch normalisation" if self.live else words

    @property
    def adds(self) -> str:
        return MATERIAL[self.name]

    @property
    def knows(self) -> str:
        """Everything that this attacker may use, in words."""
        names = list(MATERIAL)
        return ", ".join(MATERIAL[name] for name in names[: names.index(self.name) + 1])


def attackers(subject: Subject, found: Preflight, options: Options, *, scored: bool) -> list[Attacker]:
    """Every rung, the one that knows least first. ``scored`` says whether the training images are given."""
    rule = rule_of(subject, options)
    rungs = [_weights(subject, options), _initial(subject, found, rule), _way(subject, found, rule)]
    rungs += [_optimiser(subject)]
    if was_live(found, options):  # the first layer does not show the span: behind it, images are centred as a batch
        rungs = [replace(rung, live=True, directions=None) if rung.method in CHANGES else rung for rung in rungs]
    reason = "the audit uses them for scores alone" if scored else "not given; --data adds scores"
    return [*(_counted(rung, options.samples) for rung in rungs), Attacker("T", None, reason)]


def rule_of(subject: Subject, options: Options) -> Rule:
    """The optimiser of the training: as the user says, or as its state in the file of the final weights shows."""
    return options.optimiser or subject.rule or "sgd"


def was_live(found: Preflight, options: Options) -> bool:
    """Whether batch normalisation was live in training: as the user says, or as its statistics show."""
    return found.live_layers > 0 if options.batch_norm is None else options.batch_norm == "live"


def check_normalisation(subject: Subject, options: Options) -> None:
    """Refuse an option about batch normalisation that the network does not have."""
    if options.batch_norm is not None and not any(isinstance(each, _BatchNorm) for each in subject.model.modules()):
        raise InvalidInputError("the network does not have batch normalisation; leave out --batch-norm")


def _counted(rung: Attacker, samples: int | None) -> Attacker:
    """The rung with its number of images. More directions than images are not the span of the images."""
    if rung.directions is not None and samples is not None and rung.directions > samples:
        rung = replace(rung, directions=None)
    own = rung.directions if rung.name == "O" else None  # a moment remembers the last batches alone
    return replace(rung, samples=own or samples)


def check_rungs(subject: Subject, options: Options) -> None:
    """Refuse rungs that lack their material."""
    remedies = {
        "W0": (subject.initial is None or not subject.start_given, "give the weights before training by --initial"),
        "C": (not subject.segments, "give weights on the way by --checkpoints or --updates"),
        "O": (subject.moment is None, "give a training checkpoint of Adam, or of SGD with momentum, as --weights"),
    }
    if options.rungs == ():
        raise InvalidInputError(f"--rungs does not have a value; choose from {', '.join(EFFORT)}")
    for name in options.rungs or ():
        missing, remedy = remedies.get(name, (False, ""))
        if missing:
            raise InvalidInputError(f"rung {name} needs {MATERIAL[name]}; {remedy}")


def _weights(subject: Subject, options: Options) -> Attacker:
    if options.weight_decay:
        return Attacker("W", "kkt-signed", "weight decay makes the weights a sum of gradients at the images")
    return Attacker("W", "kkt" if subject.outputs == 1 else "multiclass", "classifiers tend to a maximum margin")


def _initial(subject: Subject, found: Preflight, rule: Rule) -> Attacker:
    if subject.initial is None or not subject.start_given:
        return Attacker("W0", None, "not given; --initial adds them")
    if found.unusable:
        return Attacker("W0", None, found.unusable)
    if rule == "adam":  # the first layer does not show the span of the images
        return Attacker("W0", "ntk", f"the change of the weights {ADAM}", rule=rule)
    directions = images_of_start(subject) if subject.segments else found.samples  # those are of all segments
    return Attacker("W0", "ntk", f"the change of the weights {SUM}", directions=directions)


def _way(subject: Subject, found: Preflight, rule: Rule) -> Attacker:
    if not subject.segments:
        return Attacker("C", None, "not given; --checkpoints or --updates adds them")
    if found.unusable:
        return Attacker("C", None, found.unusable)
    if len(subject.segments) == 1 and subject.initial is not None and subject.start_given:
        return Attacker("C", None, "there are no weights between the first and the last")
    segments = len(subject.segments)
    why = f"the change on each of {segments} segments {ADAM if rule == 'adam' else SUM}"
    return Attacker("C", "path", why, segments, directions=None if rule == "adam" else found.samples, rule=rule)


def _optimiser(subject: Subject) -> Attacker:
    if subject.moment is None:
        refused = [remark for remark in subject.remarks if remark.startswith(NOT_READ)]
        return Attacker("O", None, refused[0] if refused else "not in the file of the final weights")
    why = "the first moment is a sum of the last gradients at the images"
    return Attacker("O", "gradient", why, directions=images_of_moment(subject))

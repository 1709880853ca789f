"""What does not fit together is refused by name before any work, and what merely looks odd is not refused."""

import sys

import pytest
import torch

import palimpsest as pal
from palimpsest.errors import InvalidInputError, NoGradientError, NonFiniteError, UnsupportedNetworkError
from palimpsest.objectives import smoothing
from palimpsest.runs.train import TrainOptions

MODEL = pal.networks.MLP(4, (5,))
X, Λ, Y = torch.randn(3, 4), torch.ones(3), torch.tensor([1, -1, 1])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((torch.randn(3, 5), Λ, Y), "image_shape"),
        ((X, torch.ones(2), Y), "multipliers"),
        ((X, torch.ones(3, 2), Y), "multipliers"),
        ((X, Λ, torch.tensor([1, 0, 1])), "labels"),
        ((X, Λ, torch.tensor([1, -1])), "labels"),
        ((X, Λ, None), "labels"),
        ((X[:0], Λ[:0], Y[:0]), "candidates"),
        ((X.double(), Λ, Y), "float64"),
    ],
)
def test_what_does_not_fit_together_is_refused(arguments, reason):
    with pytest.raises(InvalidInputError, match=reason):
        pal.KKT(MODEL, sharpness=10.0).loss(*arguments)


@pytest.mark.parametrize("labels", [torch.tensor([0, 1, 3]), torch.tensor([0, -1, 2]), torch.tensor([0.0, 1.0, 2.0])])
def test_class_labels_out_of_range_are_refused(labels):
    with pytest.raises(InvalidInputError, match="labels"):
        pal.MulticlassKKT(pal.networks.MLP(4, (5,), outputs=3)).loss(X, Λ, labels)


def test_methods_and_outputs_must_match():
    with pytest.raises(InvalidInputError, match="MulticlassKKT"):
        pal.KKT(pal.networks.MLP(4, (5,), outputs=3)).loss(X, Λ, Y)
    with pytest.raises(InvalidInputError, match="KKT"):
        pal.MulticlassKKT(MODEL).loss(X, Λ, torch.tensor([0, 0, 0]))


@pytest.mark.parametrize("weights", [{"layers.9.weight": 1.0}, {"layers.0.weight": -1.0}, "best"])
def test_weights_that_make_no_sense_are_refused(weights):
    with pytest.raises(InvalidInputError):
        pal.KKT(MODEL, weights=weights)


def test_initial_weights_of_another_network_are_refused():
    with pytest.raises(InvalidInputError, match=r"layers\.0\.weight"):
        pal.NTK(MODEL, pal.networks.MLP(4, (6,)).state_dict())


def test_weights_that_are_not_finite_are_refused():
    broken = pal.networks.MLP(4, (5,))
    torch.nn.init.constant_(broken.layers[0].weight, float("nan"))
    with pytest.raises(NonFiniteError, match=r"layers\.0\.weight"):
        pal.KKT(broken)


def test_a_network_without_gradients_is_refused():
    with pytest.raises(NoGradientError, match="requires_grad"):
        pal.KKT(pal.networks.MLP(4, (5,)).requires_grad_(False))

    class Deaf(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.unused = torch.nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x.sum(1, keepdim=True)

    with pytest.raises(NoGradientError):
        pal.KKT(Deaf()).loss(X, Λ, Y)


def test_only_a_network_that_ignores_its_weights_is_refused():
    """Neither a dead first candidate nor outputs that sum to one are a reason."""
    torch.manual_seed(0)
    softmax = torch.nn.Sequential(pal.networks.MLP(4, (5,), outputs=3), torch.nn.Softmax(dim=1))
    assert pal.KKT(softmax, signed=True).loss(X, torch.ones(3, 3)).isfinite()
    dead_at_zero = pal.networks.MLP(4, (5,), bias="none")
    assert pal.KKT(dead_at_zero).loss(torch.cat([0 * X[:1], X[1:]]), Λ, Y).isfinite()


def test_weights_that_are_all_zero_are_not_said_to_be_unchanged():
    zero = pal.networks.MLP(4, (5,))
    for parameter in zero.parameters():
        torch.nn.init.zeros_(parameter)
    with pytest.raises(InvalidInputError) as error:
        pal.KKT(zero)
    assert "initial" not in str(error.value)


@pytest.mark.parametrize("initial", [{}, {"layers.0.weight": torch.ones(2)}, MODEL], ids=["empty", "other", "module"])
@pytest.mark.parametrize("method", [pal.KKT, pal.MulticlassKKT, pal.NTK])
def test_initial_weights_that_are_none_are_refused(method, initial):
    with pytest.raises(InvalidInputError):
        method(MODEL, initial=initial, weights="auto")


def test_unchanged_weights_have_nothing_to_say():
    with pytest.raises(InvalidInputError, match="initial"):
        pal.NTK(MODEL, MODEL.state_dict())


def test_half_precision_is_refused_by_name():
    with pytest.raises(InvalidInputError, match=r"\.float\(\)"):
        pal.KKT(pal.networks.MLP(4, (5,)).half())


def test_a_bias_that_alone_was_trained_gives_no_gradient_in_the_images_and_no_crash():
    model = pal.networks.MLP(4, (5,), bias="all")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "layers.1.bias")
    torch.nn.init.ones_(model.layers[1].bias)
    objective = pal.KKT(model, sharpness=10.0)
    assert not objective.gradients(X, Λ, Y)[0].any()
    assert not objective.curvature(X, Λ, Y)(X).any()
    assert not objective.hessian(X, Λ, Y)(X).any()


def test_attention_can_be_differentiated_as_often_as_needed():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(4, 2, dim_feedforward=8, batch_first=True, activation="gelu")
    model = torch.nn.Sequential(torch.nn.Unflatten(1, (3, 4)), layer, torch.nn.Flatten(), torch.nn.Linear(12, 1))
    x = torch.randn(2, 12)
    objective = pal.KKT(model, sharpness=10.0)
    assert objective.curvature(x, torch.ones(2), torch.tensor([1, -1]))(x).isfinite().all()


def test_frozen_parameters_take_no_part():
    model = pal.networks.MLP(4, (5,))
    model.layers[1].weight.requires_grad_(False)
    assert list(pal.KKT(model).target) == ["layers.0.weight", "layers.0.bias"]


class Odd(torch.nn.Module):
    """A network that behaves from a given call on as it is told to."""

    def __init__(self, act, after=0):
        super().__init__()
        self.inner, self.act, self.after, self.calls = torch.nn.Linear(4, 1), act, after, [0]

    def forward(self, x):
        self.calls[0] += 1
        y = self.inner(x)
        return self.act(y) if self.calls[0] > self.after else y

    def __deepcopy__(self, memo):  # copies count together
        other = Odd(self.act, self.after)
        other.calls = self.calls
        other.inner.load_state_dict(self.inner.state_dict())
        return other


def fail(y):
    raise KeyError("a surprise")


def leave(y):
    sys.exit(3)


@pytest.mark.parametrize("act", [torch.Tensor.half, lambda y: y.to(torch.complex64), torch.Tensor.int])
def test_outputs_of_another_kind_are_refused(act):
    with pytest.raises(UnsupportedNetworkError):
        pal.KKT(Odd(act)).loss(X, Λ, Y)
    with pytest.raises(InvalidInputError):
        pal.train(Odd(act), X, Y)


@pytest.mark.parametrize("after", range(9))
@pytest.mark.parametrize("act", [fail, leave])
def test_a_network_that_fails_at_any_time_is_refused_by_name(act, after):
    objective = pal.KKT(Odd(act, after), sharpness=10.0).by_autograd()

    def several_times():
        for _ in range(10):
            objective.loss(X, Λ, Y)

    with pytest.raises((InvalidInputError, UnsupportedNetworkError)):
        several_times()


@pytest.mark.parametrize("act", [fail, leave])
@pytest.mark.parametrize("after", [0, 2, 5])
def test_a_network_that_fails_while_it_is_trained_is_refused_by_name(act, after):
    with pytest.raises(UnsupportedNetworkError):
        pal.train(Odd(act, after), X, Y, steps=20)


def test_a_network_that_only_works_in_single_precision_is_differentiated_all_the_same():
    torch.manual_seed(0)
    model = pal.networks.MLP(4, (5,))
    single = Odd(lambda y: y + torch.nn.functional.linear(torch.ones(len(y), 1), torch.ones(1, 1)))
    assert pal.KKT(single, sharpness=10.0).loss(X, Λ, Y).isfinite()
    expected = pal.KKT(model, sharpness=10.0).gradients(X, Λ, Y)

    class Named(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model.layers

        def forward(self, x):
            return self.layers[1](input=torch.relu(self.layers[0](input=x)))

    actual = pal.KKT(Named(), sharpness=10.0).gradients(X, Λ, Y)
    assert all(torch.allclose(a, e) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("act", [torch.log, lambda y: y * 1e38 * 1e38], ids=["nan", "overflow"])
def test_outputs_that_are_not_finite_are_not_called_random(act):
    model = Odd(act)
    torch.nn.init.constant_(model.inner.bias, -100.0)
    with pytest.raises(NonFiniteError):
        pal.KKT(model).loss(X, Λ, Y)


def test_memory_that_runs_out_in_a_network_is_not_its_fault():
    def large(y):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        pal.KKT(Odd(large)).loss(X, Λ, Y)


@pytest.mark.parametrize(
    "returned", [torch.Tensor.sum, lambda y: y.flatten()[:2], lambda y: 1.0, lambda y: y[:, :, None]]
)
def test_a_method_whose_scalar_has_another_shape_is_refused(returned):
    class Own(pal.KKT):
        def scalar(self, outputs, labels):
            return returned(outputs)

    with pytest.raises(InvalidInputError, match=r"Own\.scalar"):
        Own(MODEL).loss(X, Λ, Y)


def quick(objective=None, **options):
    options = {"image_shape": 4, "candidates": 2, "steps": 3, "progress": False} | options
    return pal.reconstruct(objective or pal.KKT(MODEL), **options)


def test_a_network_in_place_of_a_method_is_refused():
    with pytest.raises(InvalidInputError, match="MLP"):
        quick(MODEL)


@pytest.mark.parametrize(
    "options",
    [
        {"priors": lambda images, multipliers: 0.0},
        {"priors": [pal.priors.Box]},
        {"priors": (pal.priors.Box(), None)},
        {"optimiser": "adam"},
        {"splitting": True},
        {"splitting": pal.Splitting(), "merging": True},
    ],
)
def test_settings_of_another_kind_are_refused(options):
    with pytest.raises(InvalidInputError):
        quick(**options)


@pytest.mark.parametrize(
    ("name", "meant"), [("spliting", "splitting"), ("prior", "priors"), ("callback", "callbacks"), ("colour", None)]
)
def test_a_misspelt_setting_is_refused_with_the_nearest_one(name, meant):
    with pytest.raises(InvalidInputError) as error:
        quick(**{name: None})
    assert repr(name) in str(error.value)
    assert "gradient_tolerance" in str(error.value)
    assert meant is None or repr(meant) in str(error.value)


@pytest.mark.parametrize("inside", [True, False], ids=["made inside", "made before"])
def test_inference_mode_changes_nothing(inside):
    """Neither while a network is trained and read, nor for what was made in it."""

    def problem():
        torch.manual_seed(0)
        return pal.networks.MLP((1, 3, 3), (6,)), torch.randn(3, 1, 3, 3), torch.tensor([1, -1, 1])

    def read(model, images, labels):
        fit = pal.train(model, images, labels, steps=20)
        objective = pal.NTK(fit.model, fit.initial).to("cpu", torch.float32).by_autograd()
        within = pal.span(fit.model, fit.initial).subspace
        rec = quick(objective, image_shape=(1, 3, 3), within=within, splitting=pal.Splitting())
        return rec.images, rec.certificate.gradient

    expected, gradient = read(*problem())
    given = None if inside else problem()
    with torch.inference_mode():
        images, same = read(*(given or problem()))
        with pytest.raises(InvalidInputError, match="inference_mode"):
            pal.KKT(MODEL).loss(X, Λ, Y)
    assert torch.equal(images, expected)
    assert same == gradient


def test_the_callers_random_numbers_stay_what_they_are():
    before = torch.random.get_rng_state()
    torch.nn.init.normal_(torch.empty(1))
    changed = torch.random.get_rng_state()
    assert not torch.equal(before, changed)
    fit = pal.train(MODEL, X, Y, steps=10)
    quick(pal.NTK(fit.model, fit.initial), splitting=pal.Splitting(direction="random"))
    data = pal.datasets.load("digits", per_class=2)
    TrainOptions(data="digits", hidden=(5,)).network(data)
    assert torch.equal(torch.random.get_rng_state(), changed)


def test_a_network_that_is_refused_keeps_no_hooks():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4, track_running_stats=False))
    with pytest.raises(UnsupportedNetworkError):
        smoothing.check(model, X, 10.0)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())

"""What does not fit together is refused by name before any work, and what merely looks odd is not refused."""

import pytest
import torch

import palimpsest as pal
from palimpsest.errors import InvalidInputError, NoGradientError, NonFiniteError

MODEL = pal.networks.MLP(4, (5,))
X, Λ, Y = torch.randn(3, 4), torch.ones(3), torch.tensor([1, -1, 1])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((torch.randn(3, 5), Λ, Y), "does not take images of shape 5"),
        ((X, torch.ones(2), Y), "multipliers have shape"),
        ((X, torch.ones(3, 2), Y), "multipliers have shape"),
        ((X, Λ, torch.tensor([1, 0, 1])), "each −1 or 1"),
        ((X, Λ, torch.tensor([1, -1])), "3 labels"),
        ((X, Λ, None), "3 labels"),
        ((X[:0], Λ[:0], Y[:0]), "at least one"),
        ((X.double(), Λ, Y), "float64"),
    ],
)
def test_what_does_not_fit_together_is_refused(arguments, reason):
    with pytest.raises(InvalidInputError, match=reason):
        pal.KKT(MODEL, sharpness=10.0).loss(*arguments)


@pytest.mark.parametrize("labels", [torch.tensor([0, 1, 3]), torch.tensor([0, -1, 2]), torch.tensor([0.0, 1.0, 2.0])])
def test_class_labels_out_of_range_are_refused(labels):
    with pytest.raises(InvalidInputError, match="from 0 to 2"):
        pal.MulticlassKKT(pal.networks.MLP(4, (5,), outputs=3)).loss(X, Λ, labels)


def test_methods_and_outputs_must_match():
    with pytest.raises(InvalidInputError, match="one output"):
        pal.KKT(pal.networks.MLP(4, (5,), outputs=3)).loss(X, Λ, Y)
    with pytest.raises(InvalidInputError, match="one output per class"):
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
    with pytest.raises(NoGradientError, match="no trainable parameter"):
        pal.KKT(pal.networks.MLP(4, (5,)).requires_grad_(False))

    class Deaf(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.unused = torch.nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x.sum(1, keepdim=True)

    with pytest.raises(NoGradientError, match="receives a gradient"):
        pal.KKT(Deaf()).loss(X, Λ, Y)


def test_only_a_network_that_ignores_its_weights_is_refused():
    """Neither a dead first candidate nor outputs that sum to one are a reason."""
    torch.manual_seed(0)
    softmax = torch.nn.Sequential(pal.networks.MLP(4, (5,), outputs=3), torch.nn.Softmax(dim=1))
    assert pal.KKT(softmax, signed=True).loss(X, torch.ones(3, 3)).isfinite()
    dead_at_zero = pal.networks.MLP(4, (5,), bias="none")
    assert pal.KKT(dead_at_zero).loss(torch.cat([0 * X[:1], X[1:]]), Λ, Y).isfinite()


def test_unchanged_weights_have_nothing_to_say():
    with pytest.raises(InvalidInputError, match="clone the state dict"):
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

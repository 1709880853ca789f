"""Files and options that are wrong are noticed: swapped weights, classes in another order, another scale."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import palimpsest as pal
from palimpsest.auditing.doubts import FitToClasses, doubts
from palimpsest.auditing.subject import subject
from palimpsest.auditing.truth import accuracy

SHAPE = (1, 8, 8)


def network(outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, outputs))


def fitted(outputs, *, mean=0.5, std=1.0):
    """A network that fits 20 digits, its initial weights, and the truth about it."""
    data = pal.datasets.load("digits", per_class=20 // max(2, outputs), held_out_per_class=4, seed=0,
                             task="classes" if outputs > 1 else "binary")  # fmt: skip
    torch.manual_seed(0)
    model, labels = network(outputs), (data.train.labels if outputs > 1 else (data.train.labels > 0).long())
    initial = {name: t.clone() for name, t in model.state_dict().items()}
    truth = pal.auditing.Truth(data.train.images, labels, data.held_out.images, mean=mean, std=std)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(150):
        optimiser.zero_grad()
        Φ = model(truth.seen)
        (
            nn.functional.cross_entropy(Φ, labels) if outputs > 1 else (Φ[:, 0] - 2 * labels + 1).square().mean()
        ).backward()
        optimiser.step()
    return initial, model.state_dict(), truth


FITTED = {outputs: fitted(outputs) for outputs in (1, 10)}


def examined(outputs, **given):
    initial, final, truth = FITTED[outputs]
    given = {"weights": final, "initial": initial, "truth": truth} | given
    ours = subject(lambda: network(outputs), given["weights"], initial=given["initial"], image_shape=SHAPE)
    return doubts(ours, given["truth"])


@pytest.mark.parametrize("outputs", [1, 10])
def test_right_files_raise_no_doubt(outputs):
    assert examined(outputs) == ()
    assert examined(outputs, initial=None) == examined(outputs, truth=None) == ()


@pytest.mark.parametrize("scale", [(0.0, 1.0), (0.5, 0.5), (0.1307, 0.3081)])
def test_other_scales_of_training_raise_no_doubt_if_they_are_given(scale):
    initial, final, truth = fitted(1, mean=scale[0], std=scale[1])
    assert doubts(subject(lambda: network(1), final, initial=initial, image_shape=SHAPE), truth) == ()


@pytest.mark.parametrize("outputs", [1, 10])
def test_swapped_weights_are_noticed(outputs):
    initial, final, _ = FITTED[outputs]
    (doubt,) = examined(outputs, weights=initial, initial=final)
    assert "swapped" in doubt


def test_initial_weights_of_a_later_epoch_are_noticed_without_images(tmp_path):
    initial, final, _ = FITTED[1]
    for epoch, state in ((0, initial), (7, final)):
        torch.save({"epoch": epoch, "state_dict": state}, tmp_path / f"{epoch}.pt")
    (doubt,) = examined(1, weights=tmp_path / "0.pt", initial=tmp_path / "7.pt", truth=None)
    assert "swapped" in doubt
    assert examined(1, weights=tmp_path / "7.pt", initial=tmp_path / "0.pt", truth=None) == ()


def test_classes_in_another_order_are_noticed():
    truth = FITTED[10][2]
    order = torch.tensor([3, 1, 2, 0, 4, 5, 6, 7, 9, 8])
    (doubt,) = examined(10, truth=replace(truth, labels=order[truth.labels]))
    assert all(f"class {y} may be output {int(order[y])}" in doubt for y in (0, 3, 8))
    shifted = examined(10, truth=replace(truth, labels=(truth.labels + 1) % 10))
    assert len(shifted) == 1
    (exchanged,) = examined(1, truth=replace(FITTED[1][2], labels=1 - FITTED[1][2].labels))
    assert "exchanged" in exchanged


@pytest.mark.parametrize(("outputs", "mean"), [(1, 0.0), (10, -2.0)])
def test_a_wrong_mean_is_noticed(outputs, mean):
    (doubt,) = examined(outputs, truth=replace(FITTED[outputs][2], mean=mean))
    assert "--mean" in doubt
    assert ("0.5 and" in doubt) == (outputs == 1)  # several fit ten classes


def test_images_that_were_not_trained_on_raise_no_doubt_about_other_files():
    torch.manual_seed(0)
    for seed in range(5):
        labels = torch.arange(20) % 10
        noise = pal.auditing.Truth(torch.rand(20, *SHAPE), labels, mean=0.5)
        assert examined(10, truth=noise) == ()
        assert examined(1, truth=replace(noise, labels=labels % 2)) == (), seed


def test_the_fit_does_not_depend_on_scale_or_order():
    torch.manual_seed(0)
    outputs, labels = torch.randn(30, 3), torch.arange(30) % 3
    plain, scaled = FitToClasses.of(outputs, labels), FitToClasses.of(5 * outputs + 1, labels)
    assert plain.scatter == pytest.approx(scaled.scatter)
    assert plain.scatter == pytest.approx(FitToClasses.of(outputs, (labels + 1) % 3).scatter)
    Φ = outputs.double()
    inside = sum(float((Φ[labels == y] - Φ[labels == y].mean(0)).square().sum()) for y in range(3))
    assert plain.scatter == pytest.approx(inside / float((Φ - Φ.mean(0)).square().sum()))
    assert FitToClasses.of(torch.ones(4, 1), torch.tensor([0, 0, 1, 1])).scatter == 1


def test_doubts_are_on_the_first_page_in_the_log_and_in_the_record(tmp_path, caplog):
    initial, final, truth = FITTED[1]
    few = {"candidates": 4, "steps": 3, "restarts": 2, "tangents": 1, "control_steps": 1, "controls": False}
    with caplog.at_level("INFO", "palimpsest"):
        found = pal.audit(lambda: network(1), initial, initial=final, image_shape=SHAPE, truth=truth,
                          out=tmp_path / "audit", rungs=["W0"], **few)  # fmt: skip
    (doubt,) = found.doubts
    assert doubt in caplog.text
    assert pal.auditing.load(tmp_path / "audit").doubts == [doubt]
    page = found.report.read_text()
    assert 0 < page.index(doubt) < page.index('id="summary"')
    assert any(doubt in line for line in found.summary)


@pytest.mark.parametrize("either_way", [True, False])
def test_the_best_threshold_is_that_of_brute_force(either_way):
    random = torch.Generator().manual_seed(0)
    outputs = torch.randn(50, 1, generator=random).mul(3).round()  # with ties
    labels = 2 * torch.randint(2, (50,), generator=random) - 1
    shares = [((outputs[:, 0] >= t) == (labels > 0)).double().mean() for t in outputs[:, 0]]
    shares += [1 - share for share in shares] if either_way else []
    assert accuracy(outputs, labels, either_way=either_way) == pytest.approx(float(max(shares)))


def test_the_accuracy_of_many_images_takes_little_memory():
    assert accuracy(torch.linspace(-1, 1, 200_000)[:, None], torch.ones(200_000)) == 1.0  # 320 GB by pairs


@pytest.mark.parametrize("last", [nn.Sigmoid(), nn.Tanh()])
def test_outputs_that_saturate_raise_no_doubt_about_the_scale(last):
    truth = FITTED[1][2]

    def saturating():
        return nn.Sequential(network(1), copy.deepcopy(last))

    torch.manual_seed(0)
    model = saturating()
    initial, y = copy.deepcopy(model.state_dict()), truth.labels_for(1).float()
    y = y.clamp_min(0) if isinstance(last, nn.Sigmoid) else y
    rule = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(200):
        rule.zero_grad()
        nn.functional.mse_loss(model(truth.seen)[:, 0], y).backward()
        rule.step()
    assert truth.accuracy(model) == 1
    assert doubts(subject(saturating, model.state_dict(), initial=initial, image_shape=SHAPE), truth) == ()

"""Measures that lower the risk: the experiment behind them, its tables, and those that a report lists."""

import json
from dataclasses import replace
from pathlib import Path

import advice
import pytest
import torch

import palimpsest as pal
from palimpsest.auditing.advice import measured

ROOT = Path(__file__).parents[1]
SMALL = replace(advice.DENSE, width=16)


@pytest.mark.parametrize(
    "measure", ["none", "train the last two", "weight decay 0.01", "noise as large", "DP-SGD, ε = 8"]
)
def test_a_small_version_reads_every_rung_of_a_measure(measure):
    (chosen,) = [each for each in advice.MEASURES if each.says.startswith(measure)]
    if chosen.ε is not None:
        pytest.importorskip("opacus")
    row = advice.read(SMALL, 0, chosen, chosen.rungs, steps=1, epochs=8)
    assert tuple(row["rungs"]) == chosen.rungs
    assert (row["rungs"]["W0"]["ways"] > 1) == (chosen.layers is None)  # a frozen first layer does not show directions
    assert row["accuracy"].keys() == {"training", "held out"}


def test_a_measure_changes_what_it_says():
    data = pal.datasets.load("faces", per_class=2, seed=0)

    def left(**changes):
        return advice.trained(SMALL, data, 0, advice.Measure("", **changes), epochs=3)

    plain, frozen, noisy = left(), left(layers=1), left(noise=1.0)
    moved = {name for name, t in frozen.states[0].items() if not torch.equal(t, frozen.states[-1][name])}
    assert moved == {"layers.2.weight"}
    assert all(torch.equal(plain.states[0][name], t) for name, t in noisy.states[0].items())
    assert not torch.equal(plain.states[-1]["layers.0.weight"], noisy.states[-1]["layers.0.weight"])
    assert torch.equal(noisy.model.state_dict()["layers.0.weight"], noisy.states[-1]["layers.0.weight"])


def test_the_recipe_tells_what_weight_decay_left_of_the_start():
    """Outside the span of the images, the first layer is c times its start."""
    data = pal.datasets.load("faces", per_class=2, seed=0)
    left = advice.trained(SMALL, data, 0, advice.Measure("", weight_decay=0.1, epochs=40), epochs=40)
    assert left.kept[-1] < 0.95
    ((start, end),) = left.segments(1)
    rows = end["layers.0.weight"] - start["layers.0.weight"]
    assert torch.linalg.matrix_rank(rows, rtol=1e-4) <= len(data.train)
    (_, middle), (again, _) = left.segments(2)
    c = left.kept[-1] / left.kept[next(i for i, s in enumerate(left.states) if s is middle)]
    assert torch.allclose(again["layers.0.weight"], c * middle["layers.0.weight"])


def row(measure, seed, accuracy, **rungs):
    counts = {rung: {"recovered": count, "commit": "c"} for rung, count in rungs.items()}
    return {"network": "dense", "measure": measure, "seed": seed, "images": 40, "rungs": counts,
            "accuracy": {"held out": accuracy, "training": 1.0}}  # fmt: skip


def test_a_measure_is_compared_with_the_same_seeds():
    rows = [row("none", 1, 0.9, W=0, W0=20, O=10), row("none", 2, 0.8, W=1, W0=40, O=12)]
    rows += [row("full batches", 2, 0.7, W0=30)]
    found = advice.shipped(rows)["rungs"]
    ours = {"before": [40, 40], "after": [30, 40], "accuracy": [0.8, 0.7]}
    both = {"before": [30, 40], "after": [0.5, 40], "accuracy": [0.85, 0.85]}
    assert found["W0"] == [
        {"measure": "withhold the initial weights and the seed", "networks": {"dense": both}},
        {"measure": "full batches", "networks": {"dense": ours}},
    ]
    assert [each["measure"] for each in found["O"]] == ["strip the optimiser's state"]
    assert found["C"] == []


def test_the_tables_are_those_of_the_results():
    rows = json.loads((ROOT / "docs" / "results" / "advice.json").read_text(encoding="utf-8"))
    assert measured() == advice.shipped(rows)["rungs"]
    assert advice.page(rows) in (ROOT / "docs" / "lowering-the-risk.md").read_text(encoding="utf-8")


def test_weights_that_opacus_saved_are_read(tmp_path):
    """The file of its engine, whose entries have other names, and the optimiser's state in it."""
    opacus = pytest.importorskip("opacus")
    model = pal.networks.MLP(4, (8,))
    pictures = torch.utils.data.TensorDataset(torch.randn(6, 4), torch.ones(6))
    engine = opacus.PrivacyEngine(accountant="rdp")
    private, rule, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), noise_multiplier=1.0,
        data_loader=torch.utils.data.DataLoader(pictures, batch_size=6), max_grad_norm=1.0,
    )  # fmt: skip
    for x, y in loader:
        (private(x).flatten() - y).square().mean().backward()
        rule.step()
    engine.save_checkpoint(path=tmp_path / "net.pt", module=private, optimizer=rule)
    found = pal.weights.find(tmp_path / "net.pt")
    assert found.tensors.keys() == pal.networks.MLP(4, (8,)).state_dict().keys()
    assert pal.moments(pal.networks.MLP(4, (8,)), found.optimiser).keys() == found.tensors.keys()

"""Networks in use: every kind of network is trained and read once, and a part that exists is not made again."""

import json

import pytest
import torch
from networks_in_use import networks, reading, training
from networks_in_use.command import main
from networks_in_use.rows import ROWS

KINDS = {row.kind: name for name, row in ROWS.items()}
CHOSEN = [*KINDS.values(), "mlp-momentum", "mlp-decay-1e-3-shrunk", "mlp-decay-1e-3-kkt-signed", "resnet-20-live"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("networks-in-use")


def run(folder, *options):
    return main(["--small", "--results", str(folder / "results"), "--scratch", str(folder), *options])


@pytest.mark.parametrize("name", dict.fromkeys(CHOSEN))
def test_a_row_is_trained_read_and_scored(name, folder):
    assert run(folder, "--rows", name, "--seeds", "1") == 0
    part = json.loads((folder / "results" / f"{name}-seed1.json").read_text())
    assert part["row"] == name
    assert part["n"] == len(part["ssim"]) == len(part["held-out ssim"])
    assert part["training"]["last loss"] < part["training"]["first loss"]
    assert {"command", "commit", "recovered", "verdict"} <= set(part)
    assert ("ssim as SimuDy measures it" in part) == name.startswith("resnet")


def test_a_part_that_exists_is_left_alone(folder, capsys):
    for _ in range(2):
        assert run(folder, "--rows", "vit", "--seeds", "2") == 0
    assert capsys.readouterr().out.count("vit seed 2") == 1
    assert run(folder, "--table") == 0
    assert ROWS["vit"].says in capsys.readouterr().out


def test_nothing_is_begun_after_the_deadline(folder):
    assert run(folder, "--rows", "vit", "--seeds", "0", "--seconds", "-1") == 0
    assert not (folder / "results" / "vit-seed0.json").exists()


def test_seeds_share_no_image():
    rows = [training.load(ROWS["cnn-50"].small(), seed) for seed in (*training.REPORTED, training.TUNING)]
    every = torch.cat([part.flatten(1) for images in rows for part in (images.train, images.held_out)])
    assert len(every.unique(dim=0)) == len(every) == 8 * 10


def test_only_the_new_parts_of_a_fine_tuned_network_are_trained(folder):
    trained = {}
    for name in ("head", "lora", "fine-tuned"):
        row = ROWS[name].small()
        training.pretrain(row, folder, torch.device("cpu"))
        model = training.before(row, 0, folder)
        trained[name] = {key for key, p in model.named_parameters() if p.requires_grad}
    assert trained["head"] == {f"{layer}.{part}" for layer in (5, 7) for part in ("weight", "bias")}
    assert {key.split(".")[-1] for key in trained["lora"]} == {"A", "B"}
    assert len(trained["fine-tuned"]) == 8


def test_an_adapter_starts_as_the_network_itself():
    torch.manual_seed(0)
    model, x = networks.perceptron(16, 4), torch.randn(2, 3, 16, 16)
    expected = model(x)
    torch.testing.assert_close(networks.with_adapters(model)(x), expected)


def test_the_shrunk_start_explains_what_weight_decay_left():
    row = ROWS["mlp-decay-1e-3-shrunk"].small()
    torch.manual_seed(0)
    initial = networks.perceptron(16, 8).state_dict()
    model = networks.perceptron(16, 8)
    rows = torch.randn(64, 3) @ torch.randn(3, 3 * 16 * 16)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(0.9 * initial[name] + (0.01 * rows if name == "layers.0.weight" else 0))
    _, _, facts = reading.objective_of(model, [initial, model.state_dict()], row.reading)
    assert facts["shrinkage"] == pytest.approx(0.9, abs=1e-4)


def test_checkpoints_are_equally_far_from_each_other():
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    trail = training.Trail(model)
    with torch.no_grad():
        for step in range(1000):
            model.weight += 1 / (1 + step)  # fast at first, and slower later
            trail.look()
    assert len(trail.kept) <= trail.MOST
    start, middle, end = (float(state["weight"]) for state in trail.checkpoints(2))
    assert start == 0
    assert end == model.weight
    assert middle == pytest.approx(end / 2, abs=0.3)


def test_simudys_measure_matches_each_candidate_once():
    torch.manual_seed(0)
    truth = torch.rand(3, 3, 16, 16) - 0.5
    assert reading.simudy(truth.flip(0), truth) == pytest.approx([1.0] * 3)
    twice = reading.simudy(truth[[0, 0]], truth)
    assert twice[0] == pytest.approx(1.0)
    assert sum(value > 0.9 for value in twice) == 1

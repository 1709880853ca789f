"""Inputs that people have: files as training scripts leave them, images of all shapes, and material that is wrong."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import palimpsest as pal
from palimpsest.auditing.subject import factory, subject
from palimpsest.auditing.truth import load
from palimpsest.cli.main import main

SHAPE = (3, 6, 10)
CODE = """
from torch import nn

def make(num_classes, width=4):
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
                         nn.Linear(4 * width, num_classes))
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with the code of a network."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zoo_of_inputs.py").write_text(CODE)
    return tmp_path


def make(num_classes=10, width=4):
    return factory("zoo_of_inputs.py:make")(num_classes=num_classes, width=width)


def moved(weights, size=0.01):
    return {name: t + size * torch.randn_like(t) for name, t in weights.items()}


# --- files of weights ----------------------------------------------------------------------------


def training_checkpoint(weights):
    model = make()
    model.load_state_dict(weights)
    optimiser = torch.optim.Adam(model.parameters())
    model(torch.rand(2, *SHAPE)).sum().backward()
    state = copy.deepcopy(model.state_dict())
    optimiser.step()
    return {"epoch": 3, "state_dict": state, "optimizer": optimiser.state_dict(), "best": 0.9, "args": {"lr": 0.1}}


def sharded(weights):
    names = list(weights)
    shards = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    for shard, held in shards.items():
        save_file({name: weights[name] for name in held}, shard)
    places = {name: shard for shard, held in shards.items() for name in held}
    Path("model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return "model.safetensors.index.json"


def saved(content):
    torch.save(content, "final.pt")
    return "final.pt"


def prefixed(weights, prefix):
    return {prefix + name: t for name, t in weights.items()}


FORMS = {
    "a training checkpoint": (lambda w: saved(training_checkpoint(w)), "entry 'state_dict'"),
    "module.": (lambda w: saved(prefixed(w, "module.")), "without the prefix module."),
    "_orig_mod.": (lambda w: saved({"model": prefixed(w, "_orig_mod.")}), "without the prefix _orig_mod."),
    "both": (lambda w: saved(prefixed(w, "_orig_mod.module.")), "_orig_mod.module."),
    "half": (lambda w: saved({n: t.half() for n, t in w.items()}), "converted from float16"),
    "bfloat16": (lambda w: save_file({n: t.bfloat16() for n, t in w.items()}, "final.safetensors"), "from bfloat16"),
    "shards": (sharded, "model.safetensors.index.json"),
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_read_as_people_have_them_and_that_is_said(form, place):
    torch.manual_seed(0)
    weights, (write, remark) = make().state_dict(), FORMS[form]
    ours = subject(
        "zoo_of_inputs:make", write(weights) or "final.safetensors", network_args={"num_classes": 10}, image_shape=SHAPE
    )
    exact = form not in ("half", "bfloat16")
    for name, t in ours.model.state_dict().items():
        assert torch.allclose(t, weights[name], rtol=0, atol=0 if exact else 0.01)
        assert t.dtype is torch.float32
    assert any(remark in each for each in ours.remarks)
    assert (ours.moment is not None) == (form == "a training checkpoint")


FEW = "--candidates 2 --steps 2 --restarts 2 --tangents 1 --control-steps 1 --no-controls --device cpu".split()
ZOO = ["--network", "zoo_of_inputs:make", "--network-args", '{"num_classes": 10}']


@pytest.mark.parametrize("form", FORMS)
def test_each_of_them_is_audited_by_the_command(form, place):
    torch.manual_seed(0)
    write, remark = FORMS[form]
    file = write(make().state_dict()) or "final.safetensors"
    words = ["audit", *ZOO, *FEW, "--weights", file, "--shape", "3,6,10", "--out", "audit", "--rungs", "W"]
    assert main(words) == 0
    assert remark in Path("audit/log.txt").read_text()
    assert file.rpartition("/")[2] in Path("audit/report.html").read_text()


@pytest.mark.parametrize(("size", "mode"), [((10, 6), "L"), ((6, 10), "RGB"), ((64, 64), "RGB")])
def test_pictures_of_each_size_are_read_from_their_files(size, mode, place):
    torch.manual_seed(0)
    initial = make().state_dict()
    torch.save(initial, "start.pt")
    torch.save(moved(initial), "final.pt")
    for folder, count in (("train", 4), ("other", 8)):
        pictures(folder, mode=mode, size=size, count=count, seed=count)
    files = "--weights final.pt --initial start.pt --data train --held-out other --rungs W0 --out audit".split()
    assert main(["audit", *ZOO, *FEW, "--shape", f"3,{size[1]},{size[0]}", *files]) == 0
    record = pal.auditing.load("audit")
    assert record.inputs.image_shape == (3, size[1], size[0])
    assert record.images.total == 4


def test_a_pickled_network_is_refused_with_the_lines_that_convert_it(place, capsys):
    torch.save(nn.Sequential(nn.Flatten(), nn.Linear(180, 1)), "whole.pt")
    assert main(["audit", "--network", "zoo_of_inputs:make", "--weights", "whole.pt", "--shape", "3,6,10",
                 "--network-args", '{"num_classes": 10}', "--out", "audit"]) == 2  # fmt: skip
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "torch.load('whole.pt', weights_only=False)" in told
    assert "torch.save(saved.state_dict(), 'whole-weights.pt')" in told


# --- images --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 7, 7), (3, 5, 9), (1, 9, 4), (3, 64, 64), (3, 224, 224)])
def test_grey_colour_oblong_and_large_images_are_audited(shape, tmp_path):
    def network():
        pooled = nn.Sequential(nn.Conv2d(shape[0], 2, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return pooled.append(nn.Linear(2, 1))

    torch.manual_seed(0)
    initial = network().state_dict()
    labels = torch.arange(4) % 2
    truth = pal.auditing.Truth(torch.rand(4, *shape), labels, torch.rand(4, *shape))
    few = {"candidates": 3, "steps": 2, "restarts": 2, "tangents": 1, "control_steps": 1}
    found = pal.audit(network, moved(initial), initial=initial, image_shape=shape, truth=truth, out=tmp_path / "audit",
                      controls=max(shape) < 20, **few)  # fmt: skip
    assert found.candidates.shape[1:] == shape
    assert found.report.stat().st_size > 1000
    assert len((tmp_path / "audit" / "images.csv").read_text().splitlines()) == 5


def pictures(folder, *, mode="RGB", size=(10, 6), count=4, seed=0):
    """Two classes of pictures, all different."""
    for i in range(count):
        path = Path(folder, f"class {i % 2}", f"{i}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng([seed, i]).integers(0, 256, (size[1], size[0]), dtype=np.uint8)
        image = Image.fromarray(pixels)
        if mode == "RGB":
            image = Image.merge("RGB", [image, image.rotate(180), image])
        image.convert(mode).save(path)
    return folder


def read(folder, shape=SHAPE, held_out=None):
    return load(str(folder), held_out, mean="0", std="1", image_shape=shape)


def test_grey_files_serve_a_network_that_sees_colour_and_the_reverse_if_nothing_is_lost(place):
    grey = read(pictures("grey", mode="L"))
    assert grey.images.shape == (4, *SHAPE)
    assert torch.equal(grey.images[:, 0], grey.images[:, 2])
    np.savez("equal.npz", images=grey.images.numpy(), labels=np.arange(4) % 2)
    assert torch.equal(read("equal.npz", (1, 6, 10)).images, grey.images[:, :1])
    with pytest.raises(pal.errors.DataError, match="grey"):
        read(pictures("colour"), (1, 6, 10))


def test_copies_among_the_training_images_count_once_and_keep_their_names(place, caplog):
    pictures("train")
    Image.open("train/class 0/0.png").save("train/class 1/copy.png")
    with caplog.at_level("INFO", "palimpsest"):
        truth = read("train")
    assert len(truth.images) == len(truth.labels) == 4
    assert truth.names[0] == "class 0/0.png = class 1/copy.png"
    assert caplog.text.count("\n") == 1
    assert "1 of 5" in caplog.text
    with pytest.raises(pal.errors.InvalidInputError, match="3 equals training image 1"):
        pal.auditing.Truth(truth.images[[0, 1, 0]], torch.arange(3))


# --- material that is wrong ----------------------------------------------------------------------


def foreign_checkpoints(weights, other):
    for number, state in enumerate((weights["start"], moved(other), weights["middle"])):
        torch.save(state, f"epoch-{number}.pt")
    return ["--checkpoints", "epoch-*.pt"]


def foreign_series(weights, other):
    for number in range(3):
        torch.save(moved(other), f"epoch-{number}.pt")
    return ["--checkpoints", "epoch-*.pt"]


def foreign_client(weights, other):
    torch.save(weights["start"], "round-1-global.pt")
    torch.save(other, "round-1-client.pt")
    return ["--updates", "round-*.pt"]


def foreign_rounds(weights, other):
    torch.save(other, "round-1-global.pt")
    torch.save(moved(other), "round-1-client.pt")
    return ["--updates", "round-*.pt"]


def truncated(weights, other):
    Path("half.pt").write_bytes(Path("final.pt").read_bytes()[:1500])
    return ["--weights", "half.pt"]


def truncated_image(weights, other):
    path = Path(pictures("train"), "class 1", "1.png")
    path.write_bytes(path.read_bytes()[:60])
    return ["--data", "train"]


def empty(option):
    def folder(weights, other):
        Path("empty").mkdir()
        return [option, "empty"]

    return folder


def hostile_index(weights, other):
    Path("elsewhere").mkdir()
    save_file(weights["end"], "elsewhere/secret.safetensors")
    Path("shards").mkdir()
    places = dict.fromkeys(weights["end"], "../elsewhere/secret.safetensors")
    Path("shards/model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return ["--weights", "shards"]


def missing_shard(weights, other):
    save_file({"0.weight": weights["end"]["0.weight"]}, "model-1.safetensors")
    places = {name: f"model-{1 + (name != '0.weight')}.safetensors" for name in weights["end"]}
    Path("model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return ["--weights", "model.safetensors.index.json"]


def overflowed(weights, other):
    torch.save({name: (1e6 * t).half() for name, t in weights["end"].items()}, "half.pt")
    return ["--weights", "half.pt"]


WRONG = {
    "shards of another folder": (hostile_index, "index.json"),
    "a missing shard": (missing_shard, "model-2.safetensors"),
    "half precision that overflowed": (overflowed, "infinity"),
    "arguments that are no object": (lambda *_: ["--network-args", "[10]"], "--network-args"),
    "arguments that do not fit": (lambda *_: ["--network-args", '{"classes": 10}'], "classes"),
    "a checkpoint of another training": (foreign_checkpoints, "epoch-1.pt"),
    "checkpoints of another training": (foreign_series, "epoch-2.pt"),
    "a client of another training": (foreign_client, "round 1"),
    "rounds of another training": (foreign_rounds, "round-1-global.pt"),
    "truncated weights": (truncated, "half.pt"),
    "a truncated image": (truncated_image, "1.png"),
    "no weights": (empty("--weights"), "empty"),
    "no checkpoints": (empty("--checkpoints"), "empty"),
    "no updates": (empty("--updates"), "empty"),
    "no images": (empty("--data"), "empty"),
    "channels last": (lambda *_: ["--shape", "20,20,3"], "3,20,20"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_material_is_told_in_one_sentence(name, place, capsys):
    torch.manual_seed(0)
    start = make(width=8).state_dict()
    weights = {"start": start, "middle": moved(start), "end": moved(start)}
    torch.save(weights["end"], "final.pt")
    wrong, mentioned = WRONG[name]
    words = ["audit", "--network", "zoo_of_inputs:make", "--network-args", '{"num_classes": 10, "width": 8}']
    words += [
        "--shape",
        "3,6,10",
        "--weights",
        "final.pt",
        "--out",
        "audit",
        *wrong(weights, make(width=8).state_dict()),
    ]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert mentioned in told
    assert not Path("audit").exists()


def test_a_head_that_starts_at_zero_and_few_weights_are_no_other_training(place):
    start = {"0.weight": torch.zeros(1, 180), "0.bias": torch.zeros(1)}
    few = [{name: t + size for name, t in start.items()} for size in (0.0, 0.1, 0.2)]
    ours = subject(
        lambda: nn.Sequential(nn.Linear(180, 1), nn.Flatten()), few[-1], checkpoints=few[:2], image_shape=(1, 1, 180)
    )
    assert len(ours.segments) == 2

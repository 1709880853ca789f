"""Membership: networks with known images, the command, and wrong files."""

import csv
import json
import os
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import palimpsest as pal
from audited import SHAPE, mlp, pooled, trained
from palimpsest.auditing import exchange, traces
from palimpsest.auditing import given as reading
from palimpsest.cli.main import main
from palimpsest.errors import DataError, InvalidInputError, NonFiniteError
from palimpsest.scoring import Outcome

F64 = torch.float64


@pytest.fixture(scope="module")
def data():
    return pal.datasets.load("digits", per_class=8, held_out_per_class=120, seed=3)


def cnn():
    """Its dense layers see features, which move during training."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 48), nn.ReLU(), nn.Linear(48, 1)
    )


# --- networks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
@pytest.mark.parametrize(("make", "layer"), [(mlp, "layers.0"), (cnn, "3")])
def test_training_images_are_told_from_others(make, layer, optimiser, data):
    torch.manual_seed(0)
    model = make()
    initial = {name: t.clone() for name, t in model.state_dict().items()}
    x, y = data.train.images - 0.5, data.train.labels.float()
    if optimiser == "adam":
        rule = torch.optim.Adam(model.parameters(), lr=1e-3)
    else:
        rule = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for _ in range(60):
        rule.zero_grad()
        (model(x).flatten() - y).square().mean().backward()
        rule.step()
    found = pal.auditing.membership(
        make, model.state_dict(), data.train.images, data.held_out.images, initial=initial, mean=0.5
    )
    assert (found.statistic, found.layer) == ("span", layer)
    assert float(found.named.double().mean()) >= (0.9 if optimiser == "sgd" else 0.25)  # 64 pixels are few
    assert found.outcome == "leakage"
    assert found.rates.named[0.001] is None


@pytest.mark.parametrize("statistic", ["span", "gradients"])
def test_images_that_the_network_never_saw_rank_anywhere(statistic, data):
    initial, final = trained(mlp, data, steps=30)
    unseen, held_out = data.held_out.images[::2], data.held_out.images[1::2]
    found = pal.auditing.membership(mlp, final, unseen, held_out, initial=initial, mean=0.5, statistic=statistic)
    assert found.outcome == "no evidence"
    assert int(found.named.sum()) <= 5  # 1.2 expected of 120
    assert found.rates.verdict.auc == pytest.approx(0.5, abs=0.12)


def test_networks_without_a_wide_dense_layer_are_read_by_their_gradients(data):
    initial, final = trained(pooled, data, steps=30)
    found = pal.auditing.membership(
        pooled, final, data.train.images, data.held_out.images[:60], initial=initial, mean=0.5
    )
    assert (found.statistic, found.layer) == ("gradients", None)
    assert bool((found.traces >= 0).all())
    with pytest.raises(InvalidInputError, match="dense layer"):
        pal.auditing.membership(pooled, final, data.train.images, data.held_out.images, initial=initial,
                                statistic="span")  # fmt: skip


class Normed(nn.Module):
    """Divides by the length of the image, which a black one does not have."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x):
        return self.layers(x / x.flatten(1).norm(dim=1)[:, None, None, None])


@pytest.mark.parametrize(("width", "more"), [(40, {}), (4, {}), (4, {"loss": "squared", "initial": None})])
def test_an_image_from_which_the_network_computes_nan_is_refused(width, more, data):
    torch.manual_seed(0)
    initial = Normed(width).state_dict()
    final = {name: t + 0.1 * torch.randn_like(t) for name, t in initial.items()}
    images, held_out = data.held_out.images[:20], data.held_out.images[20:60].clone()
    held_out[5] = 0
    both = [pal.auditing.Given(some, labels=torch.arange(len(some)) % 2) for some in (images, held_out)]
    with pytest.raises(NonFiniteError, match="image 26 of 60"):
        pal.auditing.membership(lambda: Normed(width), final, *both, **{"initial": initial, **more})


def test_a_start_of_another_training_is_refused(data):
    torch.manual_seed(0)
    final, other = pooled().state_dict(), pooled().state_dict()
    with pytest.raises(InvalidInputError, match="unrelated"):
        pal.auditing.membership(pooled, final, data.train.images, data.held_out.images[:60], initial=other, mean=0.5)


class Patched(nn.Module):
    """Its dense layer sees the patches of all images as rows."""

    def __init__(self):
        super().__init__()
        self.dense, self.last = nn.Linear(16, 20), nn.Linear(20, 1)

    def forward(self, x):
        rows = x.unfold(2, 4, 4).unfold(3, 4, 4).reshape(-1, 16)
        return self.last(self.dense(rows).tanh().view(len(x), 4, 20).mean(1))


def test_a_layer_that_sees_patches_as_rows_is_not_used_for_the_span(data):
    initial, final = trained(Patched, data, steps=5)
    given, held_out = data.train.images, data.held_out.images[:40]
    found = pal.auditing.membership(Patched, final, given, held_out, initial=initial, mean=0.5)
    assert (found.statistic, found.layer, len(found.traces)) == ("gradients", None, len(given))
    with pytest.raises(InvalidInputError, match="dense layer"):
        pal.auditing.membership(Patched, final, given, held_out, initial=initial, statistic="span")


def test_checkpoints_give_a_trace_for_each_segment(data):
    initial, middle = trained(mlp, data, steps=10)
    _, final = trained(mlp, data, steps=20)
    states = [initial, {name: t.clone() for name, t in middle.items()}, final]
    found = pal.auditing.membership(mlp, final, data.train.images, data.held_out.images, checkpoints=states, mean=0.5)
    model = mlp()
    model.load_state_dict(final)
    seen = torch.cat([data.train.images, data.held_out.images]) - 0.5
    names = [f"{found.layer}.weight", f"{found.layer}.bias"]
    far = [sum(float((b[n] - a[n]).double().square().sum()) for n in names) for a, b in pairwise(states)]
    each = [traces.traces(model, [pair], seen).values for pair in pairwise(states)]
    expected = sum(e * value for e, value in zip(far, each, strict=True)) / sum(far)
    torch.testing.assert_close(torch.cat([found.traces, found.held_out]), expected)
    assert found.knowledge.endswith("2 parts of the training")


# --- the command --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(data, tmp_path_factory):
    place = tmp_path_factory.mktemp("membership")
    initial, final = trained(mlp, data, steps=60)
    torch.save(initial, place / "start.pt")
    torch.save(final, place / "final.pt")
    (place / "net.py").write_text(
        "import palimpsest as pal\ndef make(): return pal.networks.MLP((1, 8, 8), hidden=(60, 60))\n"
    )
    for name, part in (("given", data.train), ("others", data.held_out)):
        for i, (image, label) in enumerate(zip(part.images, part.labels, strict=True)):
            folder = place / name / ("even" if label < 0 else "odd")
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.uint8(np.round(255 * image[0].numpy()))).save(folder / f"{i:03}.png")
    return place


def command(files, *more, images="given", held_out="others"):
    return main([
        "membership", "--network", f"{files / 'net.py'}:make", "--weights", str(files / "final.pt"), "--shape", "1,8,8",
        "--images", str(files / images), "--held-out", str(files / held_out), "--mean", "0.5", "--device", "cpu", *more,
    ])  # fmt: skip


def test_the_command_writes_a_row_for_each_image(files, tmp_path, capsys):
    out = tmp_path / "out"
    assert command(files, "--initial", str(files / "start.pt"), "--out", str(out)) == 0
    rows = list(csv.DictReader((out / "membership.csv").open()))
    assert len(rows) == 16
    assert {row["image"].split("/")[0] for row in rows} == {"even", "odd"}
    said = json.loads((out / "membership.json").read_text())
    assert said["named"] == sum(row["member_at_0.01"] == "yes" for row in rows) >= 14
    assert said["share_named_at"]["0.001"] == "not resolvable"
    assert said["sentence"] in capsys.readouterr().out
    page = (out / "membership.html").read_text()
    assert page.count("<img") == 16
    assert "polyline" in page


def test_with_the_final_weights_alone_the_loss_is_tested(files, tmp_path):
    for statistic, more in (("loss", ["--loss", "squared"]), ("gradients", [])):
        assert command(files, *more, "--out", str(tmp_path / statistic)) == 0
        assert json.loads((tmp_path / statistic / "membership.json").read_text())["statistic"] == statistic


def test_a_test_is_repeated_but_does_not_overwrite_another(files, tmp_path):
    first = ["--loss", "squared", "--out", str(tmp_path / "out")]
    page = tmp_path / "out" / "membership.html"
    assert command(files, *first) == 0
    page.unlink()
    assert command(files, *first) == 0
    kept = page.read_bytes()
    for other in (["--level", "0.05"], ["--mean", "0.4"], ["--initial", str(files / "start.pt")]):
        assert command(files, *first, *other) == 2
    assert command(files, *first, images="others", held_out="given") == 2
    (tmp_path / "out" / "membership.json").unlink()
    assert command(files, *first) == 2
    assert page.read_bytes() == kept


def test_names_that_are_not_text_are_written(files, tmp_path):
    name = os.fsdecode(b"caf\xe9")
    folder, out = pictures(tmp_path / name, [name, "b"]), tmp_path / f"out {name}"
    assert command(files, "--initial", str(files / "start.pt"), "--out", str(out), images=folder) == 0
    rows = list(csv.DictReader((out / "membership.csv").open(encoding="utf-8")))
    assert [row["image"] for row in rows] == ["b/0.png", "caf\N{REPLACEMENT CHARACTER}/0.png"]


# --- classes -------------------------------------------------------------------------------------


def pictures(place, classes):
    """One image of noise per class, in sub-folders with these names."""
    for i, name in enumerate(classes):
        (place / name).mkdir(parents=True)
        pixels = np.random.default_rng([i, len(place.name)]).integers(0, 256, (8, 8), dtype=np.uint8)
        Image.fromarray(pixels).save(place / name / "0.png")
    return str(place)


def test_sub_folders_of_held_out_images_number_classes_as_in_an_audit(tmp_path):
    names = [str(i) for i in range(11)]
    ours, theirs = pictures(tmp_path / "given", ["10", "9"]), pictures(tmp_path / "others", names)
    given, held_out = reading.load(ours, theirs, image_shape=SHAPE, labelled=True)
    assert held_out.classes == pal.datasets.folder.read(tmp_path / "others").classes == tuple(sorted(names))
    assert given.labels.tolist() == [2, 10]  # after 0 and 1, and last
    with pytest.raises(DataError):
        reading.load(theirs, ours, image_shape=SHAPE, labelled=True)


def test_labels_of_arrays_remain_and_those_that_do_not_fit_are_refused(tmp_path, data):
    wide = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    images = data.held_out.images.numpy()
    for name, labels, rows in (("a", [3, 7], slice(2)), ("b", [7, 3, 3], slice(2, 5)), ("c", [3, 10], slice(5, 7))):
        np.savez(tmp_path / f"{name}.npz", images=images[rows], labels=labels)
    a, b, c = (str(tmp_path / f"{name}.npz") for name in "abc")
    given, held_out = reading.load(a, b, image_shape=SHAPE, labelled=True)
    assert (given.labels.tolist(), held_out.labels.tolist()) == ([3, 7], [7, 3, 3])
    found = pal.auditing.membership(lambda: wide, wide.state_dict(), given, held_out, loss="cross_entropy")
    L = nn.functional.cross_entropy(wide(given.images), torch.tensor([3, 7]), reduction="none").detach().double()
    torch.testing.assert_close(found.traces, torch.log1p(1 / L), rtol=1e-5, atol=0)
    for pair in ((a, c), (c, a)):
        some = reading.load(*pair, image_shape=SHAPE, labelled=True)
        with pytest.raises(InvalidInputError, match="3 to 10"):
            pal.auditing.membership(lambda: wide, wide.state_dict(), *some, loss="cross_entropy")
    folders = pictures(tmp_path / "given", ["3", "7"]), pictures(tmp_path / "others", ["3", "7"])
    some = reading.load(*folders, image_shape=SHAPE, labelled=True)
    with pytest.raises(InvalidInputError, match="2 sub-folders"):  # they would be classes 0 and 1
        pal.auditing.membership(lambda: wide, wide.state_dict(), *some, loss="cross_entropy")
    with pytest.raises(DataError):
        reading.load(a, folders[1], image_shape=SHAPE, labelled=True)


def test_grey_images_fit_a_network_that_sees_colour(tmp_path):
    ours, theirs = pictures(tmp_path / "given", ["a"]), pictures(tmp_path / "others", ["a", "b"])
    given, held_out = reading.load(ours, theirs, image_shape=(3, 8, 8), labelled=False)
    assert given.images.shape == (1, 3, 8, 8)
    assert torch.equal(held_out.images[:, 0], held_out.images[:, 2])
    assert given.labels is None


def test_too_few_held_out_images_name_nobody(files, data, tmp_path):
    np.savez(tmp_path / "few.npz", images=data.held_out.images[:20].numpy())
    out = tmp_path / "out"
    assert command(files, "--initial", str(files / "start.pt"), "--out", str(out), held_out=tmp_path / "few.npz") == 0
    rows = list(csv.DictReader((out / "membership.csv").open()))
    assert {row["member_at_0.01"] for row in rows} == {"not resolvable"}
    assert json.loads((out / "membership.json").read_text())["named"] == 0


WRONG = "--loss cross_entropy", "--statistic loss", "--statistic span", "--level 0", "--std 0", "--shape 1,9,9"
WRONG_FILES = {"held_out": "given"}, {"images": "nowhere"}, {"images": "start.pt"}


@pytest.mark.parametrize(("words", "places"), [*(("", place) for place in WRONG_FILES), *((w, {}) for w in WRONG)])
def test_wrong_use_is_refused_in_one_sentence(words, places, files, tmp_path, capsys):
    assert command(files, "--out", str(tmp_path / "out"), *words.split(), **places) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert [line.startswith("palimpsest: ") for line in lines] == [False] * (len(lines) - 1) + [True]
    assert not (tmp_path / "out").exists()


# --- wrong files and options --------------------------------------------------------------------------


def test_a_wrong_scale_is_noticed_if_it_hides_the_traces(data):
    torch.manual_seed(0)
    fit = pal.train(pooled(), (data.train.images - 0.5) / 0.5, data.train.labels, steps=300)

    def tested(given, mean, std):
        weights = {"initial": fit.initial, "mean": mean, "std": std}
        return pal.auditing.membership(pooled, fit.model.state_dict(), given, data.held_out.images[40:], **weights)

    assert tested(data.train.images, 0.5, 0.5).outcome is Outcome.LEAKAGE
    wrong = tested(data.train.images, 0.1307, 0.3081)
    assert wrong.outcome is Outcome.NO_VERDICT
    assert "0.5 and 0.5" in wrong.doubt
    never_seen = tested(data.held_out.images[:40], 0.1307, 0.3081)
    assert (never_seen.outcome, never_seen.doubt) == (Outcome.NO_EVIDENCE, "")


def test_swapped_weights_leave_the_same_traces(data):
    torch.manual_seed(0)
    fit = pal.train(cnn(), data.train.images - 0.5, data.train.labels, steps=100)
    ends = (fit.model.state_dict(), fit.initial)
    right, swapped = (
        pal.auditing.membership(cnn, end, data.train.images, data.held_out.images, initial=start, mean=0.5)
        for end, start in (ends, ends[::-1])
    )
    torch.testing.assert_close(right.traces, swapped.traces, rtol=1e-4, atol=1e-6)


def test_images_centred_by_their_own_mean_are_not_taken_for_training_images():
    faces = pal.datasets.load("faces", per_class=35, held_out_per_class=50, seed=0)
    images, held_out = faces.train.images, faces.held_out.images
    named = []
    for seed in range(6):
        rows = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
        others, given = images[rows[:20]], images[rows[20:40]]
        torch.manual_seed(seed)
        fit = pal.train(faces_mlp(), others - others.mean(0), faces.train.labels[rows[:20]], steps=100)

        def tested(some, mean, fit=fit):
            return pal.auditing.membership(
                faces_mlp, fit.model.state_dict(), some, held_out, initial=fit.initial, mean=mean
            ).outcome

        named.append(tested(given, given.mean(0)))
        assert tested(others, others.mean(0)) is Outcome.LEAKAGE
    assert named.count(Outcome.LEAKAGE) <= 1


def faces_mlp():
    return pal.networks.MLP((1, 25, 25), hidden=(64,))


def test_only_a_mean_of_the_given_images_is_replaced():
    x = torch.rand(30, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    given, others = x[:10], x[10:]
    for mean in (0.5, given.mean((0, 2, 3)).view(1, 1, 1), others.mean(0), x.mean(0)):
        torch.testing.assert_close(exchange.centred(given, others, mean, 1.0), x - mean)
    torch.testing.assert_close(exchange.centred(given, others, given.mean(0), 1.0), x - x.mean(0))


def test_a_choice_of_images_has_every_class():
    labels = torch.arange(200) % 10
    assert len(labels[exchange.chosen(200, 100)].unique()) == 10
    assert exchange.chosen(5, 100).tolist() == [0, 1, 2, 3, 4]

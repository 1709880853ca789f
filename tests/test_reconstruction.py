"""`pal.reconstruct` as a user calls it, and its result on the disk and in a figure."""

import inspect
from dataclasses import fields

import pytest
import torch

import palimpsest as pal
from palimpsest.errors import CheckpointError, InvalidInputError
from palimpsest.files import storage
from palimpsest.solver.settings import Settings


def run(method=pal.KKT, shape=(1, 4, 4), **options):
    torch.manual_seed(0)
    model = pal.networks.MLP(shape, (6,), outputs=3 if method is pal.MulticlassKKT else 1)
    return pal.reconstruct(method(model), image_shape=shape, candidates=4, steps=6, progress=False, **options)


def test_the_signature_shows_every_setting_with_its_default():
    shown, defaults = inspect.signature(pal.reconstruct).parameters, Settings(candidates=1)
    assert shown["candidates"].default is inspect.Parameter.empty
    for setting in fields(Settings):
        assert setting.name == "candidates" or shown[setting.name].default == getattr(defaults, setting.name)
        assert f"\n        {setting.name}: " in pal.reconstruct.__doc__


def test_a_setting_reaches_the_solver():
    assert [entry["step"] for entry in run(record_every=3).history] == [0, 3]


@pytest.mark.parametrize(("args", "options"), [((), {}), ((4,), {"image_shape": 4, "candidates": 2})])
def test_missing_and_surplus_arguments_are_refused_in_one_sentence(args, options):
    with pytest.raises(InvalidInputError):
        pal.reconstruct(pal.KKT(pal.networks.MLP(4, (3,))), *args, **options)


@pytest.mark.parametrize(
    ("method", "options"),
    [(pal.KKT, {}), (pal.MulticlassKKT, {}), (pal.KKT, {"splitting": pal.Splitting(rounds=1, relative=0.0)})],
    ids=["signed labels", "classes", "split"],
)
def test_a_saved_reconstruction_is_read_back_whole(method, options, tmp_path):
    rec = run(method, **options)
    rec.save(tmp_path / "rec.safetensors")
    loaded = pal.Reconstruction.load(tmp_path / "rec.safetensors")
    for name in ("images", "multipliers", "labels", "ids", "parents", "lineage"):
        torch.testing.assert_close(getattr(loaded, name), getattr(rec, name), rtol=0, atol=0)
    assert (loaded.history, loaded.outcome, loaded.loss) == (rec.history, rec.outcome, rec.loss)
    assert storage.load_tensors(tmp_path / "rec.safetensors")[1]["outcome"] == rec.outcome.name
    assert repr(loaded) == repr(rec)
    assert loaded.ancestors(0) == rec.ancestors(0)


def test_a_loaded_reconstruction_says_that_it_cannot_be_certified(tmp_path):
    run().save(tmp_path / "rec.safetensors")
    loaded = pal.Reconstruction.load(tmp_path / "rec.safetensors")
    with pytest.raises(InvalidInputError, match=r"pal\.certify"):
        _ = loaded.certificate
    with pytest.raises(InvalidInputError):
        loaded.certify(epsilon=1e-6)


def test_a_damaged_reconstruction_is_refused(tmp_path):
    path = tmp_path / "rec.safetensors"
    run().save(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError):
        pal.Reconstruction.load(path)


def test_a_file_of_another_kind_is_refused(tmp_path):
    pal.storage.save_tensors(tmp_path / "other.safetensors", {"images": torch.zeros(2, 1, 4, 4)}, {})
    with pytest.raises(CheckpointError):
        pal.Reconstruction.load(tmp_path / "other.safetensors")


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("with_truth", [False, True])
def test_a_plot_shows_every_candidate_or_every_training_image(channels, with_truth):
    rec = run(shape=(channels, 12, 12))
    options = {"truth": torch.rand(3, channels, 12, 12), "mean": torch.rand(channels, 12, 12)} if with_truth else {}
    pictures = [panel for panel in rec.plot(**options).axes if panel.images]
    assert len(pictures) == (2 * 3 if with_truth else len(rec.images))


def test_candidates_that_are_no_images_are_not_drawn():
    with pytest.raises(InvalidInputError):
        run(shape=(5,)).plot()

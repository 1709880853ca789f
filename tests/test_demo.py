"""The demo command, with tiny sizes."""

from functools import partial

import pytest

import palimpsest as pal
from palimpsest.cli import demo as cli
from palimpsest.cli.main import main
from palimpsest.runs.folder import RunFolder
from palimpsest.runs.reconstruct import ReconstructOptions
from palimpsest.runs.train import TrainOptions


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """Runs the demo on four digits, in one folder."""
    training = partial(TrainOptions, data="digits", per_class=2, hidden=(5,), steps=3)
    monkeypatch.setattr(cli, "TrainOptions", training)
    monkeypatch.setattr(cli, "ReconstructOptions", partial(ReconstructOptions, candidates=4, steps=16))
    return lambda *words: main(["demo", "--out", str(tmp_path / "demo"), *words])


def test_the_demo_trains_reads_and_reports(demo, tmp_path):
    assert demo() == 0
    folder = RunFolder(tmp_path / "demo")
    assert folder.variants().keys() == {"without", "with"}
    assert (folder.path / "report.html").stat().st_size > 0


def test_the_demo_goes_on_where_it_was_interrupted(demo, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(cli.Report, "run", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        assert demo() == 1
    before = (tmp_path / "demo" / "reconstruction.safetensors").read_bytes()
    monkeypatch.setattr(pal, "train", lambda *_, **__: pytest.fail("it is trained already"))
    monkeypatch.setattr(pal, "reconstruct", lambda *_, **__: pytest.fail("it is read already"))
    assert demo() == 0
    assert (tmp_path / "demo" / "reconstruction.safetensors").read_bytes() == before


def test_another_seed_is_refused_unless_asked_for(demo, tmp_path):
    assert demo() == 0
    before = (tmp_path / "demo" / "model.safetensors").read_bytes()
    assert demo("--seed", "1") == 2
    assert (tmp_path / "demo" / "model.safetensors").read_bytes() == before
    assert demo("--seed", "1", "--again") == 0
    assert RunFolder(tmp_path / "demo").config["training"]["seed"] == 1

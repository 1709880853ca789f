"""The progress bar."""

import pytest
import torch
import tqdm

import palimpsest as pal


class Interrupt(pal.Callback):
    def on_record(self, state, entry):
        if state.step == 20:
            raise KeyboardInterrupt


@pytest.fixture
def bars(monkeypatch):
    """Every bar that was made, shown without delay."""
    made = []

    class Bar(tqdm.tqdm):
        def __init__(self, **options):
            super().__init__(**options | {"delay": 0})
            made.append(self)

    monkeypatch.setattr(tqdm, "tqdm", Bar)
    return made


def run(**options):
    torch.manual_seed(0)
    initial, final = (pal.networks.MLP((1, 3, 3), (6,)) for _ in range(2))
    objective = pal.NTK(final, initial.state_dict())
    return pal.reconstruct(objective, image_shape=(1, 3, 3), candidates=4, steps=40, **options)


def test_the_bar_counts_all_steps(bars, capsys):
    run(progress=True, splitting=pal.Splitting())
    assert [(bar.n, bar.total) for bar in bars] == [(40, 40)]
    assert "40/40" in capsys.readouterr().err


@pytest.mark.parametrize("progress", [False, None])  # None: only on a terminal, and the tests' is none
def test_there_is_no_bar_where_none_is_wanted(bars, progress, capsys):
    run(progress=progress)
    assert capsys.readouterr().err == ""


def test_a_resumed_run_begins_where_it_stopped(bars, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(progress=True, checkpoint=tmp_path / "state", callbacks=[Interrupt()])
    run(progress=True, checkpoint=tmp_path / "state")
    assert [bar.initial for bar in bars] == [0, 20]
    assert bars[-1].n == 40

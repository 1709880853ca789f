"""Merging: what it leaves unchanged, what it refuses to merge, and that it works within a run."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import palimpsest as pal
from cases import Case
from palimpsest.errors import InvalidInputError
from palimpsest.merging import Merging, contributions, large, largest, merge
from palimpsest.parametrisation import Everywhere
from palimpsest.solver import Settings, Solver
from palimpsest.state import State


def with_copies(case: Case, copies=(0, 2, 2)):
    """The case's candidates with some of them repeated, their multipliers shared out unevenly."""
    index = torch.tensor([*range(len(case.x)), *copies])
    share = torch.linspace(0.3, 1.0, len(index), dtype=torch.float64)
    share = share / torch.zeros(len(case.x)).double().index_add(0, index, share)[index]
    λ = case.multipliers[index] * share.reshape(-1, *[1] * (case.multipliers.ndim - 1))
    return case.x[index], λ, None if case.labels is None else case.labels[index]


def test_merging_exact_copies_undoes_them_and_leaves_the_loss_unchanged(case: Case):
    copied = with_copies(case)
    merged = merge(case.objective, *copied, Merging(dead=0.0))
    before, after = case.objective.loss(*copied), case.objective.loss(merged.x, merged.multipliers, merged.labels)
    assert len(merged.x) == len(case.x)
    assert abs(after - before) <= 1e-12 * before
    assert torch.allclose(merged.x, case.x)
    assert torch.allclose(merged.multipliers, case.multipliers)


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_the_candidates_does_not_matter(case: Case, seed):
    x, λ, labels = with_copies(case)
    near = x + 1e-3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    plain = merge(case.objective, near, λ, labels)
    permuted = merge(case.objective, near[order], λ[order], None if labels is None else labels[order])
    i, j = plain.kept.argsort(), order[permuted.kept].argsort()
    assert torch.equal(plain.kept[i], order[permuted.kept][j])
    assert torch.allclose(plain.x[i], permuted.x[j])
    assert torch.allclose(plain.multipliers[i], permuted.multipliers[j])


def test_opposite_multipliers_other_labels_and_other_lengths_are_no_copies():
    objective = pal.KKT(pal.networks.MLP(6, (7,)).double(), sharpness=4.0)
    x = torch.randn(1, 6, dtype=torch.float64).repeat(2, 1)
    ones, y = torch.ones(2, dtype=torch.float64), torch.tensor([1, 1])
    policy = Merging(dead=0.0)
    assert len(merge(objective, x, ones, y, policy).x) == 1
    assert len(merge(objective, x, ones, torch.tensor([1, -1]), policy).x) == 2
    assert len(merge(objective, x * torch.tensor([[1.0], [2.0]]), ones, y, policy).x) == 2
    signed = pal.KKT(pal.networks.MLP(6, (7,)).double(), signed=True, sharpness=4.0)
    assert len(merge(signed, x, torch.tensor([1.0, -0.5]).double(), None, policy).x) == 2


def test_the_dead_are_dropped(case: Case):
    x, λ, labels = case.arguments
    λ = λ.clone()
    λ[1] *= 1e-6
    merged = merge(case.objective, x, λ, labels, Merging(alike=1.0, dead=1e-3))
    assert merged.kept.tolist() == [0, 2, 3]
    assert torch.equal(merged.x, x[merged.kept])
    sizes = contributions(case.objective, x, λ, labels)
    assert sizes[1] < 1e-3 * sizes.max()


def test_a_run_merges_before_it_splits_and_keeps_account():
    torch.manual_seed(0)
    initial, final = (pal.networks.MLP((1, 3, 3), (6,)).double() for _ in range(2))
    rec = pal.reconstruct(
        pal.NTK(final, initial.state_dict()),
        image_shape=(1, 3, 3),
        candidates=6,
        steps=30,
        splitting=pal.Splitting(share=0.5),
        merging=Merging(alike=0.1, dead=0.3),
        progress=False,
    )
    rounds = [entry for entry in rec.history if "split" in entry]
    assert sum(entry["merged"] for entry in rounds) > 0
    assert len(rec.images) == 6 + sum(entry["split"] - entry["merged"] for entry in rounds)
    assert len(set(rec.ids.tolist())) == len(rec.ids)
    assert all(isinstance(entry["merging"], float) for entry in rounds)


sizes_of_a_class = st.lists(st.floats(0.7, 1.4), min_size=1, max_size=30)


@given(sizes_of_a_class, sizes_of_a_class, st.floats(1e-6, 1e6), st.randoms())
def test_two_classes_of_sizes_are_told_apart_whatever_their_unit_and_order(images, rest, unit, random):
    sizes = [(size, True) for size in images] + [(size / 30, False) for size in rest]
    random.shuffle(sizes)
    found = large(unit * torch.tensor([size for size, _ in sizes], dtype=torch.float64))
    assert found.tolist() == [is_image for _, is_image in sizes]


@pytest.mark.parametrize("size", [0.0, 0.3, 7.0])
@pytest.mark.parametrize("count", [1, 2, 7, 200])
def test_equal_sizes_are_of_one_class(count, size):
    assert large(torch.full((count,), size)).all()


def test_the_larger_class_is_what_brute_force_finds():
    logs = torch.randn(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logs[:13] += 9
    within = [logs.sort().values[:i].var(correction=0) * i + logs.sort().values[i:].var(correction=0) * (40 - i)
              for i in range(1, 40)]  # fmt: skip
    best = 1 + int(torch.stack(within).argmin())
    assert torch.equal(large(logs.exp()), logs >= logs.sort().values[best])


def closed(monkeypatch, counts, **settings):
    """A run that splits twice and closes, with so many large candidates at each round."""
    torch.manual_seed(0)
    initial, final = (pal.networks.MLP((1, 3, 3), (6,)).double() for _ in range(2))
    told = iter(counts)
    monkeypatch.setattr(pal.merging, "large", lambda sizes: torch.arange(len(sizes)) < next(told))
    rec = pal.reconstruct(
        pal.NTK(final, initial.state_dict()),
        image_shape=(1, 3, 3),
        candidates=6,
        steps=30,
        record_every=1,
        splitting=pal.Splitting(rounds=2, share=1.0, relative=0.0, until=0.4),
        merging=Merging(alike=1.0, dead=1e-9, closing=0.3),
        progress=False,
        **settings,
    )
    return rec, [entry for entry in rec.history if "split" in entry]


def test_a_run_closes_with_as_many_candidates_as_were_large_when_there_were_many(monkeypatch):
    rec, rounds = closed(monkeypatch, [3, 4, 2])
    assert [entry["step"] for entry in rounds] == [6, 12, 21]
    assert [entry["large"] for entry in rounds] == [3, 4, 2]
    assert rounds[1]["merged"] == 6 + rounds[0]["split"] - 4
    assert rounds[2]["merged"] == rounds[1]["split"]
    assert len(rec.images) == 4
    assert [entry["among"] for entry in rounds] == [6, 6 + rounds[0]["split"], 4 + rounds[1]["split"]]


def test_more_that_are_large_in_the_end_are_kept(monkeypatch):
    rec, rounds = closed(monkeypatch, [3, 4, 5])
    assert [entry.get("images") for entry in rounds] == [None, 4, 5]
    assert len(rec.images) == 5


def test_how_much_the_large_may_grow_depends_on_how_much_all_have(monkeypatch):
    """From 6 to 12 candidates: five large ones may become 7 < 5√2, and not 8."""
    assert closed(monkeypatch, [5, 7, 7])[1][1]["images"] == 7
    assert "images" not in closed(monkeypatch, [5, 8, 12])[1][1]


def test_a_run_that_ends_early_closes_too(monkeypatch):
    rec, rounds = closed(monkeypatch, [3, 3, 3], gradient_tolerance=1e9)
    assert len(rounds) == 3
    assert len(rec.images) == 3


def test_the_closing_phase_is_the_second_half_of_a_phase(monkeypatch):
    rec, _ = closed(monkeypatch, [3, 3, 3])
    first, *_, last = [entry for entry in rec.history if "loss" in entry and entry["step"] >= 21]
    assert first["candidates"] == last["candidates"] == 3
    assert first["rate"] == pytest.approx(0.5 * rec.history[0]["rate"])
    assert first["sharpness"] == pytest.approx((10 * 200) ** 0.5)


def test_as_long_as_the_number_of_large_candidates_grows_none_goes(monkeypatch):
    rec, rounds = closed(monkeypatch, [2, 4, 8])
    assert [entry["merged"] for entry in rounds] == [0, 0, 0]
    assert len(rec.images) == 6 + sum(entry["split"] for entry in rounds)


def test_a_checkpoint_of_the_closing_phase_is_gone_on_with(tmp_path):
    torch.manual_seed(0)
    initial, final = (pal.networks.MLP((1, 3, 3), (6,), 3).double() for _ in range(2))
    objective = pal.NTK(final, initial.state_dict(), at=(0.2, 0.8))
    settings = Settings(
        candidates=6,
        steps=30,
        record_every=1,
        splitting=pal.Splitting(rounds=2, share=1.0, relative=0.0, until=0.4),
        merging=Merging(alike=1.0, dead=1e-9, closing=0.3),
    )
    solver = Solver(objective, Everywhere((1, 3, 3)), settings)
    path, state = tmp_path / "state.safetensors", solver.init()
    while not solver.done(state):
        state = solver.step(state)
        if state.step == 25:
            state.save(path, solver.fingerprint())
    resumed = State.load(path, solver.fingerprint(), torch.device("cpu"))
    assert resumed.round == 3
    while not solver.done(resumed):
        resumed = solver.step(resumed)
    assert torch.equal(resumed.x, state.x)
    assert resumed.history == state.history


@pytest.mark.parametrize("count", [0, 2, 3, 5])
def test_the_largest_are_taken_in_their_order(count):
    sizes = torch.tensor([3.0, 1.0, 5.0, 3.0, 4.0])
    kept = largest(sizes, count)
    assert kept.tolist() == sorted([2, 4, 0, 3, 1][:count])


@pytest.mark.parametrize(
    "options",
    [
        {"alike": 0.0},
        {"alike": 1.5},
        {"dead": 1.0},
        {"dead": -0.1},
        {"closing": 1.0},
        {"closing": -0.1},
        {"closing": 0.2, "dead": 0.0},
    ],
)
def test_policies_that_make_no_sense_are_refused(options):
    with pytest.raises(InvalidInputError):
        Merging(**options)

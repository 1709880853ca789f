"""Merging: what it leaves unchanged, what it refuses to merge, and that it works within a run."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import palimpsest as pal
from cases import Case
from palimpsest.errors import InvalidInputError
from palimpsest.objectives.spaces import Everywhere
from palimpsest.solver.loop import Solver
from palimpsest.solver.merging import Merging, contributions, images, largest, merge
from palimpsest.solver.settings import Settings
from palimpsest.solver.state import State


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


sizes_of_a_kind = st.lists(st.floats(0.7, 1.4), min_size=8, max_size=30)


@given(sizes_of_a_kind, sizes_of_a_kind, st.floats(1e-6, 1e6), st.randoms())
def test_images_are_counted_whatever_the_unit_and_the_order(shown, rest, unit, random):
    sizes = [*shown, *(size / 30 for size in rest)]
    random.shuffle(sizes)
    assert images(unit * torch.tensor(sizes, dtype=torch.float64)) == len(shown)


@given(st.integers(5, 60), st.integers(1, 4), st.booleans())
def test_a_few_outliers_are_no_kind_of_their_own(many, few, smaller):
    logs = torch.linspace(-0.3, 0.3, many, dtype=torch.float64)
    outliers = torch.linspace(-0.1, 0.1, few, dtype=torch.float64) - 5
    assert images(torch.cat([logs, outliers] if smaller else [logs - 5, outliers + 5]).exp()) is None


def test_normal_sizes_are_of_one_kind():
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randn(40, generator=generator, dtype=torch.float64).exp() for _ in range(200)]
    assert sum(images(sizes) is not None for sizes in samples) <= 4


@pytest.mark.parametrize("size", [0.0, 0.3, 7.0])
@pytest.mark.parametrize("k", [1, 2, 7, 200])
def test_equal_sizes_are_of_one_kind(k, size):
    assert images(torch.full((k,), size)) is None


def test_kinds_that_hardly_differ_in_size_both_show_images():
    logs = torch.linspace(-0.05, 0.05, 20, dtype=torch.float64)
    assert images(torch.cat([logs, logs - 0.8]).exp()) is None
    assert images(torch.cat([logs, logs - 1.0]).exp()) == 20


def test_the_cut_is_where_brute_force_finds_the_likelihood_largest():
    generator = torch.Generator().manual_seed(0)
    logs = torch.randn(40, generator=generator, dtype=torch.float64)
    logs[:13] = 2.5 + 0.3 * logs[:13]

    def likelihood(count):
        kinds = logs.sort(descending=True).values.split([count, 40 - count])
        normals = [torch.distributions.Normal(kind.mean(), kind.std(correction=0)) for kind in kinds]
        pairs = zip(normals, kinds, strict=True)
        return sum((normal.log_prob(kind) + math.log(len(kind) / 40)).sum() for normal, kind in pairs)

    assert images(logs.exp()) == max(range(5, 36), key=likelihood)


def counted(monkeypatch, found, **settings):
    """A run of up to two rounds in which so many images are found at each, and so many at the end."""
    torch.manual_seed(0)
    initial, final = (pal.networks.MLP((1, 3, 3), (6,)).double() for _ in range(2))
    told = iter(found)
    monkeypatch.setattr(pal.merging, "images", lambda sizes: next(told))
    rec = pal.reconstruct(
        pal.NTK(final, initial.state_dict()),
        image_shape=(1, 3, 3),
        candidates=6,
        steps=30,
        record_every=1,
        splitting=pal.Splitting(rounds=2, share=1.0, relative=0.0, until=0.4),
        merging=Merging(alike=1.0, dead=1e-9, counting=True),
        progress=False,
        **settings,
    )
    return rec, [entry for entry in rec.history if "split" in entry]


def test_once_images_are_counted_nothing_splits_and_at_the_end_they_alone_are_left(monkeypatch):
    rec, rounds = counted(monkeypatch, [None, 5, 4])
    assert [entry["step"] for entry in rounds] == [6, 12, 30]
    assert rounds[0]["split"] > 0
    assert [entry["split"] for entry in rounds[1:]] == [0, 0]
    assert [entry.get("images") for entry in rounds] == [None, 5, 4]
    assert rounds[2]["among"] == 6 + rounds[0]["split"]
    assert rounds[2]["merged"] == rounds[2]["among"] - 4
    assert len(rec.images) == 4


def test_the_last_phase_begins_when_images_are_counted(monkeypatch):
    rec, rounds = counted(monkeypatch, [4, 4])
    assert [entry["step"] for entry in rounds] == [6, 30]
    records = {entry["step"]: entry for entry in rec.history if "loss" in entry}
    assert records[6]["rate"] == records[0]["rate"]
    assert records[18]["rate"] == pytest.approx(0.5 * records[0]["rate"])
    assert {entry["candidates"] for entry in records.values()} == {6}


def test_the_largest_are_those_that_are_left(monkeypatch):
    all_of_them, _ = counted(monkeypatch, [6, 6])
    rec, _ = counted(monkeypatch, [6, 2])
    torch.manual_seed(0)
    initial, final = (pal.networks.MLP((1, 3, 3), (6,)).double() for _ in range(2))
    objective = pal.NTK(final, initial.state_dict(), sharpness=200.0)
    sizes = contributions(objective, all_of_them.images, all_of_them.multipliers, None)
    assert rec.ids.tolist() == all_of_them.ids[largest(sizes, 2)].tolist()


def test_what_cannot_be_told_at_the_end_stays(monkeypatch):
    rec, rounds = counted(monkeypatch, [None, 5, None])
    assert len(rec.images) == rounds[2]["among"] == 6 + rounds[0]["split"]


def test_where_nothing_can_be_counted_everything_stays(monkeypatch):
    rec, rounds = counted(monkeypatch, [None, None, None])
    assert [entry["merged"] for entry in rounds] == [0, 0, 0]
    assert not any("images" in entry for entry in rounds)
    assert len(rec.images) == 6 + sum(entry["split"] for entry in rounds)


def test_a_run_that_ends_early_counts_too(monkeypatch):
    rec, rounds = counted(monkeypatch, [None, None, 3], gradient_tolerance=1e9)
    assert len(rounds) == 3
    assert len(rec.images) == 3


def test_a_checkpoint_after_the_count_is_gone_on_with(tmp_path, monkeypatch):
    torch.manual_seed(0)
    initial, final = (pal.networks.MLP((1, 3, 3), (6,), 3).double() for _ in range(2))
    objective = pal.NTK(final, initial.state_dict(), at=(0.2, 0.8))
    settings = Settings(
        candidates=6,
        steps=30,
        record_every=1,
        splitting=pal.Splitting(rounds=2, share=1.0, relative=0.0, until=0.4),
        merging=Merging(alike=1.0, dead=1e-9, counting=True),
    )
    monkeypatch.setattr(pal.merging, "images", lambda sizes: 4)
    solver = Solver(objective, Everywhere((1, 3, 3)), settings)
    path, state = tmp_path / "state.safetensors", solver.init()
    while not solver.done(state):
        state = solver.step(state)
        if state.step == 25:
            state.save(path, solver.fingerprint())
    resumed = State.load(path, solver.fingerprint(), torch.device("cpu"))
    assert resumed.round == 2
    while not solver.done(resumed):
        resumed = solver.step(resumed)
    assert torch.equal(resumed.x, state.x)
    assert resumed.history == state.history
    assert len(state.x) == 4


@pytest.mark.parametrize("count", [0, 2, 3, 5])
def test_the_largest_are_taken_in_their_order(count):
    sizes = torch.tensor([3.0, 1.0, 5.0, 3.0, 4.0])
    kept = largest(sizes, count)
    assert kept.tolist() == sorted([2, 4, 0, 3, 1][:count])


@pytest.mark.parametrize(
    "options", [{"alike": 0.0}, {"alike": 1.5}, {"dead": 1.0}, {"dead": -0.1}, {"counting": True, "dead": 0.0}]
)
def test_policies_that_make_no_sense_are_refused(options):
    with pytest.raises(InvalidInputError):
        Merging(**options)

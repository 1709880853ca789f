"""Training checkpoints as people have them on disk: shards, folders, other entries, and series in order."""

import json

import pytest
import safetensors.torch
import torch
from torch import nn

import palimpsest as pal
from palimpsest.cli.main import main
from palimpsest.errors import NonFiniteError, WeightsError
from palimpsest.files import weights
from palimpsest.files.series import gathered, series


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 1))


def state(seed):
    torch.manual_seed(seed)
    return {name: t + torch.rand(()) if t.is_floating_point() else t for name, t in network().state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


STATE = state(0)


# --- shards and folders --------------------------------------------------------------------------------


def sharded(folder, tensors=STATE, *, form="model{}.safetensors"):
    """A folder as Hugging Face writes it: two shards and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    names, places = list(tensors), {}
    for i, part in enumerate((names[::2], names[1::2])):
        place = form.format(f"-0000{i + 1}-of-00002")
        content = {name: tensors[name] for name in part}
        (safetensors.torch.save_file if "safetensors" in form else torch.save)(content, folder / place)
        places |= dict.fromkeys(part, place)
    index = folder / f"{form.format('')}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return index


@pytest.mark.parametrize("form", ["model{}.safetensors", "pytorch_model{}.bin"])
def test_shards_are_read_by_their_index_and_by_their_folder(tmp_path, form):
    index = sharded(tmp_path, form=form)
    assert same(pal.weights.load(index), STATE)
    assert same(pal.weights.load(tmp_path), STATE)


def test_a_folder_holds_a_model_and_its_optimiser(tmp_path):
    model = network()
    optimiser = torch.optim.SGD(model.parameters(), momentum=0.9)
    safetensors.torch.save_file(STATE, tmp_path / "model.safetensors")
    torch.save(optimiser.state_dict(), tmp_path / "optimizer.pt")
    found = weights.find(tmp_path)
    assert same(found.tensors, STATE)
    assert found.optimiser["param_groups"][0]["momentum"] == 0.9


def change_index(index, **places):
    content = json.loads(index.read_text())
    content["weight_map"] |= places
    index.write_text(json.dumps(content))


SPOILT = {
    "no JSON": lambda index: index.write_text("{"),
    "a list": lambda index: index.write_text("[]"),
    "no map": lambda index: index.write_text("{}"),
    "a map that is a list": lambda index: index.write_text('{"weight_map": ["a"]}'),
    "deep": lambda index: index.write_text("[" * 100_000),
    "a place elsewhere": lambda index: change_index(index, a="../other.safetensors"),
    "an absolute place": lambda index: change_index(index, a="/etc/passwd"),
    "the folder": lambda index: change_index(index, a=".."),
    "itself": lambda index: change_index(index, a=index.name),
    "a number": lambda index: change_index(index, a=3),
    "a long name": lambda index: change_index(index, a="x" * 5000),
    "a name that is not there": lambda index: change_index(index, a="model-00001-of-00002.safetensors"),
    "a lost shard": lambda index: index.with_name("model-00002-of-00002.safetensors").unlink(),
    "a truncated shard": lambda index: cut(index.with_name("model-00002-of-00002.safetensors")),
}


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("name", SPOILT)
def test_spoilt_shards_are_refused_and_named(tmp_path, name):
    index = sharded(tmp_path)
    SPOILT[name](index)
    with pytest.raises(WeightsError, match=r"model.*\.(json|safetensors)"):
        pal.weights.load(tmp_path)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(WeightsError, match=tmp_path.name):
        pal.weights.load(tmp_path)


# --- the other entries -----------------------------------------------------------------------------------


def trained_once(optimiser=torch.optim.AdamW, **options):
    model = network()
    optimiser = optimiser(model.parameters(), **options)
    model(torch.ones(2, 4)).sum().backward()
    optimiser.step()
    return model, optimiser


def test_a_lightning_checkpoint_is_read_as_a_whole(tmp_path):
    model, optimiser = trained_once()
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, [3, 5])
    content = {
        "epoch": 3,
        "global_step": 120,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": {f"model.{name}": t for name, t in model.state_dict().items()},
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 4}}}},
        "callbacks": {"ModelCheckpoint": {"best_model_score": torch.tensor(0.5), "best_k_models": {}}},
        "optimizer_states": [optimiser.state_dict()],
        "lr_schedulers": [schedule.state_dict()],
        "hparams_name": "kwargs",
    }
    torch.save(content, tmp_path / "epoch=3.ckpt")
    found = weights.find(tmp_path / "epoch=3.ckpt")
    assert (found.step, found.counters) == (120, {"global_step": 120, "epoch": 3})
    assert same(weights.fitted(network(), found.tensors), model.state_dict())
    assert torch.equal(found.optimiser["state"][0]["exp_avg"], optimiser.state[model[1].weight]["exp_avg"])


@pytest.mark.parametrize("name", ["optimizer", "optimizer_state_dict", "optim"])
@pytest.mark.parametrize(
    ("step", "expected"),
    [(7, 7), (torch.tensor(7), 7), (None, None), (True, None), ("7", None), (torch.ones(2), None), (10**400, None)],
    ids=str,
)
def test_the_optimiser_and_the_step_are_found(tmp_path, name, step, expected):
    model, optimiser = trained_once()
    torch.save({"model": model.state_dict(), name: optimiser.state_dict(), "iteration": step}, tmp_path / "a.pt")
    found = weights.find(tmp_path / "a.pt")
    assert found.optimiser.keys() == {"state", "param_groups"}
    assert found.step == expected


def test_moments_under_names_are_not_taken_for_weights(tmp_path):
    named = {"state": {"1.bias": {"exp_avg": torch.ones(3)}}, "param_groups": [{"params": ["1.bias"]}]}
    torch.save({"net": STATE, "optimizer": named}, tmp_path / "a.pt")
    found = weights.find(tmp_path / "a.pt")
    assert same(found.tensors, STATE)
    assert found.remarks == ()
    assert list(found.optimiser["state"]) == ["1.bias"]


def test_of_two_optimisers_none_is_read_and_that_is_said(tmp_path):
    both = [trained_once()[1].state_dict() for _ in range(2)]
    torch.save({"model": STATE, "optimizer_states": both}, tmp_path / "a.pt")
    found = weights.find(tmp_path / "a.pt")
    assert found.optimiser is None
    assert len(found.remarks) == 1


def test_an_optimiser_that_claims_more_numbers_than_it_has_is_refused(tmp_path):
    large = {"state": {0: {"exp_avg": torch.zeros(1).expand(1 << 40)}}, "param_groups": [{"params": [0]}]}
    torch.save({"model": STATE, "optimizer": large}, tmp_path / "a.pt")
    with pytest.raises(WeightsError, match="exp_avg"):
        weights.find(tmp_path / "a.pt")


# --- series ------------------------------------------------------------------------------------------


def saved(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    (safetensors.torch.save_file if path.suffix == ".safetensors" else torch.save)(content, path)
    return path


def order(found):
    """The seeds of the checkpoints, in the order they were found in."""
    seeds = {float(state(seed)["1.bias"][0]): seed for seed in range(12)}
    return [seeds[float(each.tensors["1.bias"][0])] for each in found]


@pytest.mark.parametrize("counter", ["global_step", "step", "iteration", "epoch"])
def test_the_stored_step_orders_a_series_before_its_names(tmp_path, counter):
    for seed in (3, 1, 2):
        saved(tmp_path / f"{10 - seed}.pt", {"model": state(seed), counter: 100 * seed})
    assert order(series(network(), tmp_path)) == [1, 2, 3]


def test_a_finer_counter_decides_where_the_coarser_one_does_not(tmp_path):
    for seed in (3, 1, 2):
        saved(tmp_path / f"{'abcd'[-seed]}.pt", {"model": state(seed), "epoch": 1, "iter": seed})
    assert order(series(network(), tmp_path)) == [1, 2, 3]


@pytest.mark.parametrize("name", ["epoch-{}.pt", "{}.safetensors", "v2_epoch={}-step={}.ckpt", "checkpoint-{}/net.pt"])
def test_the_numbers_in_names_order_a_series_naturally(tmp_path, name):
    paths = [saved(tmp_path / "run 7" / name.format(seed, 5 * seed), state(seed)) for seed in (10, 9, 1, 11)]
    assert order(series(network(), paths)) == [1, 9, 10, 11]


def test_files_folders_and_patterns_name_the_same_series(tmp_path, monkeypatch):
    paths = [saved(tmp_path / f"run/{seed}.pt", state(seed)) for seed in (2, 1, 3)]
    saved(tmp_path / "run/.hidden.pt", STATE)
    (tmp_path / "run/notes.txt").write_text("notes")
    monkeypatch.chdir(tmp_path)
    for sources in (paths, tmp_path / "run", "run", "run/*.pt", ["run/[12].pt", paths[2]]):
        assert order(series(network(), sources)) == [1, 2, 3]


def test_a_series_of_shards(tmp_path):
    for seed in (10, 9):
        sharded(tmp_path / f"checkpoint-{seed}", state(seed))
    for sources in (tmp_path, str(tmp_path / "checkpoint-*"), str(tmp_path / "*" / "*.index.json")):
        assert order(series(network(), sources)) == [9, 10]


def test_precisions_are_converted_and_that_is_said(tmp_path):
    kinds = [torch.float64, torch.float32, torch.bfloat16]
    for seed, kind in enumerate(kinds):
        tensors = {name: t.to(kind) if t.is_floating_point() else t for name, t in state(seed).items()}
        saved(tmp_path / f"{seed}.safetensors", tensors)
    found = series(network(), tmp_path)
    assert all(t.dtype in (torch.float32, torch.int64) for each in found for t in each.tensors.values())
    assert [len(each.remarks) for each in found] == [1, 0, 1]
    assert "bfloat16" in found[2].remarks[0]
    assert order(found[:2]) == [0, 1]


def test_the_ends_of_the_training_join_the_series_once(tmp_path):
    for seed in (1, 2, 3):
        saved(tmp_path / f"{seed}.pt", state(seed))
    ends = {seed: weights.find(state(seed)) for seed in (0, 1, 3, 4)}
    for first, last, expected in ((0, 4, [0, 1, 2, 3, 4]), (1, 3, [1, 2, 3]), (0, 3, [0, 1, 2, 3])):
        found = series(network(), tmp_path, initial=ends[first], trained=ends[last])
        assert order(found) == expected
    with pytest.raises(WeightsError, match="equal"):
        series(network(), tmp_path, initial=ends[3])


def test_the_optimiser_stays_where_the_trained_weights_do_not_have_one(tmp_path):
    model, optimiser = trained_once()
    saved(tmp_path / "1.pt", STATE)
    saved(tmp_path / "2.pt", {"model": model.state_dict(), "optimizer": optimiser.state_dict()})
    found = series(network(), [tmp_path / "1.pt", tmp_path / "2.pt"], trained=weights.find(model.state_dict()))
    assert [each.optimiser is None for each in found] == [True, False]


REFUSED = {
    "equal weights": ({"1.pt": STATE, "2.pt": STATE}, "1.pt.*2.pt"),
    "equal apart from a counter": (
        {"1.pt": STATE, "2.pt": STATE | {"2.num_batches_tracked": torch.tensor(5)}},
        "1.pt.*2.pt",
    ),
    "another shape": ({"1.pt": STATE, "2.pt": state(1) | {"1.weight": torch.ones(3, 5)}}, r"2\.pt.*1\.weight"),
    "another network": ({"1.pt": STATE, "2.pt": nn.Linear(1, 1).state_dict()}, r"2\.pt"),
    "names without numbers": ({"best.pt": STATE, "last.pt": state(1)}, r"best\.pt, last\.pt"),
    "names that differ": ({"epoch-1.pt": STATE, "last-2.pt": state(1)}, "epoch-1"),
    "equal numbers": ({"e1.pt": STATE, "e01.pt": state(1)}, "e1"),
    "one file": ({"1.pt": STATE}, "1.pt"),
    "no file": ({}, "checkpoint"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_series_that_is_none_is_refused_and_the_file_named(tmp_path, name):
    files, reason = REFUSED[name]
    for path, content in files.items():
        saved(tmp_path / path, content)
    with pytest.raises(WeightsError, match=reason):
        series(network(), tmp_path)


def test_damaged_and_missing_files_of_a_series_are_named(tmp_path):
    for seed in (1, 2, 3):
        saved(tmp_path / f"{seed}.pt", state(seed))
    cut(tmp_path / "2.pt")
    with pytest.raises(WeightsError, match=r"2\.pt"):
        series(network(), tmp_path)
    with pytest.raises(WeightsError, match=r"4\.pt"):
        series(network(), [tmp_path / "1.pt", tmp_path / "4.pt"])
    with pytest.raises(WeightsError, match=r"1\.pt"):
        gathered([tmp_path / "1.pt", str(tmp_path / "[1].pt")])
    saved(tmp_path / "2.pt", state(2) | {"4.bias": torch.tensor([torch.nan])})
    with pytest.raises(NonFiniteError, match=r"2\.pt.*4\.bias"):
        series(network(), tmp_path)


# --- the command -----------------------------------------------------------------------------------------


def audited(tmp_path, *arguments):
    (tmp_path / "net.py").write_text(
        "import palimpsest\n"
        "def make(width, outputs=1): return palimpsest.networks.MLP((1, 8, 8), (width,), outputs=outputs)\n"
    )
    few = "--candidates 2 --steps 2 --restarts 2 --tangents 1 --control-steps 1 --no-controls --shape 1,8,8"
    return main(
        [
            "audit",
            "--out",
            str(tmp_path / "audit"),
            "--network",
            f"{tmp_path / 'net.py'}:make",
            *few.split(),
            *arguments,
        ]
    )


def test_an_audit_takes_the_networks_arguments_and_shards(tmp_path, capsys):
    sharded(tmp_path / "final", pal.networks.MLP((1, 8, 8), (9,), outputs=3).state_dict())
    given = ["--weights", str(tmp_path / "final")]
    assert audited(tmp_path, *given, "--network-args", '{"width": 9, "outputs": 3}') == 0
    capsys.readouterr()
    for wrong in ("9", "[9]", '{"width": 9', "width=9", "[" * 100_000, '{"width": 9}', '{"wide": 9}', "{}", None):
        assert audited(tmp_path, *given, *([] if wrong is None else ["--network-args", wrong])) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_networks_arguments_work_in_python():
    def make(width):
        return pal.networks.MLP((1, 4, 4), (width,))

    found = pal.auditing.subject(make, make(5).state_dict(), network_args={"width": 5}, image_shape=(1, 4, 4))
    assert found.fresh().state_dict().keys() == make(5).state_dict().keys()


@pytest.mark.parametrize("spoil", ["a truncated shard", "a place elsewhere", "no JSON"])
def test_an_audit_refuses_spoilt_shards(tmp_path, capsys, spoil):
    index = sharded(tmp_path / "final", pal.networks.MLP((1, 8, 8), (9,)).state_dict())
    SPOILT[spoil](index)
    assert audited(tmp_path, "--weights", str(index), "--network-args", '{"width": 9}') == 2
    assert len(capsys.readouterr().err.splitlines()) == 1

"""Other people's weights: what is read, what is refused and why, and that nothing in a file is ever run."""

import io
import json
import os
import pickle
import re
import shlex
import zipfile

import numpy as np
import pytest
import safetensors.torch
import torch

import palimpsest as pal
from palimpsest.errors import InvalidInputError, NonFiniteError, ResourceError, WeightsError
from palimpsest.execution import resources


def network():
    return torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Linear(4, 1))


STATE = network().state_dict()


def saved(path, content):
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(content, path)
    else:
        torch.save(content, path)
    return path


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- what is read --------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth", ".ckpt", ".pth.tar", ".bin"])
def test_a_state_dict_comes_back_as_it_was(tmp_path, suffix):
    assert same(pal.weights.load(saved(tmp_path / f"net{suffix}", dict(STATE))), STATE)


@pytest.mark.parametrize("name", ["state_dict", "model_state_dict", "model"])
def test_a_state_dict_is_found_inside_a_checkpoint(tmp_path, name):
    memory = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"betas": (0.9, 0.999), "params": [0, 1]}] * 2}
    rest = {"epoch": 3, "best": 0.25, "optimizer": memory, "tags": ["a", None, True]}
    assert same(pal.weights.load(saved(tmp_path / "net.pt", {**rest, name: STATE})), STATE)


@pytest.mark.parametrize(
    ("content", "entry"),
    [
        ({"net": STATE, "epoch": 3}, "net"),
        ({"trainer": {"network": STATE, "step": torch.tensor(3)}, "best": 0.5}, "trainer.network"),
        ({"ema": STATE, "model": STATE}, "model"),
        (STATE, None),
    ],
)
def test_the_only_or_the_usual_entry_is_read_and_named(tmp_path, content, entry):
    path = saved(tmp_path / "net.pt", content)
    found = pal.weights.find(path)
    assert same(found.tensors, STATE)
    assert found.source == (str(path) if entry is None else f"{path}, entry {entry!r}")
    assert any("ema" in remark for remark in found.remarks) == ("ema" in content)


def test_a_key_chooses_among_several_sets_of_weights(tmp_path):
    other = {name: t + 1 for name, t in STATE.items()}
    lightning = {f"net.{name}": t for name, t in STATE.items()} | {"criterion.weight": torch.ones(2)}
    content = {"ema": {"state_dict": other, "decay": 0.9}, "net": STATE, "lightning": lightning}
    path = saved(tmp_path / "net.pt", content)
    for key, expected in {"ema.state_dict": other, "net": STATE, "lightning.net": STATE}.items():
        assert same(pal.weights.load(path, key), expected)
    for key in (None, "ema", "ema.decay", "ema.decay.x", "nowhere", ""):
        with pytest.raises(WeightsError, match=r"net, lightning, ema\.state_dict"):
            pal.weights.load(path, key)
    flat = saved(tmp_path / "net.safetensors", {f"ema.{name}": t for name, t in STATE.items()} | other)
    assert same(pal.weights.load(flat, "ema"), STATE)


def test_a_prefix_is_dropped_where_the_names_then_fit():
    model = network()
    pal.weights.fit_into(model, {f"model.net.{name}": t + 1 for name, t in STATE.items()})
    assert all(torch.equal(t, STATE[name] + 1) for name, t in model.state_dict().items())
    with pytest.raises(WeightsError):
        pal.weights.fit_into(model, {f"net.{name}": t for name, t in STATE.items()} | {"other": torch.ones(1)})


def test_a_checkpoint_that_contains_itself_is_searched_once(tmp_path):
    content = {"net": STATE, "epoch": 3}
    content["again"] = content
    assert same(pal.weights.load(saved(tmp_path / "net.pt", content)), STATE)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "_module."])
def test_prefixes_of_wrappers_are_dropped_only_where_all_names_have_them(tmp_path, prefix):
    wrapped = {prefix + name: t for name, t in STATE.items()}
    found = pal.weights.find(saved(tmp_path / "net.pt", wrapped))
    assert same(found.tensors, STATE)
    assert found.remarks == (f"without the prefix {prefix}",)
    mixed = wrapped | {"other": torch.ones(1)}
    assert pal.weights.load(saved(tmp_path / "net.pt", mixed)).keys() == mixed.keys()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_half_precision_becomes_single_and_double_and_counters_stay(tmp_path, dtype, suffix):
    tensors = {"w": torch.randn(3).to(dtype), "count": torch.tensor(7)}
    read = pal.weights.find(saved(tmp_path / f"net{suffix}", tensors))
    found = read.tensors
    assert bool(read.remarks) == (dtype != torch.float64)
    assert found["w"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(found["w"], tensors["w"].to(found["w"].dtype))
    assert found["count"].dtype == torch.int64


def test_parameters_and_shared_tensors_are_plain_tensors(tmp_path):
    shared = torch.nn.Parameter(torch.randn(4, 4))
    found = pal.weights.load(saved(tmp_path / "net.pt", {"a": shared, "b": shared.T}))
    assert all(type(t) is torch.Tensor and not t.requires_grad and t.is_contiguous() for t in found.values())
    assert torch.equal(found["b"], shared.T)


# --- what does not fit ---------------------------------------------------------------------------------


def test_weights_are_put_into_the_network():
    model = network()
    pal.weights.fit_into(model, {name: t + 1 for name, t in STATE.items()})
    assert all(torch.equal(t, STATE[name] + 1) for name, t in model.state_dict().items())


def test_the_difference_is_told_by_name_and_nothing_is_loaded():
    model = network()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    weights = {f"block.{i}": torch.ones(1) for i in range(7)} | STATE
    del weights["0.bias"]
    weights |= {"2.weight": torch.ones(4, 1), "2.bias": torch.ones(1, dtype=torch.int64)}
    with pytest.raises(WeightsError) as caught:
        pal.weights.fit_into(model, weights)
    assert "missing: 0.bias;" in str(caught.value)
    assert "not in the network: block.0, block.1, block.2, block.3 and 3 more;" in str(caught.value)
    assert "of another shape: 2.weight (4, 1) instead of (1, 4)" in str(caught.value)
    assert "2.bias whole numbers (1,) instead of (1,)" in str(caught.value)
    assert same(model.state_dict(), before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(value):
    weights = {name: t.clone() for name, t in STATE.items()}
    weights["1.running_var"][1] = value
    with pytest.raises(NonFiniteError, match=r"NaN or infinity in 1\.running_var;"):
        pal.weights.fit_into(network(), weights)


def test_layers_that_wait_for_their_shape_are_named():
    with pytest.raises(InvalidInputError, match=r"0\.weight"):
        pal.weights.fit_into(torch.nn.Sequential(torch.nn.LazyLinear(2)), {"0.weight": torch.ones(2, 3)})


# --- what is refused -----------------------------------------------------------------------------------

REFUSED = {
    "a list": ([1, 2], "holds a list"),
    "a number among tensors": ({"w": torch.ones(1), "step": 3}, "'step'"),
    "a number as a name": ({3: torch.ones(1)}, "'3'"),
    "nothing": ({}, "tensor"),
    "a sparse tensor": ({"w": torch.eye(3).to_sparse()}, "dense"),
    "a complex tensor": ({"w": torch.ones(3, dtype=torch.complex64)}, "dense"),
    "a tensor without content": ({"w": torch.ones(3, device="meta")}, "dense"),
    "one number that claims to be many": ({"w": torch.zeros(1).expand(1 << 40)}, "dense"),
    "a numpy number": ({"net": STATE, "best": np.float64(0.5)}, "numpy"),
    "a whole network": (torch.nn.Linear(2, 2), r"torch\.nn\.modules\.linear\.Linear"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_state_dict_is_refused(tmp_path, name):
    content, reason = REFUSED[name]
    with pytest.raises(WeightsError, match=f"net.pt.*({reason})"):
        pal.weights.load(saved(tmp_path / "net.pt", content))


@pytest.mark.parametrize("kept", [lambda model: model, lambda model: {"epoch": 3, "model": model}])
def test_the_lines_that_convert_a_pickled_network_work(tmp_path, kept):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(WeightsError) as caught:
        pal.weights.load(saved(tmp_path / "net.pt", kept(model)))
    load, save = re.search(r"lines (saved = .*\)) and (torch\.save\(.*?\))(, with|$)", str(caught.value)).groups()[:2]
    if isinstance(kept(model), dict):  # here the entry is the network itself
        save = save.replace('saved["model"]', 'saved["model"].state_dict()')
    exec(f"{load}\n{save}", {"torch": torch})
    assert same(pal.weights.load(tmp_path / "net-weights.pt"), model.state_dict())


def test_no_line_is_offered_that_would_run_an_attack(tmp_path):
    with pytest.raises(WeightsError) as caught:
        pal.weights.load(saved(tmp_path / "net.pt", {"w": Payload(eval, "1")}))
    assert "weights_only=False" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_missing_foreign_and_damaged_files_are_refused(tmp_path, suffix):
    path = tmp_path / f"net{suffix}"
    with pytest.raises(WeightsError, match=path.name):
        pal.weights.load(path)
    whole = saved(path, dict(STATE)).read_bytes()
    for content in (b"", b"\x80\x02}.", whole[: len(whole) // 2], whole[:-1], b"x" + whole, whole + whole):
        path.write_bytes(content)
        with pytest.raises(WeightsError, match=f"net{suffix} .*save"):
            pal.weights.load(path)
    with pytest.raises(WeightsError, match=r"give a \.safetensors"):
        pal.weights.load(tmp_path / "net.onnx")


class Payload:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("function", [os.system, eval, exec, open], ids=lambda f: f.__name__)
@pytest.mark.parametrize("packed", [True, False], ids=["archive", "bare"])
def test_a_malicious_pickle_is_refused_and_does_not_run(tmp_path, function, protocol, packed):
    mark = tmp_path / "mark"
    harm = {os.system: f"touch {shlex.quote(str(mark))}", open: str(mark)}.get(function, f"open({str(mark)!r}, 'w')")
    payload = Payload(function, harm, *(["w"] if function is open else []))
    program, path = pickle.dumps({"w": payload}, protocol), tmp_path / "net.pt"
    path.write_bytes(_with_pickle(program) if packed else program)
    with pytest.raises(WeightsError, match=r"net\.pt"):
        pal.weights.load(path)
    assert not mark.exists()
    pickle.loads(program)
    assert mark.exists()  # the payload was a real one


def _with_pickle(program, compression=zipfile.ZIP_STORED, **others):
    """An archive as torch saves it, its pickle replaced."""
    original, file = io.BytesIO(), io.BytesIO()
    torch.save({"w": torch.ones(2)}, original)
    with zipfile.ZipFile(original) as old, zipfile.ZipFile(file, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, program if name.endswith("data.pkl") else old.read(name))
        for name, content in others.items():
            new.writestr(name, content)
    return file.getvalue()


HASHED = b"\x80\x02})" + b"q\x00h\x00\x86" * 100 + b"K\x01s."
HARMFUL = {
    "a key that takes 2¹⁰⁰ steps to hash": (_with_pickle(HASHED), "tuples"),
    "ten gigabytes by their constructor": (_with_pickle(pickle.dumps(Payload(bytearray, 10**10), 2)), "bytearray"),
    "a decompression bomb": (_with_pickle(bytes(1 << 24), zipfile.ZIP_DEFLATED), "compressed"),
    "two folders": (_with_pickle(b"\x80\x02}.", other="x"), "archive"),
    "a program without end": (_with_pickle(b"\x80\x02" + b"]" * 500_000 + b"."), "too long"),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_archives_that_would_take_all_memory_or_time_are_refused(tmp_path, name):
    content, reason = HARMFUL[name]
    (tmp_path / "net.pt").write_bytes(content)
    with pytest.raises(WeightsError, match=reason):
        pal.weights.load(tmp_path / "net.pt")


@pytest.mark.parametrize(
    ("entry", "length"),
    [
        ({}, 2**60),
        ({"w": {"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 0]}}, None),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, None),
        ({"w": {"dtype": "F32", "shape": [1] * 40, "data_offsets": [0, 4]}}, None),
    ],
)
def test_safetensors_headers_that_lie_are_refused(tmp_path, entry, length):
    text = json.dumps(entry).encode()
    (tmp_path / "net.safetensors").write_bytes((length or len(text)).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(WeightsError, match=r"net\.safetensors"):
        pal.weights.load(tmp_path / "net.safetensors")


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_weights_larger_than_memory_are_refused_before_they_are_read(tmp_path, suffix, monkeypatch):
    path = saved(tmp_path / f"net{suffix}", {"w": torch.ones(1000)})
    monkeypatch.setattr(resources, "available_memory", lambda: 7_999)
    with pytest.raises(ResourceError, match=r"(8|11) kB"):
        pal.weights.load(path)
    monkeypatch.setattr(resources, "available_memory", lambda: 20_000)
    assert len(pal.weights.load(path)["w"]) == 1000

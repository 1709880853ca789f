"""Rounds of federated learning: the global weights, and the change that the clients sent."""

import pytest
import safetensors.torch
import torch
from torch import nn

from palimpsest.errors import WeightsError
from palimpsest.files.updates import rounds


def network():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()


def state(seed):
    torch.manual_seed(seed)
    return {
        name: t + torch.rand(()).item() if t.is_floating_point() else t for name, t in network().state_dict().items()
    }


def parameters(tensors):
    return {name: t for name, t in tensors.items() if "running" not in name and "num" not in name}


def minus(a, b):
    return {name: t - b[name] for name, t in parameters(a).items()}


def saved(folder, **files):
    for name, content in files.items():
        name = name.replace("_", "-")
        if name.endswith("-pt"):
            torch.save(content, folder / f"{name[:-3]}.pt")
        else:
            safetensors.torch.save_file(content, folder / f"{name}.safetensors")
    return folder


def assert_close(a, b):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-12, atol=1e-12)


def test_rounds_come_in_order_with_the_change_of_their_clients(tmp_path):
    saved(
        tmp_path, round_10_global=state(0), round_10_client=state(1), round_9_global_pt={"model": state(2), "epoch": 1}
    )
    saved(tmp_path, round_9_delta=minus(state(3), state(2)))
    found = rounds(network(), tmp_path)
    assert [(each.number, each.clients, len(each.sources)) for each in found] == [(9, 1, 2), (10, 1, 2)]
    for each, (start, end) in zip(found, ((2, 3), (0, 1)), strict=True):
        assert all(torch.equal(t, state(start)[name]) for name, t in each.weights.items())
        assert_close(each.change, minus(state(end), state(start)))


@pytest.mark.parametrize("kind", ["client", "delta"])
def test_several_clients_are_averaged(tmp_path, kind):
    ends = {f"round_03_{kind}_{name}": state(seed) for seed, name in enumerate("abc", 1)}
    if kind == "delta":
        ends = {name: minus(end, state(0)) for name, end in ends.items()}
    saved(tmp_path, round_03_global=state(0), **ends)
    (found,) = rounds(network(), sorted(tmp_path.iterdir()))
    changes = [minus(state(seed), state(0)) for seed in (1, 2, 3)]
    assert found.clients == 3
    assert_close(found.change, {name: sum(each[name] for each in changes) / 3 for name in changes[0]})


@pytest.mark.parametrize("kind", ["client", "delta"])
def test_buffers_and_frozen_parameters_may_be_left_out_and_others_may_not(tmp_path, kind):
    model = network()
    model[2].requires_grad_(False)
    answer = {name: t for name, t in parameters(state(1)).items() if not name.startswith("2.")}
    saved(tmp_path, round_1_global=state(0), **{f"round_1_{kind}": answer})
    (found,) = rounds(model, tmp_path)
    expected = answer if kind == "delta" else {name: t - state(0)[name] for name, t in answer.items()}
    assert_close(found.change, expected)
    with pytest.raises(WeightsError, match=rf"round-1-{kind}.*2\.weight"):
        rounds(network(), tmp_path)


def test_wrapped_and_half_answers_are_read_and_that_is_said(tmp_path):
    half = {f"module.{name}": t.half() if t.is_floating_point() else t for name, t in state(1).items()}
    saved(tmp_path, round_1_global={f"model.{name}": t for name, t in state(0).items()}, round_1_client=half)
    (found,) = rounds(network(), tmp_path)
    assert "float16" in found.sources[1]
    assert "module." in found.sources[1]
    torch.testing.assert_close(found.change["0.bias"], state(1)["0.bias"] - state(0)["0.bias"], rtol=0, atol=2e-3)


REFUSED = {
    "no global weights": ({"round_1_client": state(1)}, "round 1"),
    "two global weights": (
        {"round_1_global": state(0), "round_01_global": state(1), "round_1_delta": state(2)},
        "round 1",
    ),
    "no client": ({"round_1_global": state(0), "round_1_client": state(1), "round_2_global": state(1)}, "round 2"),
    "weights and changes": (
        {"round_1_global": state(0), "round_1_client": state(1), "round_1_delta": state(2)},
        "round 1",
    ),
    "no change": ({"round_1_global": state(0), "round_1_client": state(0)}, "round-1-client"),
    "another name": ({"round_1_global": state(0), "client_1": state(1)}, "client-1"),
    "another kind": ({"round_1_global": state(0), "round_1_server": state(1)}, "round-1-server"),
    "another shape": ({"round_1_global": state(0), "round_1_delta": {"0.weight": torch.ones(2)}}, "round-1-delta"),
    "another network": ({"round_1_global": {"w": torch.ones(2)}, "round_1_client": state(0)}, "round-1-global"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rounds_that_are_none_are_refused_and_named(tmp_path, name):
    files, reason = REFUSED[name]
    with pytest.raises(WeightsError, match=reason):
        rounds(network(), saved(tmp_path, **files))


def test_a_truncated_update_is_named(tmp_path):
    saved(tmp_path, round_1_global=state(0), round_1_client=state(1))
    path = tmp_path / "round-1-client.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(WeightsError, match=r"round-1-client\.safetensors"):
        rounds(network(), tmp_path)

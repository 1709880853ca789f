"""`palimpsest identify` on saved files."""

import pytest
import torch
from identifiability_problems import batch_gradient, digits, error, network, unit
from margin_problem import stationary_network
from safetensors.torch import load_file, save_file

from palimpsest.cli.main import main


def save(net, path):
    save_file({name: p.detach().contiguous() for name, p in net.named_parameters()}, path)
    return path


def identify(weights, *words):
    return main(["identify", "--weights", *map(str, (weights, *words))])


def test_a_stationary_network(tmp_path, capsys):
    x = unit(torch.eye(3).double() + 0.05)
    net = save(stationary_network(x, torch.ones(3)), tmp_path / "net.safetensors")
    assert identify(net, "--norm", 1.0, "--output", tmp_path / "found.safetensors") == 0
    assert "identified if" in capsys.readouterr().out
    assert error(load_file(tmp_path / "found.safetensors")["samples"], x) < 1e-10


@pytest.mark.parametrize("activation", [(3,), (0.0, 1.0, 0.5, 1.0)])
def test_a_gradient(tmp_path, activation, capsys):
    x, y = digits(4)
    net = network(64, 60, int(activation[0]) if len(activation) == 1 else activation, bias=True)
    save_file(batch_gradient(net, x, y), tmp_path / "gradient.safetensors")
    words = ["--gradient", tmp_path / "gradient.safetensors", "--activation", *activation, "--count", 4]
    assert identify(save(net, tmp_path / "net.safetensors"), *words) == 0
    assert capsys.readouterr().out.splitlines()[:2] == ["4 samples recovered", "identified"]


def test_training_of_the_head(tmp_path, capsys):
    net = network(4, 40)
    start = save(net, tmp_path / "initial.safetensors")
    with torch.no_grad():
        net.a += (net.W @ torch.eye(4).double()[:, :3]) ** 3 @ torch.tensor([1.0, 2.0, -1.0]).double()
    assert identify(save(net, tmp_path / "net.safetensors"), "--initial", start) == 0
    assert capsys.readouterr().out.splitlines()[0] == "3 samples recovered"


def test_wrong_use_names_the_file_and_has_status_two(tmp_path, capsys):
    assert identify(tmp_path / "nothing.safetensors") == 2
    assert "nothing.safetensors" in capsys.readouterr().err
    save_file({"weight": torch.ones(3)}, tmp_path / "other.safetensors")
    assert identify(tmp_path / "other.safetensors") == 2
    net = save(network(3, 10), tmp_path / "net.safetensors")
    assert identify(net, "--gradient", net, "--initial", net) == 2


@pytest.mark.parametrize(
    ("arguments", "changes", "name"),
    [
        (["--activation", "1", "--gradient", "net.safetensors"], {}, "degree 1"),
        (["--activation", "nan"], {}, "activation"),
        (["--activation", "3.7"], {}, "activation"),
        (["--activation", "0", "1", "inf"], {}, "activation"),
        (["--activation", "-3"], {}, "activation"),
        ([], {"W": torch.ones(10, 3, dtype=torch.int64)}, "net.safetensors"),
        ([], {"a": torch.full((10,), torch.nan)}, "NaN"),
        ([], {"a": torch.ones(3)}, "net.safetensors"),
        (["--gradient", "gradient.safetensors"], {}, " b "),
        (["--initial", "gradient.safetensors"], {}, "gradient.safetensors"),
        (["--initial", "single.safetensors"], {}, "precision"),
        (["--norm", "nan"], {}, "norm"),
        (["--count", "0"], {}, "count"),
        (["--noise", "nan"], {}, "noise"),
        (["--output", "missing/found.safetensors"], {}, "missing"),
        (["--output", "."], {}, "write"),
    ],
)
def test_wrong_use_on_the_command_line_is_one_line_and_status_two(
    tmp_path, monkeypatch, capsys, arguments, changes, name
):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    tensors = {"W": torch.randn(10, 3).double(), "a": torch.randn(10).double(), "b": torch.randn(10).double()}
    save_file(tensors | changes, "net.safetensors")
    save_file(tensors | {"b": torch.ones(20)}, "gradient.safetensors")
    save_file({name: t.float() for name, t in tensors.items()}, "single.safetensors")
    assert main(["identify", "--weights", "net.safetensors", *arguments]) == 2
    err = capsys.readouterr().err
    assert name in err
    assert err.startswith("palimpsest: ")
    assert err.count("\n") == 1

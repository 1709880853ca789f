"""The mathematics needs torch, numpy and scipy only; every other package is loaded where it is used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import palimpsest as pal

FORBID = """
import builtins, sys
import_ = builtins.__import__
allowed = sys.stdlib_module_names | {"torch", "numpy", "scipy", "palimpsest"}

def strict(name, globals=None, locals=None, fromlist=(), level=0):
    ours = (globals or {}).get("__name__", "").partition(".")[0] == "palimpsest"
    if ours and level == 0 and name.partition(".")[0] not in allowed:
        raise ModuleNotFoundError(f"{globals['__name__']} imports {name}")
    return import_(name, globals, locals, fromlist, level)

builtins.__import__ = strict
"""


def without_other_packages(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", FORBID + code], capture_output=True, text=True)


@pytest.mark.parametrize(
    "code",
    [
        "import palimpsest",
        "import palimpsest.solver.loop, palimpsest.objectives, palimpsest.scoring",
        "from palimpsest import KKT, NTK, MulticlassKKT, Merging, Splitting, certify, reconstruct, score, span, train",
        "import palimpsest as pal\n"
        "pal.reconstruct(pal.KKT(pal.networks.MLP(4, (3,))), image_shape=4, candidates=2, steps=3, progress=False)",
    ],
    ids=["package", "modules", "names", "reconstruction"],
)
def test_the_mathematics_needs_no_other_package(code):
    done = without_other_packages(code)
    assert done.returncode == 0, done.stderr


def test_another_package_is_noticed():
    assert (
        "palimpsest.files.storage imports safetensors"
        in without_other_packages("import palimpsest.files.storage").stderr
    )


def test_every_public_name_can_be_loaded():
    assert dir(pal) == sorted(pal.__all__)
    for name in pal.__all__:
        assert getattr(pal, name) is not None


def test_type_checkers_know_the_same_names():
    tree = ast.parse(Path(pal.__file__).read_text(encoding="utf-8"))
    (checked,) = [node for node in tree.body if isinstance(node, ast.If)]
    imported = {alias.name: node.module for node in ast.walk(checked) if isinstance(node, ast.ImportFrom)
                for alias in node.names}  # fmt: skip
    assert {*imported, "span", "__version__"} == set(pal.__all__)
    homes = {name: module for name, module in imported.items() if module != "palimpsest"}
    modules = {name: module.rpartition(".")[0] for name, module in pal._MODULES.items()}
    assert homes == {name: f"palimpsest.{module}" for name, module in (pal._HOME | modules).items()}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError):
        _ = pal.reconstuct

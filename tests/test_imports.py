"""The mathematics needs torch, numpy and scipy only; every other package is loaded where it is used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import palimpsest as pal

FORBID = """
import sys
import torch, numpy, scipy
allowed = sys.stdlib_module_names | {"palimpsest"} | {name.partition(".")[0] for name in sys.modules}

class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in allowed:
            raise ModuleNotFoundError(f"{name} is forbidden here")

sys.meta_path.insert(0, Forbid())
"""


def without_other_packages(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", FORBID + code], capture_output=True, text=True)


@pytest.mark.parametrize(
    "code",
    [
        "import palimpsest",
        "import palimpsest.solver, palimpsest.objectives, palimpsest.scoring",
        "from palimpsest import KKT, NTK, MulticlassKKT, Merging, Splitting, certify, reconstruct, score, span, train",
        "import palimpsest as pal\n"
        "pal.reconstruct(pal.KKT(pal.networks.MLP(4, (3,))), image_shape=4, candidates=2, steps=3, progress=False)",
    ],
    ids=["package", "modules", "names", "reconstruction"],
)
def test_the_mathematics_needs_no_other_package(code):
    done = without_other_packages(code)
    assert done.returncode == 0, done.stderr


def test_a_forbidden_package_is_noticed():
    assert without_other_packages("import safetensors").returncode != 0


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
    assert homes == {name: f"palimpsest.{module}" for name, module in pal._HOME.items()}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError):
        _ = pal.reconstuct

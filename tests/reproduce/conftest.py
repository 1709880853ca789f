import pytest
from tiny_experiment import TINY, arguments

from palimpsest.reproduce.__main__ import main


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder in which all parts of a tiny experiment were run, and summed up beside them."""
    folder = tmp_path_factory.mktemp("reproduce")
    (folder / "tiny.toml").write_text(TINY)
    assert main(arguments(folder)) == 0
    return folder

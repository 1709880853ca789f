import pytest
from reproduce.command import main
from tiny_experiment import TINY, arguments


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder in which all parts of a tiny experiment were run."""
    folder = tmp_path_factory.mktemp("reproduce")
    (folder / "tiny.toml").write_text(TINY)
    assert main(arguments(folder)) == 0
    return folder

"""Room is looked for before work begins, in memory and on disk, wherever a limit may come from."""

import platform
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from palimpsest.errors import ResourceError
from palimpsest.execution import resources
from palimpsest.runs import estimates

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with 1 GB of memory, in a container that has taken 150 of its 400 MB, 50 of them for files."""
    (tmp_path / "meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 1000000 kB\n")
    (tmp_path / "memory.max").write_text("400000000\n")
    (tmp_path / "memory.current").write_text("150000000\n")
    (tmp_path / "memory.stat").write_text("anon 7\ninactive_file 50000000\n")
    monkeypatch.setattr(resources, "MEMORY_INFO", tmp_path / "meminfo")
    monkeypatch.setattr(resources, "CONTAINER", tmp_path)
    return tmp_path


def test_the_narrowest_limit_counts(machine):
    assert resources.available_memory() == 300_000_000
    (machine / "memory.max").write_text("max\n")
    assert resources.available_memory() == 1_024_000_000
    (machine / "memory.max").unlink()
    (machine / "meminfo").unlink()
    assert 0 < resources.available_memory() < sys.maxsize


def test_a_limit_of_the_process_counts(machine, monkeypatch):
    taken = resources.resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0])
    monkeypatch.setattr(resources.resource, "getrlimit", lambda _: (taken + 50_000_000, -1))
    assert resources.available_memory() == pytest.approx(50_000_000, abs=20_000_000)


def test_memory_is_refused_in_one_sentence(machine):
    resources.require_memory(299_999_999, of="a job", remedy="do less")
    with pytest.raises(ResourceError, match=r"a job .*2\.0 GB.*300 MB.*do less"):
        resources.require_memory(2_000_000_000, of="a job", remedy="do less")


def test_disk_is_looked_at_where_the_folder_will_be(tmp_path, monkeypatch):
    seen = []

    def usage(path):
        seen.append(path)
        return Usage(0, 0, 100_000_000)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    resources.require_disk(tmp_path / "new" / "run", 30_000_000, of="a job")
    assert seen == [tmp_path]
    with pytest.raises(ResourceError, match=r"a job .*117 MB.*100 MB"):
        resources.require_disk(tmp_path, 50_000_000, of="a job")


def test_jobs_that_cannot_fit_are_refused(tmp_path, monkeypatch):
    wide = (784, 100_000, 100_000, 1)
    monkeypatch.setattr(resources, "available_memory", lambda: 16 << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 1 << 30))
    estimates.check_training(tmp_path, (784, 1000, 1000, 1), 1000)
    estimates.check_reconstruction(tmp_path, (784, 1000, 1000, 1), 2000, tangents=2, variants=2)
    with pytest.raises(ResourceError, match="--hidden"):
        estimates.check_training(tmp_path, wide, 40)
    with pytest.raises(ResourceError, match="--candidates"):
        estimates.check_reconstruction(tmp_path, (784, 1000, 1), 10**6, tangents=2, variants=2)
    with pytest.raises(ResourceError, match="disk"):
        estimates.check_reconstruction(tmp_path, (784, 10, 1), 20_000, tangents=1, variants=2)


REPEATED = """
import resource, torch
from palimpsest.execution.allocator import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.zeros(1 << 19) for _ in range(20)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(keep_freed_memory(), faults(), faults())
"""


def test_freed_memory_is_kept_and_used_again():
    """40 MB at every step, which would otherwise come back page by page."""
    kept, first, again = subprocess.run([sys.executable, "-c", REPEATED], capture_output=True, text=True).stdout.split()
    assert kept == str(platform.libc_ver()[0] == "glibc")
    assert kept == "False" or int(again) < int(first) / 10

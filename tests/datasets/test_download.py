"""Downloads, from a server on this machine: intact, corrupted, truncated, refused."""

import gzip
import hashlib
import http.server
import threading

import numpy as np
import pooch
import pytest

from palimpsest import datasets
from palimpsest.datasets import mnist
from palimpsest.errors import DataError


def idx(array):
    return bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


RNG = np.random.default_rng(0)
FILES = {
    "train-images-idx3-ubyte.gz": gzip.compress(idx(RNG.integers(0, 256, (100, 28, 28), dtype=np.uint8)), mtime=0),
    "train-labels-idx1-ubyte.gz": gzip.compress(idx(np.arange(100, dtype=np.uint8) % 10), mtime=0),
}


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves FILES under /good/, spoils the images under /corrupted/ and /truncated/, knows nothing else."""

    def do_GET(self):
        _, kind, name = self.path.split("/")
        content = FILES.get(name)
        if kind not in ("good", "corrupted", "truncated") or content is None:
            self.send_error(404)
            return
        self.server.requests.append(kind)
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if kind == "corrupted":
            content = content[:500] + bytes([content[500] ^ 1]) + content[501:]
        self.wfile.write(content[: len(content) // 2] if kind == "truncated" else content)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests = []
    server.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.delenv("PALIMPSEST_DATA", raising=False)
    monkeypatch.setattr(pooch, "os_cache", lambda name: tmp_path / "cache")
    monkeypatch.setattr(mnist, "MD5", {name: hashlib.md5(content).hexdigest() for name, content in FILES.items()})
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def use(monkeypatch, server, *kinds):
    monkeypatch.setattr(mnist, "MIRRORS", tuple(f"{server.address}/{kind}/" for kind in kinds))


def cached(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache").glob("*"))


def test_download_once(server, tmp_path, monkeypatch):
    use(monkeypatch, server, "good")
    assert datasets.load("mnist", per_class=4).image_shape == (1, 28, 28)
    assert cached(tmp_path) == sorted(FILES)
    datasets.load("mnist", per_class=4)
    assert server.requests == ["good", "good"]


@pytest.mark.parametrize(("kind", "why"), [("corrupted", "checksum"), ("truncated", ""), ("absent", "HTTPError")])
def test_bad_download_is_refused_and_leaves_nothing(server, tmp_path, monkeypatch, kind, why):
    use(monkeypatch, server, kind)
    with pytest.raises(DataError, match=rf"train-images-idx3-ubyte.gz.*{why}"):
        datasets.load("mnist")
    assert cached(tmp_path) == []


def test_the_next_mirror_is_tried(server, monkeypatch):
    use(monkeypatch, server, "absent", "corrupted", "good")
    assert len(datasets.load("mnist", per_class=4).train) == 8


def test_no_server_at_all(server, monkeypatch):
    monkeypatch.setattr(mnist, "MIRRORS", ("http://127.0.0.1:1/",))
    with pytest.raises(DataError, match="ConnectionError"):
        datasets.load("mnist")

"""Cold starts: every way is run in a process of its own, and the rows become tables."""

import json

import cold_start
import pytest
import tables


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cold-start")
    options = ["--small", "--parts", "cold", "--scratch", str(folder), "--out", str(folder / "results.json")]
    assert cold_start.main(options) == 0
    return folder / "results.json"


def test_every_way_ends_in_a_row(results):
    content = json.loads(results.read_text())
    rows = content["cold"]
    assert [row["way"] for row in rows] == [way.says for way in cold_start.WAYS]
    assert all(0 < row["seconds"] < row["process seconds"] for row in rows)
    assert {row["mode at the end"] for row in rows} == {"eager"}
    assert {"command", "commit", "torch", "device"} <= set(content)


def test_the_rows_become_tables_between_their_marks(results, tmp_path, monkeypatch):
    said = {"verdict": {"outcome": "leakage"}, "recovered": 12}
    audits = [{"minutes": 1.0, "seed": seed, "seconds": 57.0, "images": 50, "said": said} for seed in range(2)]
    audits[1]["said"] = None
    content = json.loads(results.read_text()) | {"audit": audits}
    (tmp_path / "both.json").write_text(json.dumps(content))
    page = tmp_path / cold_start.PAGE
    page.write_text((tables.DOCS / cold_start.PAGE).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(tables, "DOCS", tmp_path)
    for _ in range(2):
        assert cold_start.main(["--page", "--out", str(tmp_path / "both.json")]) == 0
    shown = page.read_text(encoding="utf-8")
    assert "| 1 | 0 | 57.0 | leakage | 12 of 50 |\n| 1 | 1 | 57.0 | none, it stopped | – |\n" in shown
    assert all(shown.count(f"| {way.says} |") == 1 for way in cold_start.WAYS)

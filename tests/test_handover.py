"""The report that is handed over: its summary, its checksums, and the copy without pictures."""

import copy
import hashlib
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

import palimpsest as pal
from audited import mlp, trained, truth
from palimpsest.auditing.advice import measured
from palimpsest.auditing.handover import summary
from palimpsest.auditing.page import render_audit
from palimpsest.cli.main import main
from palimpsest.files import storage
from palimpsest.files.versions import source_digest
from palimpsest.report.pictures import data_uri, shown
from palimpsest.scoring import Outcome
from palimpsest.scoring import judge as compare

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MLP = ["--network", "palimpsest.networks:MLP", "--network-args", '{"image_shape": [1, 8, 8], "hidden": [60, 60]}']
FEW = "--shape 1,8,8 --mean 0.5 --steps 15 --restarts 2 --tangents 1 --control-steps 5 --device cpu".split()
FOLDER_SUM = "find . -type f -printf '%P\\n' | LC_ALL=C sort | xargs -d '\\n' sha256sum | sha256sum"
EMBEDDED = re.compile(r"data:[^;,\s]|base64|<img|<image|url\(|[A-Za-z0-9+/]{150,}")  # pictures, by any name


class Sections(HTMLParser):
    """The cells of each section's tables, row by row, and its text."""

    def __init__(self, html):
        super().__init__()
        self.rows, self.text, self.cell = {}, {}, False
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        if tag == "section":
            self.name = dict(attrs)["id"]
            self.rows[self.name], self.text[self.name] = [], ""
        if tag == "tr":
            self.rows[self.name].append([])
        if tag in ("td", "th"):
            self.cell = True
            self.rows[self.name][-1].append("")

    def handle_endtag(self, tag):
        self.cell = self.cell and tag not in ("td", "th")

    def handle_data(self, data):
        if self.cell:
            self.rows[self.name][-1][-1] += data
        if self.rows:
            self.text[self.name] += data

    def row(self, section, name):
        (found,) = [row[1:] for row in self.rows[section] if row[0] == name]
        return found


@pytest.fixture(scope="module")
def digits():
    return pal.datasets.load("digits", per_class=4, held_out_per_class=20, seed=0)


@pytest.fixture(scope="module")
def audited(digits, tmp_path_factory):
    """The command of an audit with checkpoints and the optimiser's state, its files, and its folder, finished."""
    torch.manual_seed(0)
    folder, model = tmp_path_factory.mktemp("handover"), mlp()
    optimiser = torch.optim.SGD(model.parameters(), lr=2e-3, momentum=0.9)
    (folder / "epochs").mkdir()
    for epoch in range(3):
        state = {"model": copy.deepcopy(model.state_dict()), "optimizer": optimiser.state_dict()}
        torch.save(state, folder / "epochs" / f"{epoch}.pt")
        for _ in range(20):
            optimiser.zero_grad()
            (model(digits.train.images - 0.5).squeeze(1) - digits.train.labels).square().mean().backward()
            optimiser.step()
    known = truth(digits)
    np.savez(folder / "train.npz", images=known.images.numpy(), labels=known.labels.numpy())
    np.savez(folder / "held_out.npz", images=known.held_out.numpy(), labels=np.arange(len(known.held_out)) % 2)
    files = ["--weights", folder / "epochs" / "2.pt", "--checkpoints", folder / "epochs"]
    files += ["--data", folder / "train.npz", "--held-out", folder / "held_out.npz", "--rungs", "C", "O"]
    command = ["audit", "--out", str(folder / "audit"), *MLP, *FEW, *map(str, files)]
    assert main(command) == 0
    return command, folder


@pytest.fixture
def html(audited):
    return (audited[1] / "audit" / "report.html").read_text()


@pytest.fixture(scope="module")
def plain(digits, tmp_path_factory):
    """The result of an audit of a network with a known start, in Python."""
    initial, final = trained(mlp, digits, steps=100)
    few = {"steps": 15, "restarts": 2, "tangents": 1, "control_steps": 100, "rungs": ["W0"]}
    out, shape = tmp_path_factory.mktemp("plain") / "audit", digits.image_shape
    return pal.audit(mlp, final, initial=initial, image_shape=shape, out=out, truth=truth(digits), **few)


def changed(audit, **changes):
    """The audit with other evidence on its only rung."""
    rungs = [replace(rung, reading=rung.reading and replace(rung.reading, **changes)) for rung in audit.rungs]
    return replace(audit, rungs=tuple(rungs), **changes)


# --- the summary ---------------------------------------------------------------------------------


def test_the_summary_comes_first_and_the_files_last(html):
    page = Sections(html)
    assert list(page.rows)[:2] == ["verdict", "summary"]
    assert list(page.rows)[-1] == "files"
    head, *items = page.rows["summary"]
    assert len(head) == 3  # two rungs
    assert [row[0] for row in items] == [
        *("Means tried", "Knowledge assumed", "Effort", "Images affected", "Membership", "Controls", "Not tried"),
    ]
    assert [len(row) for row in items] == [3] * 4 + [2, 3, 2]
    assert "the final weights" in items[-1][1]  # this rung was not chosen


def test_the_effort_is_what_was_done(plain):
    effort = plain.effort
    assert (effort.restarts, effort.control_runs) == (2, 4)
    assert effort.seconds > 0 < effort.control_seconds
    assert len(effort.devices) == 1
    text = summary(plain, {})["Effort"][0]
    assert len(re.findall("<time>.*?</time>", text)) == 2


def test_both_readings_have_their_controls_on_the_page(html):
    controls = Sections(html).text["controls"]
    assert controls.count("Negative control") == controls.count("Positive control") == 2


def test_a_start_that_was_not_given_is_not_called_one(html, plain):
    assert Sections(html).row("preflight", "initial weights") == ["not given"]
    (said,) = Sections(plain.report.read_text()).row("preflight", "initial weights")
    assert said != "not given"


def test_a_control_that_moved_less_shows_beside_its_number(plain):
    lazy = changed(plain, positive=replace(plain.positive, way=0.3))
    for audit in (plain, lazy):
        tiles = Sections(render_audit(audit, None, "audit")).text["verdict"].partition("What this means")[0]
        assert ("0.3 times" in tiles) == (audit is lazy)


def with_ranking(audit, *, calibrated):
    """The audit with its verdict, as if its kind were calibrated or not."""
    rankings = {"ranking": audit.ranking, "negative": audit.negative}
    audit = changed(audit, **{name: replace(each, calibrated=calibrated) for name, each in rankings.items()})
    return changed(audit, verdict=pal.auditing.verdict.judge(audit))


def test_uncalibrated_kinds_show_ranks_and_no_percentages(plain):
    sections = ("verdict", "summary", "candidates", "evidence")
    plain = replace(plain, membership=None)  # it has a rate in percent
    calibrated, ranks = (
        Sections(render_audit(with_ranking(plain, calibrated=known), None, "audit")) for known in (True, False)
    )
    likeliest = f"{float(plain.ranking.probability[0]):.0%}"
    assert likeliest in calibrated.text["candidates"]
    assert "probability" in calibrated.text["evidence"]
    for section in sections:
        assert not re.search(r"\d\s*%", ranks.text[section]), section
    assert "probability" not in ranks.text["evidence"]
    assert "likely candidates" not in ranks.text["verdict"]


def test_leakage_as_a_whole_has_its_own_headline(plain):
    members, others = torch.linspace(0.2, 0.8, 40), torch.cat([torch.linspace(0.1, 0.6, 39), torch.tensor([0.9])])
    whole, single = compare(members, others), compare(members + 1, others)
    assert whole.outcome == single.outcome == "leakage"
    assert (whole.as_a_whole, single.as_a_whole) == (True, False)
    assert whole.sentence.startswith("Leakage as a whole:")
    for comparison in (whole, single):
        leaking = changed(plain, comparison=comparison)
        leaking = changed(leaking, verdict=pal.auditing.verdict.judge(leaking))
        said = Sections(render_audit(leaking, None, "audit")).text["verdict"].partition("Leakage")[0:3:2]
        assert ("as a whole" in said[1].splitlines()[0]) == comparison.as_a_whole
        affected = summary(leaking, {})["Images affected"][0]
        assert ("as a whole" in affected) == comparison.as_a_whole


# --- checksums -----------------------------------------------------------------------------------


def test_the_last_page_has_the_checksums_that_a_reader_can_make(audited, html):
    (_, folder), page = audited, Sections(html)
    weights = hashlib.sha256((folder / "epochs" / "2.pt").read_bytes()).hexdigest()
    rows = [row for row in page.rows["files"] if row[0] == "2.pt"]
    assert rows == [["2.pt", weights]] * 2  # as the trained weights, and as the last checkpoint
    for name in ("train.npz", "held_out.npz"):
        assert page.row("files", name) == [hashlib.sha256((folder / name).read_bytes()).hexdigest()]
    (config,) = page.row("files", "config.json")
    assert config == hashlib.sha256((folder / "audit" / "config.json").read_bytes()).hexdigest()
    assert source_digest() in page.text["files"]
    assert str(folder) not in html


def test_checkpoints_of_a_generator_are_on_the_last_page_too(audited, tmp_path):
    few = {"candidates": 4, "steps": 5, "restarts": 2, "tangents": 1, "control_steps": 1, "controls": False}
    weights, steps = audited[1] / "epochs" / "2.pt", (audited[1] / "epochs").glob("*.pt")
    found = pal.audit(mlp, weights, checkpoints=steps, image_shape=(1, 8, 8), out=tmp_path / "a", rungs=["C"], **few)
    assert {"0.pt", "1.pt", "2.pt"} <= {row[0] for row in Sections(found.report.read_text()).rows["files"]}


def test_a_folder_of_images_has_the_checksum_of_a_shell(tmp_path):
    for name in ("b/2.png", "a/1.png", "a.png", "B"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    made = subprocess.run(FOLDER_SUM, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert storage.folder_digest(tmp_path) == made.split()[0]


# --- the copy without pictures -------------------------------------------------------------------


def test_a_redacted_report_has_no_picture_and_the_audit_is_not_run_again(audited, html, monkeypatch):
    (command, folder), out = audited, audited[1] / "audit"
    ranking, _ = storage.load_tensors(out / "C" / "ranking.safetensors")
    known = [data_uri(image) for image in torch.from_numpy(np.load(folder / "train.npz")["images"])]
    assert shown(ranking["images"][0] + 0.5) in html  # the search below would find them
    assert any(uri in html for uri in known)
    assert EMBEDDED.search(html)
    made = {path: path.read_bytes() for path in out.rglob("runs/*.safetensors")}
    monkeypatch.setattr("palimpsest.auditing.reading.reconstruct", None)  # it would fail
    assert main([*command, "--redact"]) == 0
    redacted = (out / "report.html").read_text()
    assert not EMBEDDED.search(redacted)
    assert made == {path: path.read_bytes() for path in out.rglob("runs/*.safetensors")}
    kinds = {path.suffix for path in out.rglob("*") if path.is_file()} - {""}
    assert kinds == {".json", ".safetensors", ".txt", ".html", ".csv"}  # no file of a picture
    before, after = (Sections(text).rows for text in (html, redacted))
    names, numbers = ([row.pop(0) for row in rows["classes"]] for rows in (before, after))
    assert (names[1:], numbers[1:]) == (["0", "1"], ["1", "2"])  # a class may be named after a person
    for name, rows in after.items():
        if name == "candidates" or name.startswith("rung-"):  # a table in the place of pictures
            assert [row[0] for row in rows] == ["candidate", *map(str, range(1, len(rows)))]
            assert (len(rows) > 1, before[name]) == (True, [])
            before[name] = rows
    assert before == after
    assert not re.search('class="(plate|cell|empty)', redacted)
    assert re.findall(r'class="note.*?</span>', html) == re.findall(r'class="note.*?</span>', redacted)
    assert main(command) == 0
    assert (out / "report.html").read_text() == html


# --- paper ---------------------------------------------------------------------------------------


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_it_prints_on_a4_with_the_summary_on_a_page_of_its_own(audited, html, tmp_path):
    def pages(text):
        (tmp_path / "page.html").write_text(text)
        options = f"--headless --no-sandbox --disable-gpu --user-data-dir={tmp_path / 'profile'}".split()
        options += [f"--print-to-pdf={tmp_path / 'page.pdf'}", (tmp_path / "page.html").as_uri()]
        subprocess.run([CHROMIUM, *options], check=True, capture_output=True, timeout=600)
        return re.findall(rb"/MediaBox \[0 0 ([0-9.]+) ([0-9.]+)\]", (tmp_path / "page.pdf").read_bytes())

    sizes = pages(html)
    assert {(round(float(width)), round(float(height))) for width, height in sizes} == {(595, 842)}
    start, end = html.index('<section id="ladder">'), html.index('<section id="files">')
    assert len(pages(html[:start] + html[end:])) == 2  # the first page and the last


# --- how to lower the risk -----------------------------------------------------------------------


def test_advice_is_for_the_rungs_that_leak(plain):
    leaking = changed(plain, verdict=replace(plain.verdict, outcome=Outcome.LEAKAGE))
    listed = [row[0] for row in Sections(render_audit(leaking, None, "net")).rows["advice"]]
    measures = {rung: [row["measure"] for row in rows] for rung, rows in measured().items()}
    assert listed == ["measure", *measures["W0"]]
    assert "DP-SGD, ε = 8" in listed
    assert not set(listed) & (set(measures["O"]) - set(measures["W0"]))
    nothing = changed(plain, verdict=replace(plain.verdict, outcome=Outcome.UNDECIDED))
    assert Sections(render_audit(nothing, None, "net")).rows["advice"] == []

"""The answers of an audit for programs: audit.json and its schema, images.csv, the gate, and comparisons."""

import csv
import json
import re
import runpy
import shlex
import sys
from dataclasses import replace
from html import unescape
from importlib import resources
from pathlib import Path

import jsonschema
import pytest
import torch
from PIL import Image

import palimpsest as pal
from audited import mlp
from palimpsest.auditing import Gate, compare, load
from palimpsest.auditing.images import COLUMNS
from palimpsest.auditing.reasons import Reason
from palimpsest.cli.main import main
from palimpsest.errors import RunFolderError

NETWORK = ["--network", "palimpsest.networks:MLP", "--network-args", '{"image_shape": [1, 8, 8], "hidden": [60, 60]}']
QUICK = "--shape 1,8,8 --mean 0.5 --steps 150 --restarts 2 --tangents 1 --control-steps 200 --device cpu".split()


def written(folder, images, labels):
    for i, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
        (folder / f"digit {label}").mkdir(parents=True, exist_ok=True)
        Image.fromarray((255 * image[0]).round().byte().numpy()).save(folder / f"digit {label}" / f"{i}.png")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a training, its images and two audits: "leaking" and, with noise on the weights, "noisy"."""
    place = tmp_path_factory.mktemp("gate")
    data = pal.datasets.load("digits", per_class=2, held_out_per_class=20, seed=0)
    labels = [(part.labels > 0).long() for part in (data.train, data.held_out)]
    written(place / "train", data.train.images, labels[0])
    written(place / "held-out", data.held_out.images, labels[1])
    torch.manual_seed(0)
    fit = pal.train(mlp(), data.train.images - 0.5, data.train.labels, steps=500)
    final = fit.model.state_dict()
    torch.save(fit.initial, place / "start.pt")
    torch.save(final, place / "final.pt")
    noise = {name: t + 3 * (t - fit.initial[name]).std() * torch.randn_like(t) for name, t in final.items()}
    torch.save(noise, place / "noise.pt")
    assert main(command(place, "leaking")) == 0
    assert main(command(place, "noisy")) == 0
    return place


def command(place, out, *more):
    weights, more = ("final.pt", more) if out == "leaking" else ("noise.pt", ("--no-controls", *more))
    files = {
        "--out": out,
        "--weights": weights,
        "--initial": "start.pt",
        "--data": "train",
        "--held-out": "held-out",
        "--rungs": "W0",
    }
    return [
        "audit",
        *NETWORK,
        *QUICK,
        *(w for name, path in files.items() for w in (name, path if name == "--rungs" else str(place / path))),
        *more,
    ]


# --- audit.json ----------------------------------------------------------------------------------


def strict(schema):
    """The schema without room for fields that it does not name."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: strict(each) for name, each in schema.items()}
    return inner | ({"additionalProperties": False} if "required" in schema and "properties" in schema else {})


@pytest.fixture(scope="module")
def schema():
    text = resources.files("palimpsest.auditing").joinpath("audit.schema.json").read_text(encoding="utf-8")
    jsonschema.Draft202012Validator.check_schema(json.loads(text))
    return json.loads(text)


@pytest.mark.parametrize("name", ["leaking", "noisy"])
def test_audits_are_as_the_schema_says_to_the_last_field(name, place, schema):
    content = json.loads((place / name / "audit.json").read_text())
    jsonschema.validate(content, strict(schema))
    for wrong in ({"schema": 2}, {"readings": []}, {"verdict": content["verdict"] | {"outcome": "perhaps"}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(content | wrong, schema)
    withheld = content["verdict"]["outcome"] in ("undecided", "no verdict")
    assert (content["verdict"]["reason"] is not None) == withheld


def test_schema_and_page_name_every_reason(schema):
    named = set(schema["$defs"]["reason"]["examples"])
    assert named == {str(each) for each in Reason}
    page = (Path(__file__).parents[1] / "docs" / "pipelines.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", page.partition("## Reasons")[2], re.MULTILINE)
    assert named == set(re.findall(r"`(.+?)`", " ".join(rows))) - {"reason"}


def test_the_report_the_terminal_and_the_record_say_what_may_be_published(place, capsys):
    """All three have the same answers. The question is the first thing on the page, before any number."""
    assert main(command(place, "leaking")) == 0
    said, page = capsys.readouterr().out, unescape((place / "leaking" / "report.html").read_text())
    record = load(place / "leaking")
    answers = {tuple(each.rungs): (each.answer, each.exposes) for each in record.publication}
    count = len(record.images.recovered)
    assert answers[("W",)] == ("not tested", None)
    assert answers[("W", "W0")] == answers[("W", "W0", "C", "O")] == ("do not publish", count)
    for each in record.publication:
        (line,) = [line for line in said.splitlines() if line.strip().startswith(f"{each.files}  ")]
        assert line.endswith(f"{each.answer}: {each.reason}")
        row = re.search(rf'<tr class="[a-z-]+"><th scope="row">{each.files}</th><td>(.*?)</td>', page)
        assert row[1] == f"<b>{each.answer}</b>: {each.reason}"
    assert page.index('id="publish"') < page.index('class="figures"')


def test_the_terminal_names_the_command_that_tests_membership_by_the_loss(place, capsys):
    """With the initial weights, their change shows members, and the audit tests it itself."""
    assert main(command(place, "leaking")) == 0
    assert "palimpsest membership" not in capsys.readouterr().out
    words = command(place, "weights-only", "--steps", "2", "--candidates", "2")
    words[words.index("--rungs") + 1] = "W"
    start = words.index("--initial")
    del words[start : start + 2]
    assert main(words) == 0
    said = capsys.readouterr().out
    (line,) = [line.strip() for line in said.splitlines() if line.strip().startswith("palimpsest membership")]
    assert main(shlex.split(line)[1:]) == 0  # as it is printed
    assert load(place / "weights-only").membership is None
    assert json.loads((place / "weights-only-membership" / "membership.json").read_text())["statistic"] == "loss"
    assert "--loss" in (place / "weights-only" / "report.html").read_text()


def test_the_record_has_the_numbers_of_the_audit(place):
    record = load(place / "leaking")
    assert record.verdict.outcome == record.readings[0].outcome == "leakage"
    estimates = record.readings[0].estimates
    assert [value is None for value in (estimates.expected, estimates.highest)] == [not estimates.calibrated] * 2
    assert record.readings[0].comparison.recovered == len(record.images.recovered)
    assert record.inputs.weights != load(place / "noisy").inputs.weights
    assert record.inputs.images == load(place / "noisy").inputs.images
    assert [(each.name, each.images) for each in record.images.classes] == [("digit 0", 2), ("digit 1", 2)]
    assert sum(each.recovered for each in record.images.classes) == len(record.images.recovered)
    assert 'id="classes"' in (place / "leaking" / "report.html").read_text()


# --- images.csv ----------------------------------------------------------------------------------


def test_every_training_image_has_an_answer(place):
    with (place / "leaking" / "images.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    record, ranked = (
        load(place / "leaking"),
        pal.storage.load_tensors(place / "leaking" / "W0" / "ranking.safetensors")[0],
    )
    assert tuple(rows[0]) == COLUMNS
    assert [row["name"] for row in rows] == ["digit 0/0.png", "digit 0/1.png", "digit 1/2.png", "digit 1/3.png"]
    assert [int(row["image"]) for row in rows if row["recovered"] == "yes"] == record.images.recovered
    assert {row["rung"] for row in rows if row["recovered"] == "yes"} == {"W0"}
    for row in (row for row in rows if row["recovered"] == "yes"):
        image = torch.from_numpy(pal.datasets.folder.read(place / "train").images[int(row["image"]) - 1 :][:1]).float()
        shown = ranked["images"][int(row["candidate"]) - 1 :][:1]
        assert pal.scoring.metrics.pairwise_ncc(image, shown) > 0.8
        assert float(row["ssim"]) > 0.8


# --- the gate ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "limits", "status"),
    [
        ("leaking", {}, 3),
        ("leaking", {"--max-recovered": 0}, 0),
        ("leaking", {"--max-recovered": -1}, 3),
        ("leaking", {"--max-probability": 1}, 3),  # the claim is a comparison, which that does not limit
        ("noisy", {}, 4),
        ("noisy", {"--max-recovered": 4, "--max-probability": 1}, 4),
    ],
)
def test_a_finished_audit_passes_the_gate_or_not(name, limits, status, place):
    """Limits on recovered images are relative to their number."""
    count = len(load(place / name).images.recovered)
    words = [str(w) for n, limit in limits.items() for w in (n, limit + count * (n == "--max-recovered"))]
    assert main(command(place, name, "--gate", *words)) == status


@pytest.mark.parametrize(
    "limits",
    [["--max-recovered", "1"], ["--gate", "--max-probability", "2"], ["--gate", "--max-recovered", "-1"]],
)
def test_limits_that_are_none_are_wrong_use(limits, place, capsys):
    assert main(command(place, "leaking", *limits)) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_images_are_not_counted_without_images(place, capsys):
    words = ["audit", *NETWORK, "--shape", "1,8,8", "--out", str(place / "new"), "--weights", str(place / "final.pt")]
    assert main([*words, "--gate", "--max-recovered", "1"]) == 2
    assert not (place / "new").exists()


def test_the_gate_without_a_comparison(place):
    """Leakage by estimates passes under a limit on estimates only; images that nobody counted are undecided."""
    record = load(place / "leaking")
    highest = 0.9
    estimates = replace(record.readings[0].estimates, calibrated=True, highest=highest)
    estimated = replace(record.readings[0], comparison=None, estimates=estimates)
    record = replace(record, readings=[estimated], images=replace(record.images, recovered=None))
    assert Gate().decide(record).status == 3
    assert Gate(max_probability=highest).decide(record).status == 0
    assert Gate(max_probability=highest - 0.01).decide(record).status == 3
    assert Gate(max_recovered=4).decide(record).status == 4
    ranks = replace(estimated, estimates=replace(estimates, calibrated=False, highest=None))
    assert Gate(max_probability=1.0).decide(replace(record, readings=[ranks])).status == 4
    nothing = replace(record, verdict=replace(record.verdict, outcome="no evidence"))
    assert Gate().decide(nothing).status == 0
    assert Gate(max_probability=0.1).decide(nothing).status == 3
    unfinished = replace(nothing, verdict=replace(nothing.verdict, finished=False))
    assert Gate().decide(unfinished).status == 4
    within = replace(record, verdict=replace(record.verdict, finished=False))
    assert Gate(max_probability=highest).decide(within).status == 4


def test_the_gate_asks_about_the_files_that_will_be_published(place):
    record = load(place / "leaking")  # the initial weights expose images, the final ones alone do not decide
    by_files = {tuple(each.rungs): each for each in record.publication}
    assert by_files["W", "W0"].answer == "do not publish"
    assert Gate(publish="W0").decide(record).status == 3
    assert Gate(publish="W0", max_recovered=by_files["W", "W0"].exposes).decide(record).status == 0
    assert Gate(publish="W0", max_recovered=by_files["W", "W0"].exposes - 1).decide(record).status == 3
    for answer, status in (("undecided", 4), ("not tested", 4), ("no evidence, not a clearance", 0)):
        alone = replace(by_files["W",], answer=answer, exposes=None)
        assert Gate(publish="W").decide(replace(record, publication=[alone])).status == status
    assert Gate(publish="C").decide(replace(record, publication=[])).status == 4


# --- comparisons ---------------------------------------------------------------------------------


def test_two_audits_are_compared(place, capsys):
    assert main(["compare", str(place / "leaking"), str(place / "noisy"), "--json", str(place / "c.json")]) == 0
    shown, stored = capsys.readouterr().out, json.loads((place / "c.json").read_text())
    was, now = (set(load(place / name).images.recovered) for name in ("leaking", "noisy"))
    assert stored["hidden"] == sorted(was - now) != []
    assert stored["exposed"] == sorted(now - was)
    (warning,) = stored["warnings"]  # noise hides the span, so that plan searches everywhere
    assert "within" in warning
    rows = {(row["reading"], row["what"]): (row["old"], row["new"]) for row in stored["rows"]}
    assert rows["W0", "outcome"][0] == "leakage"
    assert rows["", "headline"][0] == "leakage by W0"
    assert rows["", "training images recovered"] == (f"{len(was)} of 4", f"{len(now)} of 4")
    assert all(what in shown for _, what in rows)


def test_rungs_are_compared_with_themselves_alone(place):
    """An audit that read another rung: nothing of the two is compared, and that is said."""

    def other_rung(content):
        content["readings"][0] |= {"name": "C", "outcome": "undecided"}
        content["inputs"]["weights"] = ""

    found = changed(place, "other-rung", other_rung)
    rows = [(row.reading, row.what, row.old, row.new) for row in found.rows]
    assert rows == [("W0", "outcome", "leakage", "not read"), ("C", "outcome", "not read", "undecided")]
    assert (found.hidden, found.exposed) == (None, None)
    assert sorted(warning.split()[2] for warning in found.warnings) == ["new", "old"]

    def more_rungs(content):
        content["readings"].append(content["readings"][0] | {"name": "C", "unexplained": 0.1})
        content["verdict"]["rung"] = "C"

    more = changed(place, "more-rungs", more_rungs)
    assert {row.reading for row in more.rows} == {"W0", "C"}
    (share,) = [row for row in more.rows if row.what == "share unexplained"]
    assert (share.reading, share.old) == ("W0", share.new)  # not that of C, the new headline


def changed(place, folder, change):
    (place / folder).mkdir()
    content = json.loads((place / "leaking" / "audit.json").read_text())
    change(content)
    (place / folder / "audit.json").write_text(json.dumps(content))
    return compare(place / "leaking", place / folder)


def test_audits_that_differ_in_more_than_the_weights_are_told(place):
    plan = changed(place, "plan", lambda c: (c["readings"][0]["plan"].update(steps=3), c["inputs"].update(weights="")))
    assert len(plan.warnings) == 1
    assert "steps" in plan.warnings[0]
    data = changed(place, "data", lambda c: c["inputs"].update(images="0" * 64))
    assert data.hidden is None
    assert len(data.warnings) == 2  # the images, and weights that are the same
    shape = changed(place, "shape", lambda c: c["inputs"].update(parameters=3, weights=""))
    assert len(shape.warnings) == 1


def test_fields_of_a_later_version_are_ignored_and_damage_is_not(place, tmp_path):
    content = json.loads((place / "leaking" / "audit.json").read_text())
    later = content | {"later": {"a": [1]}}
    for part in ("verdict", "inputs", "images"):
        later[part] = later[part] | {"later": 3}
    for part in ("readings", "rungs", "publication"):
        later[part] = [each | {"later": None} for each in later[part]]
    later["readings"][0]["comparison"]["later"] = later["images"]["classes"][0]["later"] = "x"
    (tmp_path / "audit.json").write_text(json.dumps(later))
    assert load(tmp_path) == load(place / "leaking")
    earlier = {name: each for name, each in content.items() if name not in ("publication", "doubts")}
    (tmp_path / "audit.json").write_text(json.dumps(earlier))
    assert load(tmp_path).publication == []
    for part, name in (("verdict", "outcome"), ("inputs", "weights")):
        damaged = content | {part: {key: each for key, each in content[part].items() if key != name}}
        (tmp_path / "audit.json").write_text(json.dumps(damaged))
        with pytest.raises(RunFolderError, match=f"{part}.{name} is missing"):
            load(tmp_path)
    (tmp_path / "audit.json").write_text(json.dumps(content | {"rungs": [3]}))
    with pytest.raises(RunFolderError, match="damaged"):
        load(tmp_path)


@pytest.mark.parametrize("content", [None, "{", "{}", "[]", "3", '{"schema": 2}', '{"schema": 1, "verdict": 3}'])
def test_folders_that_are_no_finished_audits_are_refused(content, place, tmp_path, capsys):
    if content is not None:
        (tmp_path / "audit.json").write_text(content)
    with pytest.raises(RunFolderError):
        load(tmp_path)
    assert main(["compare", str(place / "leaking"), str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_command_line_is_a_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["palimpsest", "--version"])
    with pytest.raises(SystemExit) as left:
        runpy.run_module("palimpsest", run_name="__main__")
    assert left.value.code == 0
    assert capsys.readouterr().out == f"palimpsest {pal.__version__}\n"

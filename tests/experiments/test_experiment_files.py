"""The experiments' files make sense, and those that do not are refused."""

import re
from pathlib import Path

import pytest
import torch
from reproduce import experiment, summary
from reproduce.command import main

from palimpsest.errors import InvalidInputError
from palimpsest.solver.loop import Settings

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("small", [False, True], ids=["full", "small"])
@pytest.mark.parametrize("name", experiment.names())
def test_every_experiment_can_be_run(name, small):
    known = experiment.load(name, small=small)
    assert {"published", "ours"} <= set(known.columns)
    assert not small or known.training.data in ("faces", "digits")  # which need no download
    for column in known.columns.values():
        assert {"none", "splitting"} <= set(column.variants)
        for variant in column.variants:
            settings = column.settings(torch.zeros(1)) | column.policy(variant)
            Settings(candidates=column.candidates[0], steps=column.steps, **settings)
    assert all(goal.measure in summary.MEASURED for goal in known.goals)


def goal(measure, candidates=60):
    goals = f'[{{column = "ours", variant = "none", candidates = {candidates}, measure = {measure}}}]'
    return f'based_on = "ntk-cifar10"\ngoals = {goals}'


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("title = 3 4", "is not a TOML file"),
        ('based_on = "ntk-cifar10"\nmood = "good"', "mood is unknown"),
        ('title = "nothing else"', "columns is missing"),
        ('based_on = "x"', "there is no file"),
        ('based_on = "ntk-cifar10"\ncolumns.ours.variants = ["none", "spliting"]', "the variant spliting is unknown"),
        ('based_on = "ntk-cifar10"\ncolumns.ours.splitting = { rouds = 2 }', "rouds"),
        ('based_on = "ntk-cifar10"\ncolumns.ours.splitting = { rounds = 0 }', "splitting needs rounds"),
        ('based_on = "ntk-cifar10"\ncolumns.ours.priors = { TotalVaration = {} }', "TotalVaration"),
        ('based_on = "ntk-cifar10"\nmetric = "SSIM"', "metric is 'SSIM', and not ssim or l2"),
        ('based_on = "ntk-cifar10"\nseeds = 0', "seeds is 0, and not a list, each a whole number"),
        ('based_on = "ntk-cifar10"\nseeds = []', "seeds is empty"),
        ('based_on = "ntk-cifar10"\nseeds = ["a"]', "seeds is ['a'], and not a list, each a whole number"),
        ('based_on = "ntk-cifar10"\ntraining.images = 11', "images is 11, and not a multiple of the 2 classes"),
        (
            'based_on = "ntk-cifar10"\ntraining.scale = "big"',
            "scale is 'big', and not a number or a list, each a number",
        ),
        ('based_on = "ntk-cifar10"\ncolumns.ours.steps = 60.5', "steps is 60.5, and not a whole number"),
        ('based_on = "ntk-cifar10"\ncolumns.ours.steps = 0', "steps is 0 and candidates is [200, 100, 60]"),
        ('based_on = "ntk-cifar10"\ncolumns.ours.candidates = []', "candidates is [], and not one or more"),
        ('based_on = "ntk-cifar10"\ncolumns.ours.sharpness = [1.0]', "sharpness is [1.0], and not a list"),
        ('based_on = "ntk-cifar10"\ncolumns.ours.from_initial = 1', "from_initial is 1, and not true or false"),
        ('based_on = "ntk-cifar10"\ncolumns.ours.priors = { Box = 1 }', "priors is {'Box': 1}, and not a table"),
        ('based_on = "other.toml"', "there is no file"),
        ("based_on = 3", "based on 3"),
        ('based_on = "ntk-cifar10"\nsmall = 3', "small is 3, and not a table"),
        ('based_on = "ntk-cifar10"\nname = "other"', "name is unknown"),
        ('based_on = "ntk-cifar10"\ncolumns.ours.splitting = { direction = "random" }', "direction is unknown"),
        (goal('"loss", at_most = 1').replace("ours", "theirs"), "the column theirs is unknown"),
        (goal('"SSIM", at_least = 1'), "aims at 'SSIM'; choose from mean SSIM"),
        (goal('"loss"'), "a goal needs either at_least or at_most"),
        (goal('"loss", at_most = 1', candidates=9), "no part of ours is none from 9 candidates"),
        ('based_on = "wrong.toml"', "based on itself"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path, text, complaint, capsys):
    (tmp_path / "wrong.toml").write_text(text)
    assert main([str(tmp_path / "wrong.toml"), "--out", str(tmp_path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert complaint in line


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ('mood = "good"', experiment.keys(experiment.Experiment)),
        ("training.mood = 1", experiment.keys(experiment.Training)),
        ("columns.ours.mood = 1", experiment.keys(experiment.Column)),
        ('columns.ours.variants = ["mood"]', experiment.VARIANTS),
        ("columns.ours.priors = { mood = {} }", experiment.PRIORS),
        ("columns.ours.splitting = { mood = 2 }", experiment.POLICIES["splitting"]),
        ("columns.ours.merging = { mood = 2 }", experiment.POLICIES["merging"]),
        ("goals = [{ mood = 1 }]", experiment.keys(experiment.Goal)),
    ],
)
def test_an_unknown_key_is_answered_with_the_known_ones(tmp_path, text, known):
    (tmp_path / "wrong.toml").write_text(f'based_on = "ntk-cifar10"\n{text}')
    with pytest.raises(InvalidInputError, match=f"mood is unknown; choose from {', '.join(known)}"):
        experiment.load(str(tmp_path / "wrong.toml"))


def test_the_guide_names_every_key_and_its_example_is_an_experiment(tmp_path):
    guide = (ROOT / "docs" / "own-experiments.md").read_text(encoding="utf-8")
    kinds = (experiment.Experiment, experiment.Training, experiment.Column, experiment.Goal)
    known = {key for kind in kinds for key in experiment.keys(kind)} | set(experiment.VARIANTS) | set(experiment.PRIORS)
    known |= {key for of in experiment.POLICIES.values() for key in of}
    assert {key for key in known if f"`{key}`" not in guide} == set()
    [example] = re.findall(r"```toml\n(.*?)```", guide, re.DOTALL)
    (tmp_path / "mine.toml").write_text(example, encoding="utf-8")
    assert experiment.load(str(tmp_path / "mine.toml")).seeds == (0, 1)


def test_two_files_of_one_name_are_refused(tmp_path, capsys):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.toml").write_text('based_on = "ntk-cifar10"')
    files = [str(tmp_path / folder / "mine.toml") for folder in ("one", "two")]
    assert main([*files, "--out", str(tmp_path / "runs")]) == 2
    assert "rename one" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_file_may_not_take_the_name_of_an_experiment(tmp_path):
    (tmp_path / "unknown-n.toml").write_text('based_on = "ntk-cifar10"')
    with pytest.raises(InvalidInputError, match="rename the file"):
        experiment.load(str(tmp_path / "unknown-n.toml"))


def test_a_file_is_based_on_another_beside_it(tmp_path):
    (tmp_path / "one.toml").write_text('based_on = "ntk-cifar10"\ntitle = "One"')
    (tmp_path / "two.toml").write_text('based_on = "one.toml"')
    assert experiment.load(str(tmp_path / "two.toml")).title == "One"


def test_what_the_paper_says_and_what_is_aimed_at_are_not_inherited(tmp_path):
    (tmp_path / "own.toml").write_text('based_on = "ntk-cifar10"\ntitle = "Mine"')
    own = experiment.load(str(tmp_path / "own.toml"))
    assert (own.paper, own.goals) == ("", ())
    assert own.columns == experiment.load("ntk-cifar10").columns

"""The experiments' files make sense, and those that do not are refused."""

import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from reproduce import experiment, summary
from reproduce.command import main

import palimpsest as pal
from palimpsest.errors import InvalidInputError
from palimpsest.solver.settings import Settings

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


BASED = 'based_on = "ntk-cifar10"\n'


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("title = 3 4", "wrong.toml"),
        (BASED + 'mood = "good"', "mood"),
        ('title = "nothing else"', "metric"),
        ('based_on = "x"', "x.toml"),
        (BASED + 'columns.ours.variants = ["none", "spliting"]', "columns.ours.variants[1]"),
        (BASED + "columns.ours.splitting = { rouds = 2 }", "columns.ours.splitting.rouds"),
        (BASED + "columns.ours.splitting = { rounds = 0 }", "columns.ours.splitting"),
        (BASED + "columns.ours.priors = { TotalVaration = {} }", "columns.ours.priors"),
        (BASED + "columns.ours.priors = { Box = { wait = 1 } }", "wait"),
        (BASED + 'metric = "SSIM"', "metric is 'SSIM'; give ssim or l2"),
        (BASED + "seeds = 0", "seeds"),
        (BASED + "seeds = []", "seeds"),
        (BASED + 'seeds = ["a"]', "seeds[0]"),
        (BASED + "training.images = 11", "training"),
        (BASED + 'training.scale = "big"', "training.scale"),
        (BASED + "columns.ours.steps = 60.5", "columns.ours.steps"),
        (BASED + "columns.ours.steps = 0", "columns.ours.steps"),
        (BASED + "columns.ours.candidates = []", "columns.ours"),
        (BASED + "columns.ours.sharpness = [1.0]", "columns.ours.sharpness"),
        (BASED + "columns.ours.from_initial = 1", "columns.ours.from_initial"),
        (BASED + "columns.ours.priors = { Box = 1 }", "columns.ours.priors.Box"),
        ('based_on = "other.toml"', "other.toml"),
        ("based_on = 3", "based_on"),
        (BASED + "small = 3", "small"),
        (BASED + 'name = "other"', "name"),
        (BASED + 'columns.ours.splitting = { direction = "random" }', "direction"),
        (goal('"loss", at_most = 1').replace("ours", "theirs"), "theirs"),
        (goal('"SSIM", at_least = 1'), "SSIM"),
        (goal('"loss"'), "goals[0]"),
        (goal('"loss", at_most = 1', candidates=9), "9 candidates"),
        ('based_on = "wrong.toml"', "based on itself"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path, text, field, capsys):
    (tmp_path / "wrong.toml").write_text(text)
    options = ["--small"] if field == "small" else []
    assert main([str(tmp_path / "wrong.toml"), "--out", str(tmp_path), *options]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert field in line


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ('mood = "good"', get_type_hints(experiment.Description)),
        ("training.mood = 1", get_type_hints(experiment.Training)),
        ("columns.ours.mood = 1", get_type_hints(experiment.Column)),
        ('columns.ours.variants = ["mood"]', experiment.VARIANTS),
        ("columns.ours.priors = { mood = {} }", get_args(experiment.PriorName)),
        ("columns.ours.splitting = { mood = 2 }", get_type_hints(pal.Splitting)),
        ("columns.ours.merging = { mood = 2 }", get_type_hints(pal.Merging)),
        ("goals = [{ mood = 1 }]", get_type_hints(experiment.Goal)),
    ],
)
def test_an_unknown_key_is_answered_with_the_known_ones(tmp_path, text, known):
    (tmp_path / "wrong.toml").write_text(BASED + text)
    with pytest.raises(InvalidInputError, match="mood") as refused:
        experiment.load(str(tmp_path / "wrong.toml"))
    assert all(name in str(refused.value) for name in known)


def test_the_guide_names_every_key_and_its_example_is_an_experiment(tmp_path):
    guide = (ROOT / "docs" / "own-experiments.md").read_text(encoding="utf-8")
    ours = (experiment.Description, experiment.Training, experiment.Column, experiment.Goal)
    known = {key for kind in (*ours, pal.Splitting, pal.Merging) for key in get_type_hints(kind)} - {"direction"}
    known |= {*experiment.VARIANTS, *get_args(experiment.PriorName)}
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

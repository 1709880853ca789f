"""An experiment of seconds, and where what comes of it is."""

from palimpsest.reproduce import experiment
from palimpsest.reproduce.runner import Runner

TINY = """
based_on = "ntk-cifar10"
title = "Tiny"
paper = "Of 25 images 21 gain SSIM by splitting."
seeds = [0, 1]
goals = [
  { column = "ours", variant = "none", candidates = 4, measure = "mean SSIM", at_least = 2.0 },
  { column = "ours", variant = "splitting", candidates = 4, measure = "% better than unsplit", at_least = 0 },
]
training = { data = "digits", images = 8, hidden = [12], steps = 50 }

[columns.published]
candidates = [4]
steps = 24

[columns.ours]
candidates = [4]
steps = 24
variants = ["none", "splitting", "merging", "restarts", "random", "duplicate", "final-k", "equal-compute"]
merging = { alike = 0.95, dead = 0.01, counting = true }
"""


def arguments(folder):
    return [str(folder / "tiny.toml"), "--out", str(folder / "runs"), "--docs", str(folder / "docs")]


def beside(folder):
    """Where a tiny experiment is summed up."""
    return folder / "runs" / "tiny"


def runner_in(folder):
    return Runner(experiment.load(str(folder / "tiny.toml")), folder / "runs" / "tiny")

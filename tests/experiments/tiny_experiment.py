"""An experiment that takes seconds, and the folders of its files."""

from reproduce import experiment, parts

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
    return [str(folder / "tiny.toml"), "--out", str(folder / "runs")]


def beside(folder):
    """The folder of its parts, figures and page."""
    return folder / "runs" / "tiny"


def loaded(folder):
    return experiment.load(str(folder / "tiny.toml"))


def results_in(folder):
    return parts.read(beside(folder), loaded(folder))

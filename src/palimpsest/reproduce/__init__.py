"""The experiments of the paper, each as published and as we do it, with every control.

An experiment is a short file in `experiments/`; it falls into parts, one for each column, variant, number of candidates
and seed. A part is saved as soon as it is finished and never done twice, so that any number of short sittings add up.

    palimpsest reproduce ntk-cifar10                 all parts that are missing
    palimpsest reproduce ntk-cifar10 --summarise     docs/results/ntk-cifar10.json, its figures, and docs/scoreboard.md

`python -m palimpsest.reproduce` is the same, where the command line's own dependencies are not installed.
"""

from palimpsest.reproduce.command import Options, reproduce

__all__ = ["Options", "reproduce"]

"""Measures that lower the risk, with the numbers of an experiment, for the rungs on which a network leaks.

``advice.json`` is made by ``experiments/advice.py``. For each rung it lists measures, the most effective first::

    {"rungs": {"W0": [{"measure": …, "networks": {"dense": {"before": [r, n], "after": [r, n], "accuracy": [a, b]}}}]}}

r of n training images are recovered, and a and b are the accuracies on new images, before and after the measure.
"""

import json
from importlib import resources
from typing import Any

from palimpsest.auditing.result import Audit


def measured() -> dict[str, list[dict[str, Any]]]:
    """The measures for each rung."""
    return json.loads(resources.files("palimpsest.auditing").joinpath("advice.json").read_text("utf-8"))["rungs"]


def applicable(audit: Audit) -> dict[str, list[dict[str, Any]]]:
    """The measures for each rung that leaks, by what this rung adds. Empty if none leaks or none was measured."""
    table = measured()
    leaking = [rung.attacker for rung in audit.rungs if rung.leaks]
    return {each.adds: table[each.name] for each in leaking if each.name in table}

"""The methods, one a file, on one objective."""

from palimpsest.objectives.base import Objective
from palimpsest.objectives.kkt import KKT
from palimpsest.objectives.multiclass import MulticlassKKT
from palimpsest.objectives.ntk import NTK

__all__ = ["KKT", "NTK", "MulticlassKKT", "Objective"]

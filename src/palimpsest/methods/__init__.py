"""The methods, one a file. Each states its target T, its tangent points θ* and its scalar φ."""

from palimpsest.methods.adam import AdamPath
from palimpsest.methods.gradient import Gradient
from palimpsest.methods.kkt import KKT
from palimpsest.methods.moments import moments, undo_adam
from palimpsest.methods.multiclass import MulticlassKKT
from palimpsest.methods.ntk import NTK
from palimpsest.methods.path import Path

__all__ = ["KKT", "NTK", "AdamPath", "Gradient", "MulticlassKKT", "Path", "moments", "undo_adam"]

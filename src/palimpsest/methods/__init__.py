"""The methods, one a file. Each states its target T, its tangent points θ* and its scalar φ."""

from palimpsest.methods.kkt import KKT
from palimpsest.methods.multiclass import MulticlassKKT
from palimpsest.methods.ntk import NTK

__all__ = ["KKT", "NTK", "MulticlassKKT"]

"""No per-candidate gradient is ever stored: memory stays far below k × P."""

import subprocess
import sys

PROGRAM = """
import resource
import torch
import palimpsest as pal
from palimpsest.parametrisation import Everywhere
from palimpsest.solver import Settings, Solver
torch.manual_seed(0)
initial, final = (pal.networks.MLP((1, 25, 25), (500, 500)) for _ in range(2))
objective = pal.NTK(final, initial.state_dict())
solver = Solver(objective, Everywhere((1, 25, 25)), Settings(candidates=4000, steps=2))
state = solver.step(solver.init())
pal.splitting.min_eigenpairs(solver.objective, state.x, state.multipliers, iterations=3)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


def test_four_thousand_candidates_stay_under_two_gigabytes():
    """A step and curvature products on 625–500–500–1 in float32; a k × P matrix alone would be 9 GB."""
    output = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    assert float(output) < 2.0

"""No per-candidate gradient is ever stored: memory stays far below k × P."""

import subprocess
import sys

PROGRAM = """
from pathlib import Path
import torch
import palimpsest as pal
from palimpsest.objectives.spaces import Everywhere
from palimpsest.solver.loop import Solver
from palimpsest.solver.settings import Settings

def kilobytes(field):
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))

torch.manual_seed(0)
initial, final = (pal.networks.MLP((1, 25, 25), (500, 500)) for _ in range(2))
objective = pal.NTK(final, initial.state_dict())
before = kilobytes("VmRSS")
solver = Solver(objective, Everywhere((1, 25, 25)), Settings(candidates=2000, steps=2))
state = solver.step(solver.init())
pal.splitting.min_eigenpairs(solver.objective, state.x, state.multipliers, iterations=3)
print((kilobytes("VmHWM") - before) * 1024 / (2000 * 4 * sum(p.numel() for p in final.parameters())))
"""


def test_two_thousand_candidates_take_a_fraction_of_their_gradients():
    """A step and curvature products on 625–500–500–1 in float32; a k × P matrix would be 4.5 GB."""
    output = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    assert float(output) < 0.25

"""Work beside other work: when it is done, and what waits for it."""

import functools
from contextlib import nullcontext

import pytest
import torch

import palimpsest as pal
from palimpsest.execution import Execution
from palimpsest.execution.aside import _side, aside
from palimpsest.solver.priors import Box, TotalVariation


class Small(pal.priors.Prior):
    """Without a closed form: its gradient is taken by autograd, on the second stream."""

    def value(self, images, multipliers):
        return 0.1 * images.square().mean() + 0.1 * multipliers.square().mean()


def test_work_aside_is_done_when_it_is_asked_for():
    done = []
    wait = aside(lambda: done.append("work") or "result")
    assert not done
    assert wait() == "result"
    assert done == ["work"]


def test_recorded_work_begins_aside_after_all_before_and_is_waited_for(monkeypatch):
    events = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            events.append(f"{self.name} waits for {other.name}")

        def record_event(self):
            return f"the end on {self.name}"

        def wait_event(self, event):
            events.append(f"{self.name} waits for {event}")

    current = Stream("main")
    fakes = {
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: True,
        "current_device": lambda: 0,
        "current_stream": lambda: current,
        "stream": lambda stream: nullcontext(),
        "Stream": lambda device: Stream("side"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    _side.cache_clear()
    wait = aside(lambda: events.append("work") or "result")
    assert events == ["side waits for main", "work"]
    assert wait() == "result"
    assert events[2:] == ["main waits for the end on side"]
    _side.cache_clear()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("prior", [TotalVariation() + Box(), Small()], ids=["closed form", "autograd"])
@pytest.mark.parametrize("at", [0.5, (0.2, 0.8)])
def test_work_aside_repeats_to_the_last_bit(prior, at):
    """On two streams, work that did not wait would change from run to run. The sizes are such that kernels overlap."""
    torch.manual_seed(0)
    initial, final = (pal.networks.MLP((3, 32, 32), (512, 512)).cuda() for _ in range(2))
    objective = pal.NTK(final, initial.state_dict(), at=at)
    run = functools.partial(pal.reconstruct, image_shape=(3, 32, 32), candidates=100, priors=prior, progress=False)
    long = [run(objective, steps=200, execution=Execution(mode="graph")) for _ in range(3)]
    assert all(torch.equal(long[0].images, other.images) for other in long[1:])
    exact = objective.to(dtype=torch.float64)
    modes = [run(exact, steps=20, execution=Execution(mode=mode)) for mode in ("eager", "graph")]
    assert torch.allclose(modes[0].images, modes[1].images, atol=1e-9)
    assert torch.allclose(modes[0].multipliers, modes[1].multipliers, atol=1e-9)

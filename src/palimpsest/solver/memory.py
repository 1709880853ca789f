"""How many candidates fit into memory together."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from palimpsest.errors import ResourceError
from palimpsest.execution.processes import Processes
from palimpsest.execution.resources import available_memory
from palimpsest.objectives import Objective

SHARE = 0.5  # of the free memory that the intermediate results of a step may take
COPIES = 6  # tensors that a step keeps for each one that the network computes: derivatives and their graphs


def chunk_size(objective: Objective, x: Tensor, gigabytes: float | None, processes: Processes, k: int) -> int | None:
    """The most candidates whose step fits into this memory (by default half of the free memory), a power of two.

    None if each process's share of the k candidates fits, or if they are one batch that cannot be divided. All
    processes use the size of the one with the least memory, because they decide by it.
    """
    if objective.live:
        _require_room_for_all(objective, x, gigabytes, k)
        return None
    share = -(-k // processes.count)
    neighbours = 1 if x.is_cuda else processes.on_this_host
    room = int(SHARE * free_bytes(x.device) / neighbours if gigabytes is None else 1e9 * gigabytes)
    fitting = room // max(1, bytes_per_candidate(objective, x))
    fitting = int(processes.joined(torch.tensor([fitting], device=x.device), processes.count).min())
    return None if fitting >= share else 1 << max(0, fitting.bit_length() - 1)


def _require_room_for_all(objective: Objective, x: Tensor, gigabytes: float | None, k: int) -> None:
    room, needed = free_bytes(x.device) if gigabytes is None else 1e9 * gigabytes, k * bytes_per_candidate(objective, x)
    if needed > room:
        sizes = f"a batch of {k} candidates needs about {needed / 1e9:.1f} GB, and {room / 1e9:.1f} GB are free"
        raise ResourceError(f"{sizes}; give fewer candidates, because live batch normalisation takes all at once")


def bytes_per_candidate(objective: Objective, x: Tensor) -> int:
    """A safe estimate of the memory that a step takes for each candidate."""
    few = min(4, len(x))
    with torch.no_grad(), _Counting() as counting:
        objective.outputs(x[:few])
    return COPIES * len(objective.tangents) * (counting.bytes + x[:few].nbytes) // few


def free_bytes(device: torch.device) -> int:
    """Free memory on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return available_memory()


class _Counting(TorchFunctionMode):
    """Adds up the bytes of every tensor that torch functions return."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.bytes += result.nbytes
        return result

"""Where independent parts of a large job run: here, in other processes, or on other machines.

A part is a function without arguments that can be pickled, such as ``functools.partial(work, input)``. Any executor of
the kind of ``concurrent.futures`` runs parts. Dask's repeats a part whose worker died, so a lost machine costs its part
only. Parts do not share anything, so the results do not depend on where they run.
"""

import asyncio
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from threading import TIMEOUT_MAX, Lock
from typing import Any, TypeVar

import torch

from palimpsest.errors import InvalidInputError, NoAnswerError, PalimpsestError, WorkerLostError

Key = TypeVar("Key")
Result = TypeVar("Result")
SECONDS = 5.0  # to reach a scheduler
_one_at_a_time = Lock()  # random numbers belong to a process, and a worker of Dask may have several threads


def completed(
    parts: Mapping[Key, Callable[[], Result]], executor: Executor | None, *, seconds: float | None = None
) -> Iterator[tuple[Key, Callable[[], Result]]]:
    """Run the parts, and name each as soon as it is done, with a function that returns its result or raises its error.

    Without an executor that function is the part itself, which therefore runs here. The parts that have not begun when
    the caller stops, for any reason, are cancelled. ``seconds`` is the longest time to wait for an executor.

    Examples:
        >>> from functools import partial
        >>> {key: result() for key, result in completed({"a": partial(pow, 2, 3), "b": partial(pow, 2, 4)}, None)}
        {'a': 8, 'b': 16}
    """
    if executor is None:
        yield from parts.items()
        return
    submitted: dict[Future[Result], Key] = {}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sending large graph")  # weights are large, and sent on purpose
            for key, part in parts.items():
                submitted[executor.submit(_run, _sealed(part))] = key
        for future in as_completed(submitted, seconds and min(seconds, TIMEOUT_MAX)):
            yield submitted[future], lambda future=future: _result(future)  # type: ignore[misc]
    except TimeoutError:
        raise NoAnswerError("the workers did not answer in time; check that there are some") from None
    finally:
        for future in submitted:
            future.cancel()


def _sealed(part: Callable[[], Any]) -> bytes:
    """The part in bytes, which only its worker opens: a scheduler on the way need not know the code of a network."""
    try:
        from cloudpickle import dumps  # comes with Dask, and also takes functions that are not in a module
    except ImportError:
        from pickle import dumps
    try:
        return dumps(part)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        advice = "give the network as package.module:function"
        raise InvalidInputError(f"this cannot be sent to a worker ({error}); {advice}") from error


def _run(sealed: bytes) -> Any:
    with _one_at_a_time:
        try:
            part = pickle.loads(sealed)
        except (ImportError, PalimpsestError) as error:
            advice = "a worker needs the same packages, and the code of the network at the same place"
            raise InvalidInputError(f"{error}; {advice}") from error
        return part()


def _result(future: Future[Result]) -> Result:
    lost: tuple[type[BaseException], ...] = (BrokenExecutor, CancelledError)
    if dask := sys.modules.get("distributed"):
        lost += (dask.KilledWorker,)
    try:
        return future.result()
    except lost as error:
        advice = "give the workers more memory if they ran out of it, and run the same command again"
        raise WorkerLostError(f"the worker of a part was lost; {advice}") from error


@contextmanager
def local(count: int) -> Iterator[Executor]:
    """Processes on this machine, which share its cores."""
    threads = max(1, (os.cpu_count() or 1) // count)
    with ProcessPoolExecutor(count, get_context("spawn"), torch.set_num_threads, (threads,)) as pool:
        yield pool


@contextmanager
def cluster(address: str) -> Iterator[Executor]:
    """The workers of the Dask cluster whose scheduler has this address, such as tcp://scheduler:8786."""
    try:
        import distributed
    except ImportError:
        raise InvalidInputError("Dask is not installed; run pip install 'palimpsest[cluster]'") from None
    try:
        asyncio.run(_reach(address))
    except (OSError, ValueError, TypeError) as error:
        advice = "start it with `dask scheduler`, and give the address that it prints"
        raise InvalidInputError(f"there is no Dask scheduler at {address!r}; {advice}") from error
    with distributed.Client(address, timeout=SECONDS, set_as_default=False) as client:
        yield client.get_executor(pure=False)


async def _reach(address: str) -> None:
    """Connect once, because a client that cannot connect leaves tracebacks behind."""
    from distributed.comm import connect
    from distributed.security import Security

    comm = await connect(address, timeout=SECONDS, **Security().get_connection_args("client"))
    await comm.close()

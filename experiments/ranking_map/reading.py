"""Reads a network by the stages of an audit, and says which candidates show a training image."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from palimpsest.auditing import ladder, plan, ranking
from palimpsest.auditing.agreement import Run, agree
from palimpsest.auditing.case import Case, Clock
from palimpsest.auditing.controls import shuffled
from palimpsest.auditing.options import Options
from palimpsest.auditing.preflight import preflight
from palimpsest.auditing.reading import PosedByRole, read_once
from palimpsest.auditing.shown import shows
from palimpsest.auditing.subject import Subject, subject
from palimpsest.datasets import DataSet
from ranking_map.networks import Network
from ranking_map.training import trained

ANY = plan.Budget(1.0, 1.0, 1.0)  # steps, restarts and tangent points are chosen, so the time does not matter


def read(network: Network, folder: Path) -> list[dict[str, Any]]:
    """For each rung: the facts that the map uses, and which candidates are real."""
    data = network.images()
    examined = audited(network, data)
    options = Options(
        samples=len(data.train), rungs=network.rungs, steps=network.steps, restarts=network.restarts,
        tangents=network.tangents, control_steps=1, weight_decay=network.training == "decay", seed=network.seed,
    )  # fmt: skip
    rows = []
    for attacker, chosen in planned(examined, options):
        place = folder / attacker.name
        place.mkdir(parents=True, exist_ok=True)
        case = Case(place, network.name, examined, options, None, torch.device("cpu"), Clock(math.inf))
        problems = PosedByRole(case, chosen)
        runs = [read_once(case, chosen, "subject", number, problems) for number in range(chosen.restarts)]
        row: dict[str, Any] = {
            "rung": attacker.name,
            "kind": vars(ranking.kind(examined, chosen)),
            "tangents": len(chosen.at),
        }
        row |= {"directions": attacker.directions, "candidates": chosen.candidates}
        rows.append(row | described([run for run in runs if len(run.images)], data, chosen.within))
    return rows


def audited(network: Network, data: DataSet) -> Subject:
    """The network as an audit gets it: with its initial weights, and its checkpoints and optimiser if they are read."""
    left = trained(network, data)
    weights: dict[str, Any] = left.model.state_dict()
    if "O" in network.rungs:
        weights = {"model": weights, "optimizer": left.optimiser}
    examined = subject(
        lambda: network.made(data),
        weights,
        initial=left.checkpoints[0],
        checkpoints=left.checkpoints[1:-1] if "C" in network.rungs else None,
        image_shape=data.image_shape,
    )
    return shuffled(examined, "ntk", seed=network.seed) if network.permuted else examined


def planned(examined: Subject, options: Options) -> Iterator[tuple[ladder.Attacker, plan.Plan]]:
    found = preflight(examined)
    for attacker in ladder.attackers(examined, found, options, scored=False):
        if attacker.method is not None and attacker.name in (options.rungs or ()):
            yield attacker, plan.timed_plan(plan.untimed_plan(attacker, found, options), options, ANY)


def described(runs: list[Run], data: DataSet, within: str) -> dict[str, Any]:
    agreed = agree(runs)
    members, others = (data.centred(part.images) for part in (data.train, data.held_out))
    return {
        "shape": list(data.image_shape), "crowding": agreed.crowding, "explained": agreed.explained,
        "agreement": agreed.agreement.double().round(decimals=4).tolist(),
        "copies": agreed.copies.double().round(decimals=4).tolist(), "originals": agreed.originals.tolist(),
        "real": shows(agreed.images, members, others, within=within).tolist(),
        "exchanged": int(shows(agreed.images, others, members, within=within).sum()),
    }  # fmt: skip

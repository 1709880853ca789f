"""Networks of somebody else, and the truth about them, for the tests of audits."""

import torch
from torch import nn

import outsider
import palimpsest as pal
from palimpsest.auditing.subject import subject

SHAPE = (1, 8, 8)
QUICK = {"samples": 4, "steps": 150, "restarts": 2, "tangents": 1, "control_steps": 400}


def trained(make, data, **options):
    """(initial, final) weights of an outsider's network."""
    torch.manual_seed(0)
    model = make()
    initial = {name: t.clone() for name, t in model.state_dict().items()}
    outsider.train(model, data.train.images - 0.5, data.train.labels.float(), **options)
    return initial, model.state_dict()


def truth(data) -> pal.auditing.Truth:
    labels = (data.train.labels > 0).long()
    return pal.auditing.Truth(data.train.images, labels, data.held_out.images, mean=torch.full(SHAPE, 0.5))


def mlp():
    return pal.networks.MLP(SHAPE, hidden=(60, 60))


def fitted_mlp(**options):
    data = pal.datasets.load("digits", per_class=4, seed=1)
    torch.manual_seed(0)
    model = mlp()
    fit = pal.train(model, data.train.images - 0.5, data.train.labels, **options)
    return subject(mlp, fit.model.state_dict(), initial=fit.initial, image_shape=SHAPE)


def pooled():
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.Tanh(), nn.AvgPool2d(6), nn.Flatten(), nn.Linear(8, 1))

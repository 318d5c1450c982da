"""Optimizers by their names in the configuration, nearly all of them torch's. To add one, add a row to `OPTIMIZERS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from nmt_train.optim.muon import Matrix, Muon

_DECAY = 0.9  # of the running mean of squared gradients in rmsprop and adadelta


def _epsilon(config: Any) -> dict[str, Any]:
    return {} if config.epsilon is None else {"eps": config.epsilon}


# Arguments: the section `optimizer` of the configuration; the flat parameter; the places of matrices in it.
_Builder = Callable[[Any, torch.nn.Parameter, Sequence[Matrix]], Any]
OPTIMIZERS: dict[str, _Builder] = {
    "sgd": lambda c, p, _: torch.optim.SGD([p], lr=c.learning_rate, fused=True),
    "momentum": lambda c, p, _: torch.optim.SGD([p], lr=c.learning_rate, momentum=c.momentum, fused=True),
    "nesterov": lambda c, p, _: torch.optim.SGD(
        [p], lr=c.learning_rate, momentum=c.momentum, nesterov=c.momentum > 0, fused=True
    ),
    "adagrad": lambda c, p, _: torch.optim.Adagrad([p], lr=c.learning_rate, fused=p.device.type == "cpu", **_epsilon(c)),
    "rmsprop": lambda c, p, _: torch.optim.RMSprop([p], lr=c.learning_rate, alpha=_DECAY, **_epsilon(c)),
    "adadelta": lambda c, p, _: torch.optim.Adadelta([p], lr=c.learning_rate, rho=_DECAY, **_epsilon(c)),
    "adam": lambda c, p, _: torch.optim.Adam([p], lr=c.learning_rate, betas=(c.beta1, c.beta2), fused=True, **_epsilon(c)),
    "adamw": lambda c, p, _: torch.optim.AdamW(
        [p], lr=c.learning_rate, betas=(c.beta1, c.beta2), weight_decay=c.weight_decay, fused=True, **_epsilon(c)
    ),
    "muon": lambda c, p, matrices: Muon(p, matrices, c),
}

"""torch's optimizers by their names in the configuration. To add an optimizer, add a row to `OPTIMIZERS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_DECAY = 0.9  # of the running mean of squared gradients in rmsprop and adadelta


def _epsilon(config: Any) -> dict[str, Any]:
    return {} if config.epsilon is None else {"eps": config.epsilon}


# Arguments: the section `optimizer` of the configuration; the flat parameter.
_Builder = Callable[[Any, torch.nn.Parameter], torch.optim.Optimizer]
OPTIMIZERS: dict[str, _Builder] = {
    "sgd": lambda c, p: torch.optim.SGD([p], lr=c.learning_rate, fused=True),
    "momentum": lambda c, p: torch.optim.SGD([p], lr=c.learning_rate, momentum=c.momentum, fused=True),
    "nesterov": lambda c, p: torch.optim.SGD([p], lr=c.learning_rate, momentum=c.momentum, nesterov=c.momentum > 0, fused=True),
    "adagrad": lambda c, p: torch.optim.Adagrad([p], lr=c.learning_rate, fused=p.device.type == "cpu", **_epsilon(c)),
    "rmsprop": lambda c, p: torch.optim.RMSprop([p], lr=c.learning_rate, alpha=_DECAY, **_epsilon(c)),
    "adadelta": lambda c, p: torch.optim.Adadelta([p], lr=c.learning_rate, rho=_DECAY, **_epsilon(c)),
    "adam": lambda c, p: torch.optim.Adam([p], lr=c.learning_rate, betas=(c.beta1, c.beta2), fused=True, **_epsilon(c)),
    "adamw": lambda c, p: torch.optim.AdamW(
        [p], lr=c.learning_rate, betas=(c.beta1, c.beta2), weight_decay=c.weight_decay, fused=True, **_epsilon(c)
    ),
}

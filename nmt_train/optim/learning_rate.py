"""The learning-rate schedule, and how it is adapted to asynchronous workers."""

from __future__ import annotations

import dataclasses
import math

from nmt_train.optim.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, update: int, decayed: float = 0.0) -> float:
    """The rate of `update` (counted from 1).

    decayed: the part of `cosine_until` that training has done, from 0 to 1.
    """
    if config.schedule == "cosine":
        low = min(config.minimum, config.learning_rate)
        rate = low + (config.learning_rate - low) * (1 + math.cos(math.pi * decayed)) / 2
        return rate * min(1.0, update / max(1, config.warmup))
    if update < config.warmup:
        return config.learning_rate * update / config.warmup
    if config.schedule == "inverse-sqrt":
        return config.learning_rate * math.sqrt(max(config.warmup, 1) / max(update, 1))
    if config.schedule == "step":
        return config.learning_rate * 0.5 ** ((update - config.warmup) // config.step_every)
    return config.learning_rate


def for_async_workers(workers: int, config: OptimizerConfig, own_steps: bool = False) -> OptimizerConfig:
    """The settings for `workers` workers whose updates are added up.

    own_steps: the warm-up counts the steps of one worker; otherwise, the updates of all.
    """
    if workers == 1:
        return config
    beta1 = config.beta1 if isinstance(config.async_beta1, str) else config.async_beta1
    warmup = config.warmup if isinstance(config.async_warmup, str) else config.async_warmup
    if beta1 is None:
        beta1 = max(0.0, config.beta1 - (1 - 1 / workers))
    if warmup is None:
        warmup = round(workers ** (2 / 3) / (workers if own_steps else 1) * config.warmup)
    return dataclasses.replace(config, beta1=beta1, warmup=warmup)

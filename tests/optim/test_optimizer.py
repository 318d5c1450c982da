"""Optimizers over the flat vector against torch's over separate tensors, and against the formulas of Arnold (2016), 2.2.

Where torch differs from those formulas: momentum and Nesterov multiply the learning rate with the whole velocity, not with
each gradient as it enters (the same while the rate is constant), and start it at the first gradient; Adagrad, RMSProp and
Adam add epsilon outside the square root, the guide inside; the guide's Adadelta has no learning rate (torch's is 1 there);
the guide's Adam corrects by the epoch's number, torch by the update's.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nmt_train.common.errors import NotFinite, UserError
from nmt_train.optim.config import OptimizerConfig
from nmt_train.optim.learning_rate import learning_rate
from nmt_train.optim.muon import Matrix
from nmt_train.optim.optimizer import Clipping, Optimizer, divide_and_clip

NAMES = ["sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adadelta", "adam", "adamw"]  # muon: see test_muon.py
RATE, MOMENTUM, DECAY, EPSILON = 0.05, 0.9, 0.9, 1e-12


def constant(name: str, **changes: object) -> OptimizerConfig:
    values = {"name": name, "learning_rate": RATE, "schedule": "constant", "warmup": 0, "epsilon": EPSILON, "weight_decay": 0.0}
    return OptimizerConfig(**{**values, **changes})  # type: ignore[arg-type]


def gradients(size: int, steps: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for _ in range(steps)]


def run(config: OptimizerConfig, start: Tensor, steps: list[Tensor]) -> Tensor:
    parameters = start.clone()
    optimizer = Optimizer(config, parameters)
    for gradient in steps:
        optimizer.apply(gradient.clone())
    return parameters


def torchs_own(name: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return {
        "sgd": lambda: torch.optim.SGD(parameters, lr=RATE),
        "momentum": lambda: torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM),
        "nesterov": lambda: torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM, nesterov=True),
        "adagrad": lambda: torch.optim.Adagrad(parameters, lr=RATE, eps=EPSILON),
        "rmsprop": lambda: torch.optim.RMSprop(parameters, lr=RATE, alpha=DECAY, eps=EPSILON),
        "adadelta": lambda: torch.optim.Adadelta(parameters, lr=RATE, rho=DECAY, eps=EPSILON),
        "adam": lambda: torch.optim.Adam(parameters, lr=RATE, betas=(0.9, 0.98), eps=EPSILON),
        "adamw": lambda: torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.98), eps=EPSILON, weight_decay=0.0),
    }[name]()


@pytest.mark.parametrize("name", ["momentum", "nesterov"])
def test_without_momentum_both_are_gradient_descent(name: str) -> None:
    start, steps = torch.linspace(-1, 1, 10), gradients(10)
    assert torch.equal(run(constant(name, momentum=0.0), start, steps), run(constant("sgd"), start, steps))


@pytest.mark.parametrize("name", NAMES)
def test_the_flat_vector_moves_as_separate_tensors_do_under_torch(name: str) -> None:
    start = torch.linspace(-1, 1, 10)
    parts = [torch.nn.Parameter(part.clone()) for part in start.split([3, 7])]
    optimizer = torchs_own(name, parts)
    for gradient in gradients(10):
        for part, piece in zip(parts, gradient.split([3, 7]), strict=True):
            part.grad = piece.clone()
        optimizer.step()
    moved = run(constant(name), start, gradients(10))
    torch.testing.assert_close(moved, torch.cat([part.detach() for part in parts]))


def by_formula(name: str, weights: Tensor, steps: list[Tensor]) -> Tensor:
    """Arnold (2016), section 2.2, epsilon taken as nothing."""
    velocity = squares = mean = deltas = torch.zeros_like(weights)
    for number, gradient in enumerate(steps, 1):
        if name == "sgd":
            weights = weights - RATE * gradient
        elif name == "momentum":
            velocity = MOMENTUM * velocity + RATE * gradient
            weights = weights - velocity
        elif name == "nesterov":
            # As printed the guide adds momentum to the stored velocity too; the method it cites looks ahead without that.
            velocity = MOMENTUM * velocity + RATE * gradient
            weights = weights - (MOMENTUM * velocity + RATE * gradient)
        elif name == "adagrad":
            squares = squares + gradient**2
            weights = weights - RATE * gradient / squares.sqrt()
        elif name == "rmsprop":
            squares = DECAY * squares + (1 - DECAY) * gradient**2
            weights = weights - RATE * gradient / squares.sqrt()
        elif name == "adadelta":
            squares = DECAY * squares + (1 - DECAY) * gradient**2
            change = gradient * ((deltas + 1e-3) / (squares + 1e-3)).sqrt()
            deltas = DECAY * deltas + (1 - DECAY) * change**2
            weights = weights - change
        elif name == "adam":
            mean = 0.9 * mean + 0.1 * gradient
            squares = 0.98 * squares + 0.02 * gradient**2
            rate = RATE * math.sqrt(1 - 0.98**number) / (1 - 0.9**number)
            weights = weights - rate * mean / squares.sqrt()
    return weights


@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adadelta", "adam"])
def test_optimizers_follow_the_formulas_of_the_guide(name: str) -> None:
    start = torch.linspace(-1, 1, 10)
    config = constant(name) if name != "adadelta" else constant(name, learning_rate=1.0, epsilon=1e-3)
    torch.testing.assert_close(run(config, start, gradients(10)), by_formula(name, start, gradients(10)), rtol=1e-4, atol=1e-5)


def test_adamw_shrinks_parameters_beside_the_gradient() -> None:
    start, still = torch.ones(4), [torch.zeros(4)] * 3
    torch.testing.assert_close(run(constant("adamw", weight_decay=0.1), start, still), start * (1 - RATE * 0.1) ** 3)


@pytest.mark.parametrize("name", NAMES)
def test_state_saved_and_loaded_continues_bit_for_bit(name: str) -> None:
    config = constant(name, smoothing=0.1, schedule="inverse-sqrt", warmup=3)
    whole, steps = torch.linspace(-1, 1, 10), gradients(10)
    straight = Optimizer(config, whole)
    for number, gradient in enumerate(steps):
        straight.apply(gradient.clone())
        if number == 2:
            vectors, numbers = straight.state()
            saved = {key: value.clone() for key, value in vectors.items()}
            parameters, smoothed = whole.clone(), straight.smoothed.clone()  # type: ignore[union-attr]
    resumed = Optimizer(config, parameters)
    resumed.load(saved, numbers, "here")
    resumed.smoothed.copy_(smoothed)  # type: ignore[union-attr]
    for gradient in steps[3:]:
        resumed.apply(gradient.clone())
    assert torch.equal(parameters, whole)
    assert torch.equal(resumed.smoothed, straight.smoothed)  # type: ignore[arg-type]
    assert (resumed.updates, resumed.learning_rate) == (straight.updates, straight.learning_rate)


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_begins_from_nothing(name: str) -> None:
    fresh = Optimizer(constant(name), torch.zeros(3))
    fresh.load({}, {"updates": 0, "torch": {}}, "the beginning")
    fresh.apply(torch.ones(3))
    assert fresh.updates == 1


def test_state_of_another_optimizer_or_size_is_refused() -> None:
    adam = Optimizer(constant("adam"), torch.zeros(4))
    adam.apply(torch.ones(4))
    vectors, numbers = adam.state()
    with pytest.raises(UserError, match=r"here: the optimizer state \(exp_avg, exp_avg_sq\) does not fit optimizer.name sgd"):
        Optimizer(constant("sgd"), torch.zeros(4)).load(vectors, numbers, "here")
    with pytest.raises(UserError, match="here: exp_avg has 4 elements instead of 5"):
        Optimizer(constant("adam"), torch.zeros(5)).load(vectors, numbers, "here")


@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        ({"schedule": "constant", "warmup": 0}, {1: 1.0, 1000: 1.0}),
        ({"schedule": "constant", "warmup": 10}, {1: 0.1, 5: 0.5, 10: 1.0, 50: 1.0}),
        ({"schedule": "inverse-sqrt", "warmup": 100}, {50: 0.5, 100: 1.0, 400: 0.5, 10_000: 0.1}),
        ({"schedule": "step", "warmup": 0, "step_every": 10}, {9: 1.0, 10: 0.5, 25: 0.25}),
    ],
)
def test_learning_rate_schedules(changes: dict[str, object], rates: dict[int, float]) -> None:
    config = OptimizerConfig(learning_rate=1.0, **changes)  # type: ignore[arg-type]
    for update, rate in rates.items():
        assert learning_rate(config, update) == pytest.approx(rate, abs=1e-9)


def test_a_cosine_depends_on_the_part_that_is_done_and_its_warm_up_on_updates() -> None:
    config = OptimizerConfig(learning_rate=1.0, schedule="cosine", warmup=10, minimum=0.2)
    for decayed, rate in {0.0: 1.0, 0.5: 0.6, 1.0: 0.2}.items():
        found = [learning_rate(config, update, decayed) for update in (5, 10, 100, 10_000)]
        assert found == pytest.approx([rate / 2, rate, rate, rate])


def test_smoothing_is_a_running_mean_that_forgets_its_start() -> None:
    parameters = torch.zeros(1)
    optimizer = Optimizer(constant("sgd", learning_rate=1.0, smoothing=0.01), parameters)
    expected = 0.0
    for update in range(1, 1500):
        optimizer.apply(torch.full((1,), -1.0))
        weight = max(0.01, 9 / (update + 10))
        expected += weight * (update - expected)
    assert float(optimizer.smoothed) == pytest.approx(expected, rel=1e-4)  # type: ignore[arg-type]
    assert float(parameters - optimizer.smoothed) == pytest.approx(99, abs=1)  # type: ignore[operator]


def test_clipping_averages_then_shortens_and_reports_the_norm_before() -> None:
    gradient = torch.tensor([6.0, 8.0])
    assert divide_and_clip(gradient, Clipping(1.0), divisor=2) == pytest.approx(5.0)
    torch.testing.assert_close(gradient, torch.tensor([0.6, 0.8]))
    gradient = torch.tensor([0.3, 0.4])
    assert divide_and_clip(gradient, Clipping(1.0), divisor=1) == pytest.approx(0.5)
    assert gradient.tolist() == pytest.approx([0.3, 0.4])
    gradient = torch.tensor([30.0, 40.0])
    divide_and_clip(gradient, Clipping(0.0), divisor=1)
    assert gradient.tolist() == [30.0, 40.0]


def test_with_muon_the_norm_is_that_of_what_is_no_matrix_and_matrices_are_only_averaged() -> None:
    matrices = [Matrix(1, 2, 2), Matrix(6, 1, 1)]
    gradient = torch.tensor([6.0, 100.0, 200.0, 300.0, 400.0, 8.0, 500.0])
    assert divide_and_clip(gradient, Clipping.of(OptimizerConfig(name="muon"), 7, matrices), divisor=2) == pytest.approx(5.0)
    torch.testing.assert_close(gradient, torch.tensor([0.6, 50.0, 100.0, 150.0, 200.0, 0.8, 250.0]))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_refused_untouched(value: float) -> None:
    gradient = torch.tensor([1.0, value])
    with pytest.raises(NotFinite):
        divide_and_clip(gradient, Clipping(1.0), 1)
    assert gradient[0] == 1.0


def test_a_running_mean_that_catches_up_counts_every_update() -> None:
    config = OptimizerConfig(name="sgd", learning_rate=1.0, schedule="constant", warmup=0, smoothing=0.3)
    one, other = (Optimizer(config, torch.zeros(3)) for _ in range(2))
    for made in (one, other):
        made.parameters.fill_(5.0)
        made.updates = 40
    for update in (38, 39, 40):
        one.updates = update
        one.smooth()
    other.smooth(3)
    torch.testing.assert_close(one.smoothed, other.smoothed)

"""A recipe: learning rate, schedule, batch and steps of a training, and its optimizer."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal, get_args

import torch
from torch import nn

from thinwire.errors import ConfigError
from thinwire.policies.sampling import Segments

Schedule = Literal["cosine", "linear", "polynomial", "exponential", "step", "constant"]
Loss = Literal["cross-entropy", "squared-error"]
Optimizer = Literal["SGD", "Adam", "AdamW"]

STEP_AT = 2 / 3


@dataclass(frozen=True)
class Recipe:
    """The settings of a training."""

    model: str  # name of the model
    data: str  # name of the data set
    _: KW_ONLY
    lr: float  # the largest learning rate
    batch: int  # examples per worker and step
    workers: int  # number of workers for the learning rate
    steps: int  # number of steps
    final: float = 0.01  # the last learning rate as a share of `lr`; for "step" the share after two thirds of the run
    schedule: Schedule = "cosine"
    warmup: float = 0.0  # share of the run in which the learning rate rises linearly to `lr`
    optimizer: Optimizer = "SGD"  # "SGD", "Adam" or "AdamW"
    momentum: float = 0.9  # SGD's momentum
    weight_decay: float = 1e-4  # decay of matrices and filters; vectors (biases, norms) are never decayed
    dropout: float = 0.0
    augment: bool = False  # random crop and flip
    betas: tuple[float, float] = (0.9, 0.999)  # betas of Adam and AdamW
    clip: float | None = None
    context: int | None = None  # bytes in an example of text; None takes the data set's
    scales: bool = False
    loss: Loss = "cross-entropy"  # the minimised loss, "cross-entropy" or "squared-error" (`evaluate.squared_error`)
    l1: float = 0.0  # weight of the matrices' ℓ1 penalty
    segments: Segments = "drawn"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ConfigError(f"the learning rate is {self.lr}; expected a positive number")
        for name in ("batch", "workers", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected 1 or more")
        if not 0 <= self.final <= 1:
            raise ConfigError(f"final is {self.final}; expected a share from 0 to 1")
        if self.schedule == "exponential" and self.final == 0:
            raise ConfigError("final is 0: the exponential schedule would reach 0 at the second step")
        shares = ("warmup", "momentum", "dropout")
        for name, below in (*((each, 1.0) for each in shares), ("weight_decay", math.inf), ("l1", math.inf)):
            if not 0 <= getattr(self, name) < below:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected 0 or more and below {below:g}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas are {self.betas}; expected numbers from 0 to below 1")
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"clip is {self.clip}; expected a positive norm, or None")
        choices = {"schedule": Schedule, "optimizer": Optimizer, "loss": Loss, "segments": Segments}
        for name, allowed in ((name, get_args(kind)) for name, kind in choices.items()):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"unknown {name} {getattr(self, name)!r}; allowed are {', '.join(allowed)}")


def for_workers(recipe: Recipe, workers: int) -> Recipe:
    """Returns the recipe for another number of workers; it changes learning rate and steps only if it `scales`."""
    if not recipe.scales:
        return replace(recipe, workers=workers)
    factor = workers / recipe.workers
    return replace(recipe, workers=workers, lr=recipe.lr * factor, steps=max(1, round(recipe.steps / factor)))


def schedule(recipe: Recipe, progress: float) -> float:
    """Returns the learning rate at a point of the run; `progress` is the completed share of steps, or of time.

    cosine: lr·(f + (1 − f)·(1 + cos πp)/2), p counted from the end of the warm-up (Loshchilov & Hutter, 2017);
    linear: lr·(f + (1 − f)·(1 − p)); polynomial: lr·(f + (1 − f)·√(1 − p)) (TernGrad, section 4); exponential: lr·f^p.
    """
    progress = min(1.0, max(0.0, progress))
    if progress < recipe.warmup:
        return recipe.lr * (recipe.final + (1 - recipe.final) * progress / recipe.warmup)
    share = (progress - recipe.warmup) / (1 - recipe.warmup)
    if recipe.schedule in ("step", "constant"):
        return recipe.lr * recipe.final if recipe.schedule == "step" and progress >= STEP_AT else recipe.lr
    if recipe.schedule == "exponential":
        return recipe.lr * math.pow(recipe.final, share)
    left = {"cosine": (1 + math.cos(math.pi * share)) / 2, "linear": 1 - share, "polynomial": math.sqrt(1 - share)}
    return recipe.lr * (recipe.final + (1 - recipe.final) * left[recipe.schedule])


def param_groups(model: nn.Module, recipe: Recipe) -> list[dict[str, object]]:
    """Returns two groups of trainable parameters: matrices with the recipe's weight decay, vectors without.

    Groups keep the model's order; there is no empty group.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if parameter.ndim > 1]
    vectors = [parameter for parameter in trainable if parameter.ndim <= 1]
    groups: list[dict[str, object]] = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    groups = param_groups(model, recipe)
    lr = schedule(recipe, 0.0)
    if recipe.optimizer in ("Adam", "AdamW"):
        kind = torch.optim.Adam if recipe.optimizer == "Adam" else torch.optim.AdamW
        return kind(groups, lr=lr, betas=recipe.betas)
    return torch.optim.SGD(groups, lr=lr, momentum=recipe.momentum)


def clip_gradients(model: nn.Module, recipe: Recipe) -> None:
    """Scales all gradients down together if their norm exceeds the recipe's `clip`."""
    if recipe.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)

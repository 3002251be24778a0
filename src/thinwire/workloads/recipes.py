"""How to train each model on each data set: rate, batch, steps, schedule, and where the numbers come from.

Strategy: a short table of pairs that were measured or that a paper prescribes; any other pair takes the
recipe of the same model and says so in `source`. A design changes the recipe in three known cases. A high
sparsity multiplier makes updates arrive tens of steps late, which lowers the rate at which training is
stable. The designs that quantise gradients with error feedback in the manner of DoubleSqueeze use plain
SGD, tenfold lower after two thirds of the run. DeMo's residual is its momentum: it takes SGD without one.

The measured rates belong to many small steps (batches of 8 or 16 per worker): with few large steps the lag of
compressed updates dominates every comparison. Recipes refuse to know what a design is; they read its name.
"""

from __future__ import annotations

import math
import re
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal, get_args

import torch
from torch import nn

from thinwire.errors import ConfigError
from thinwire.workloads.models import TEXT_MODELS, models

Schedule = Literal["cosine", "linear", "polynomial", "exponential", "step", "constant"]
Loss = Literal["cross-entropy", "squared-error"]
Optimizer = Literal["SGD", "Adam", "AdamW"]

STEP_AT = 2 / 3
# Above this sparsity multiplier the residual holds 24 to 98 steps of updates, against 31 at most below it.
LAGGING_ABOVE = 1.75

_MEASURED = "measured"
_WIDER = "derived from byte-transformer-1m on python-text"
_IMAGES = ("digits", "fashion-mnist", "mnist", "cifar10")
_TEXTS = ("python-text",)


@dataclass(frozen=True)
class Recipe:
    """Everything that training needs besides the model and the data themselves.

    Attributes:
        model: name of the model.
        data: name of the data set.
        lr: the largest learning rate.
        final: the last learning rate as a share of `lr`; for "step" the share after two thirds of the run.
        schedule: "cosine" (without restarts), "linear", "polynomial", "exponential", "step" or "constant".
        warmup: share of the run in which the rate rises linearly to `lr`.
        optimizer: "SGD", "Adam" or "AdamW".
        momentum: SGD's momentum.
        betas: of Adam and AdamW.
        weight_decay: decay of matrices and filters; vectors (biases, norms) are never decayed.
        dropout: share of the units behind hidden fully connected layers that training sets to 0 (`dropout.py`).
        loss: what is minimised, "cross-entropy" or "squared-error" (`losses.squared_error`).
        l1: weight of the sum of the matrices' magnitudes, which is added to the loss.
        batch: examples per worker and step.
        workers: number of workers the rate belongs to.
        scales: with other numbers of workers the rate is proportional to them, and there are as many epochs; see
            `for_workers`.
        steps: number of steps.
        augment: random crop and flip.
        clip: largest norm of all gradients together; None clips nothing. Gradients that leave during the backward pass
            are not clipped.
        context: of text, bytes of an example; None takes the data set's.
        source: where the numbers come from: measured, a paper, or derived from which pair.

    Raises:
        ConfigError: a value out of range.
    """

    model: str
    data: str
    _: KW_ONLY
    lr: float
    batch: int
    workers: int
    steps: int
    final: float = 0.01
    schedule: Schedule = "cosine"
    warmup: float = 0.0
    optimizer: Optimizer = "SGD"
    momentum: float = 0.9
    weight_decay: float = 1e-4
    dropout: float = 0.0
    augment: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float | None = None
    context: int | None = None
    scales: bool = False
    loss: Loss = "cross-entropy"
    l1: float = 0.0
    source: str = _MEASURED

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ConfigError(f"the learning rate is {self.lr}; expected a positive number")
        for name in ("batch", "workers", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected 1 or more")
        if not 0 <= self.final <= 1:
            raise ConfigError(f"final is {self.final}; expected a share from 0 to 1")
        shares = ("warmup", "momentum", "dropout")
        for name, below in (*((each, 1.0) for each in shares), ("weight_decay", math.inf), ("l1", math.inf)):
            if not 0 <= getattr(self, name) < below:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected 0 or more and below {below:g}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas are {self.betas}; expected numbers from 0 to below 1")
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"clip is {self.clip}; expected a positive norm, or None")
        choices = {"schedule": Schedule, "optimizer": Optimizer, "loss": Loss}
        for name, allowed in ((name, get_args(kind)) for name, kind in choices.items()):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"unknown {name} {getattr(self, name)!r}; allowed are {', '.join(allowed)}")


# What transformers are trained with, at the size of a test: 30 steps of warm-up, 1,536 bytes a step.
_TRANSFORMER = Recipe(
    model="byte-transformer-1m",
    data="python-text",
    lr=0.004,
    final=0.1,
    schedule="linear",
    warmup=0.03,
    optimizer="AdamW",
    betas=(0.9, 0.95),
    weight_decay=0.1,
    clip=1.0,
    batch=4,
    workers=4,
    steps=1000,
    context=96,
)

# The first recipe of a model is the one that its other data sets derive theirs from.
_RECIPES = (
    Recipe("mlp", "digits", lr=0.02, batch=8, workers=4, steps=3000),
    # Øland & Raj name the loss, the penalty and the decay (section 2), and no numbers. At this
    # penalty c = 5 takes the paper's raw bits, 6.8. 2,000 steps are 100 epochs of 2,000 images among five workers.
    Recipe(
        "mlp-tanh",
        "mnist",
        lr=0.2,
        final=0.1,
        schedule="exponential",
        momentum=0.0,
        weight_decay=0.0,
        loss="squared-error",
        l1=3e-4,
        batch=20,
        workers=5,
        steps=2000,
        source="Øland & Raj, section 2; rates measured",
    ),
    Recipe("lenet5", "fashion-mnist", lr=0.02, batch=16, workers=4, steps=8000),
    Recipe("resnet8", "fashion-mnist", lr=0.05, batch=16, workers=4, steps=4000),
    replace(
        Recipe("byte-transformer", "python-text", lr=0.003, batch=8, workers=4, steps=1500, optimizer="Adam"),
        final=0.1,
        warmup=1 / 15,
    ),
    _TRANSFORMER,
    # Rates by the inverse of the width.
    replace(_TRANSFORMER, model="byte-transformer-3m", lr=0.0025, source=_WIDER),
    replace(_TRANSFORMER, model="byte-transformer-10m", lr=0.002, source=_WIDER),
    replace(_TRANSFORMER, model="gpt2-tiny", source=_WIDER),
    # 25,600 steps of 10 × 32 are the 163.84 epochs of 3LC, section 4.3. Its rates are 0.1 … 0.001, proportional to the
    # number of workers, and it follows Goyal et al. (2017), who warm up for five epochs.
    Recipe(
        "resnet110",
        "cifar10",
        lr=1.0,
        warmup=5 / 163.84,
        batch=32,
        workers=10,
        steps=25600,
        augment=True,
        scales=True,
        source="3LC, section 4.3",
    ),
)
# Models without numbers of their own, and whose they use.
_LIKE = {"lenet": "lenet5", "mlp-5m": "lenet5", "resnet20": "resnet110"}
_LIKE |= {"mlp-vector": "mlp", "lenet5-vector": "lenet5"}

# Rates for a sparsity multiplier above 1.75, where they differ: at the usual rate LeNet-5 ends at chance.
_LAGGING_LR = {"lenet5": 0.01, "lenet": 0.01, "mlp-5m": 0.01, "byte-transformer": 0.0015}

# Designs that train with plain SGD and one step of the rate, and their rate where it was measured (else 0.1).
_PLAIN = ("doublesqueeze-1bit", "doublesqueeze-topk", "mem-sgd-1bit", "mem-sgd-topk", "topk-sgd", "qsgd-ds", "mps")
_PLAIN_LR = 0.1


def recipe(model: str, data: str, *, design: str | None = None) -> Recipe:
    """The recipe for a model on a data set.

    Args:
        model: name of the model.
        data: name of the data set.
        design: name of the design that will train it, options in brackets, as in "3lc[s=1.9]"; it changes the
            recipe only where the design needs another one. Designs that are to be compared at equal settings
            take the recipe of one of them.

    Raises:
        ConfigError: an unknown model or data set, or a pair that does not fit (text for an image model).

    >>> recipe("lenet5", "fashion-mnist").lr, recipe("lenet5", "fashion-mnist", design="3lc[s=1.9]").lr
    (0.02, 0.01)
    >>> recipe("lenet", "mnist").source
    'derived from lenet5 on fashion-mnist'
    """
    found = _for_pair(model, data)
    family, sparsity = _read_design(design)
    if family in _PLAIN:
        return _plain(found, family)
    if family == "demo":  # steps by signs: its rate is of AdamW's size
        return replace(found, optimizer="SGD", momentum=0.0, weight_decay=0.0)
    if sparsity > LAGGING_ABOVE:
        return replace(found, lr=min(found.lr, _LAGGING_LR.get(model, found.lr)))
    return found


def for_workers(recipe: Recipe, workers: int) -> Recipe:
    """Returns the recipe for another number of workers; only one that `scales` changes its rate and steps.

    >>> for_workers(recipe("resnet110", "cifar10"), 4).lr, for_workers(recipe("resnet110", "cifar10"), 4).steps
    (0.4, 64000)
    >>> for_workers(recipe("mlp", "digits"), 8).lr
    0.02
    """
    if not recipe.scales:
        return replace(recipe, workers=workers)
    factor = workers / recipe.workers
    return replace(recipe, workers=workers, lr=recipe.lr * factor, steps=max(1, round(recipe.steps / factor)))


def schedule(recipe: Recipe, progress: float) -> float:
    """The learning rate at a point of the run; progress is the share of steps, or of time, that is over.

    cosine: lr·(f + (1 − f)·(1 + cos πp)/2), p counted from the end of the warm-up (Loshchilov & Hutter,
    2017); linear: lr·(f + (1 − f)·(1 − p)); polynomial: lr·(f + (1 − f)·√(1 − p)) (TernGrad, section 4);
    exponential: lr·f^p.

    Args:
        recipe: the recipe.
        progress: 0 at the start, 1 at the end; values outside are clipped.

    >>> r = recipe("mlp", "digits")
    >>> schedule(r, 0.0), round(schedule(r, 0.5), 5), round(schedule(r, 1.0), 5)
    (0.02, 0.0101, 0.0002)
    """
    progress = min(1.0, max(0.0, progress))
    if progress < recipe.warmup:
        return recipe.lr * (recipe.final + (1 - recipe.final) * progress / recipe.warmup)
    share = (progress - recipe.warmup) / (1 - recipe.warmup)
    if recipe.schedule == "cosine":
        return recipe.lr * (recipe.final + (1 - recipe.final) * (1 + math.cos(math.pi * share)) / 2)
    if recipe.schedule == "linear":
        return recipe.lr * (recipe.final + (1 - recipe.final) * (1 - share))
    if recipe.schedule == "exponential":
        return recipe.lr * math.pow(recipe.final, share)
    if recipe.schedule == "polynomial":
        return recipe.lr * (recipe.final + (1 - recipe.final) * math.sqrt(1 - share))
    if recipe.schedule == "step" and progress >= STEP_AT:
        return recipe.lr * recipe.final
    return recipe.lr


def param_groups(model: nn.Module, recipe: Recipe) -> list[dict[str, object]]:
    """Two groups of trainable parameters: matrices with the recipe's weight decay, vectors without.

    Groups keep the model's order; an empty group is left out.
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
    """The recipe's optimizer over the model's parameters, at the rate the run starts with."""
    groups = param_groups(model, recipe)
    lr = schedule(recipe, 0.0)
    if recipe.optimizer in ("Adam", "AdamW"):
        kind = torch.optim.Adam if recipe.optimizer == "Adam" else torch.optim.AdamW
        return kind(groups, lr=lr, betas=recipe.betas)
    return torch.optim.SGD(groups, lr=lr, momentum=recipe.momentum)


def clip_gradients(model: nn.Module, recipe: Recipe) -> None:
    """Scales all gradients down together where their norm exceeds the recipe's `clip`."""
    if recipe.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)


def _for_pair(model: str, data: str) -> Recipe:
    if model not in models():
        raise ConfigError(f"unknown model {model!r}; the models are {', '.join(models())}")
    data = data.partition("[")[0]  # a part of a data set has the recipe of the whole
    if data not in (*_IMAGES, *_TEXTS):
        raise ConfigError(f"unknown data set {data!r}; the data sets are {', '.join((*_IMAGES, *_TEXTS))}")
    fitting = _TEXTS if model in TEXT_MODELS else _IMAGES
    if data not in fitting:
        raise ConfigError(f"{model} does not train on {data}; it trains on {', '.join(fitting)}")
    for known in _RECIPES:
        if (known.model, known.data) == (model, data):
            return known
    base = next(known for known in _RECIPES if known.model == _LIKE.get(model, model))
    if base.scales and data != base.data:
        base = replace(base, lr=base.lr / base.workers, warmup=0.0, scales=False)
    source = f"derived from {base.model} on {base.data}"
    derived = replace(base, model=model, data=data, source=source, augment=data == "cifar10")
    if data == "digits":
        # 1,347 examples: batches of 8 keep the number of steps high; 3,000 of them are enough (71 epochs).
        return replace(derived, batch=8, workers=4, steps=min(3000, base.steps))
    return derived


def _plain(base: Recipe, family: str) -> Recipe:
    """Plain SGD, as DoubleSqueeze (section 5) has it: no momentum, no decay, a tenth after two thirds."""
    plain = replace(
        base,
        lr=_PLAIN_LR,
        final=0.1,
        schedule="step",
        warmup=0.0,
        scales=False,
        optimizer="SGD",
        momentum=0.0,
        weight_decay=0.0,
        clip=None,
        steps=max(1, base.steps // 2),
        source=f"derived from {base.model} on {base.data}",
    )
    if (base.model, base.data) == ("mlp", "digits"):
        return replace(plain, lr=0.1 if family == "mps" else 0.2, source=_MEASURED)
    if (base.model, base.data) == ("lenet5", "fashion-mnist") and family != "mps":
        return replace(plain, workers=8, steps=2500, source=_MEASURED)
    return plain


def _read_design(design: str | None) -> tuple[str, float]:
    """The name of a design and its sparsity multiplier (1 if it names none)."""
    if design is None:
        return "", 1.0
    family, _, options = design.partition("[")
    found = re.search(r"\b(?:s|sparsity)\s*=\s*([0-9.]+)", options)
    try:
        return family.strip(), float(found.group(1)) if found else 1.0
    except ValueError as error:
        raise ConfigError(f"the sparsity in design {design!r} is not a number") from error

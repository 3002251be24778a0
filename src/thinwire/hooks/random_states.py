"""States of torch's random generators, which a repeated training must begin with, above all for dropout."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

HOST = "cpu"


def random_states(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the states of the generators of the host and of the GPUs with a model's parameters.

    Example:
        >>> list(random_states(nn.Linear(2, 2)))
        ['cpu']
    """
    gpus = sorted({str(parameter.device) for parameter in model.parameters() if parameter.is_cuda})
    return {HOST: torch.get_rng_state(), **{gpu: torch.cuda.get_rng_state(gpu) for gpu in gpus}}


def set_random_states(states: Mapping[str, torch.Tensor]) -> None:
    """Restores the result of `random_states`; ignores GPUs that are absent."""
    for device, state in states.items():
        if device == HOST:
            torch.set_rng_state(state)
        elif torch.device(device).index < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, device)

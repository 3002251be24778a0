"""The device that a worker's model and optimizer are on, by its name."""

from __future__ import annotations

import re

import torch

from thinwire.errors import ConfigError

_NAME = re.compile(r"cpu|cuda(?::(?P<index>\d+))?")


def device(name: str) -> torch.device:
    """Returns a device that is there."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ConfigError(f"device {name!r}; allowed are cpu, cuda, and one of several as in cuda:1")
    if name != "cpu":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(match["index"] or 0) >= count:
            raise ConfigError(f"device {name!r}: torch {torch.__version__} sees {count} CUDA devices here; use cpu")
    return torch.device(name)


def wait_for(device: torch.device) -> None:
    """Returns when a device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

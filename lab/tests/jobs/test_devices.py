"""Devices by name: those that are there, and the sentence about those that are not."""

import pytest
import torch

from thinwire.errors import ConfigError
from thinwire_lab.jobs.devices import device


def test_a_device_is_there_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [device(name) for name in ("cpu", "cuda", "cuda:1")] == [
        torch.device("cpu"),
        torch.device("cuda"),
        torch.device("cuda", 1),
    ]
    for name, text in {
        "cuda:2": "sees 2 CUDA devices here",
        "cuda:-1": "allowed are",
        "gpu": "allowed are cpu",
    }.items():
        with pytest.raises(ConfigError, match=text):
            device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device 'cuda': torch .* sees 0 CUDA devices here; use cpu"):
        device("cuda")

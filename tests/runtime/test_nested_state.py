"""Whatever a state holds comes back from JSON and tensors, and shares no memory with it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from thinwire.runtime.nested_state import Tensors, put_together, take_apart

STATE: dict[str, Any] = {
    "numbers": [1, 0.1, float("inf"), True, None, 2**60],
    "by position": {0: {"step": torch.tensor(3.0)}, 1: {}},
    "pair": (0.9, (1, "two")),
    "frames": [b"", b"\x00abc"],
    "half": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
    "nothing": torch.zeros(0, 4),
    "$tensor": "a name like ours",
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_values_that_json_cannot_hold_come_back_from_it() -> None:
    tensors: Tensors = {}
    text = json.dumps(take_apart(STATE, tensors))
    assert same(put_together(json.loads(text), tensors), STATE)


def test_tensors_and_arrays_are_copied() -> None:
    for values in (torch.ones(3), np.ones(3, np.float32)):
        tensors: Tensors = {}
        plain = take_apart([values], tensors)
        values[:] = 2
        assert put_together(plain, tensors)[0].tolist() == [1, 1, 1]

"""Takes a nested state apart into JSON and named tensors, and puts it together again."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from thinwire.errors import ConfigError

Tensors = dict[str, torch.Tensor]
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes that a state may contain, with their safetensors names."""


def take_apart(value: Any, tensors: Tensors) -> Any:
    """Returns JSON for a value; adds copies of its tensors and bytes to `tensors`, under names that the JSON contains.

    Args:
        value: dicts, lists, tuples, numbers, strings, bytes, None, arrays and tensors, nested in any way.
        tensors: receives the copies.

    Raises:
        ConfigError: a value of another type, or a tensor of a dtype that `DTYPES` lacks.

    Example:
        >>> tensors: Tensors = {}
        >>> take_apart({"counts": {1: (2, 3)}, "values": torch.ones(2)}, tensors), tensors
        ({'counts': {'$map': [[1, {'$tuple': [2, 3]}]]}, 'values': {'$tensor': '0'}}, {'0': tensor([1., 1.])})
    """
    match value:
        case torch.Tensor():
            return {"$tensor": _keep(value, tensors)}
        case np.ndarray():
            return {"$tensor": _keep(torch.from_numpy(value), tensors)}
        case bytes():
            return {"$bytes": _keep(torch.frombuffer(bytearray(value), dtype=torch.uint8), tensors) if value else ""}
        case tuple():
            return {"$tuple": [take_apart(each, tensors) for each in value]}
        case list():
            return [take_apart(each, tensors) for each in value]
        case dict():
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return {key: take_apart(each, tensors) for key, each in value.items()}
            return {"$map": [[take_apart(key, tensors), take_apart(each, tensors)] for key, each in value.items()]}
        case None | bool() | int() | float() | str():
            return value
        case _:
            raise ConfigError(f"a {type(value).__name__} cannot be in a checkpoint")


def _keep(tensor: torch.Tensor, tensors: Tensors) -> str:
    if tensor.dtype not in DTYPES:
        raise ConfigError(f"a tensor of {tensor.dtype} cannot be in a checkpoint")
    name = str(len(tensors))
    tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
    return name


def put_together(value: Any, tensors: Tensors) -> Any:
    """Returns the value that `take_apart` was given, with the tensors of `tensors` and not copies."""
    if isinstance(value, list):
        return [put_together(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$tensor": name}:
            return tensors[name]
        case {"$bytes": name}:
            return tensors[name].numpy().tobytes() if name else b""
        case {"$tuple": each}:
            return tuple(put_together(each, tensors))
        case {"$map": pairs}:
            return {put_together(key, tensors): put_together(each, tensors) for key, each in pairs}
        case _:
            return {key: put_together(each, tensors) for key, each in value.items()}

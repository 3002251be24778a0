"""Every launch through the whole compiler, down to machine code of two generations of GPUs; that needs no GPU.

The interpreter accepts more than the compiler, so only this test shows that a launch is valid. The host code runs on
CPU tensors with a driver that only names the GPU to compile for, and every launch ends with its machine code. The tests
search the assembly for instructions that would change bits: fused multiplication and addition, approximate division,
flushed subnormals.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from thinwire.kernels.numba import Workspace, encode_ternary
from thinwire.kernels.triton import batch, dense, moments, ternary, ternary_decode
from thinwire.kernels.triton.workspace import DeviceWorkspace

SIZES = (7, 3000)
CPU = torch.device("cpu")
MODULES = (batch, dense, moments, ternary, ternary_decode)


class Driver:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return int(self._target.arch)  # a number that no device has, for what is compiled is kept by device

    def get_current_stream(self, device: int) -> int:
        return device


@pytest.fixture(params=[pytest.param(80, marks=pytest.mark.long), 90])
def compiled(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Launches compile and are noted here, by the name of the kernel; nothing runs."""
    if not all(isinstance(kernel, JITFunction) for kernel in (ternary._quantise, batch._largest)):
        pytest.fail("TRITON_INTERPRET is set: this test needs the compiler")
    noted: list[tuple[str, Any]] = []
    launch: Callable[..., Any] = JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, warmup: bool, **options: Any) -> None:
        noted.append((kernel.__name__, launch(kernel, *arguments, warmup=True, **options)))

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(driver, "_active", Driver(request.param))
    return noted


class Zeros(DeviceWorkspace):
    """Where nothing runs, what kernels would have written is zero."""

    def array(self, name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        return super().array(name, size, dtype).zero_()


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=dtype) for size in SIZES]


def launch_all(dtype: torch.dtype) -> None:
    """Every kernel; in float32 every form that differs in more than a constant, in float64 the longest of each."""
    space = Zeros(CPU)
    values, residuals, out = tensors(dtype), tensors(dtype), tensors(dtype)[1]
    every = dtype == torch.float32
    forms, ways = ((None, residuals), (False, True)) if every else ((residuals,), (True,))
    for kept in forms:
        ternary.encode_ternary(values, sparsity=1.0, residuals=kept, workspace=space)
    scale, payload = encode_ternary(out.numpy(), sparsity=1.0, workspace=Workspace())
    for accumulate in ways:
        into: dict[str, Any] = {"outs": [out], "accumulate": accumulate, "workspace": space}
        ternary_decode.decode_ternary([payload], scales=[scale], **into)
    for kept in forms:
        dense.encode_bfloat(values, most=1.0, residuals=kept, workspace=space)
        dense.encode_int8(values, largest_scale=1.0, residuals=kept, workspace=space)
        for norm in ("l1", "l2"):
            dense.encode_signs(values, norm=norm, residuals=kept, workspace=space)
    for accumulate in ways:
        for kind, per_byte, nbytes in ((np.int16, 1, 6000), (np.int8, 1, 3000), (np.uint8, 8, 375)):
            form: dict[str, Any] = {"kind": kind, "per_byte": per_byte, "accumulate": accumulate}
            dense.decode_dense([bytes(nbytes)], scales=[1.0], outs=[out], workspace=space, **form)


@pytest.mark.timeout(900)  # half a minute where nothing else runs
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.long)], ids=str)
def test_every_launch_compiles_and_keeps_every_bit(compiled: list[tuple[str, Any]], dtype: torch.dtype) -> None:
    launch_all(dtype)
    for name, kernel in compiled:
        changes = re.findall(r"\b(?:fma|div\.full|div\.approx|sqrt\.approx)\.\S+|\.ftz\b", kernel.asm["ptx"])
        assert not changes, (name, changes)
        assert kernel.asm["cubin"]
    # Kernels are private and return nothing; what kernels call returns something, or is public.
    kernels = {
        name
        for module in MODULES
        for name, value in vars(module).items()
        if name.startswith("_") and isinstance(value, JITFunction) and value.fn.__annotations__["return"] == "None"
    }
    assert {name for name, _ in compiled} == kernels


def test_the_number_of_tensors_and_values_makes_no_new_machine_code(compiled: list[tuple[str, Any]]) -> None:
    for count in (2, 17, 40):
        space = DeviceWorkspace(CPU)
        random = np.random.default_rng(count)
        values = [torch.zeros(int(size)) for size in random.integers(2, 2000, count)]
        ternary.encode_ternary(values, sparsity=1.0, workspace=space)
    codes = {(name, bytes(kernel.asm["cubin"])) for name, kernel in compiled}
    assert len(codes) == len({name for name, _ in compiled})

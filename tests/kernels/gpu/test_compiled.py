"""Every kernel through the whole compiler, down to machine code of two generations of GPUs; that needs no GPU.

The interpreter is more forgiving than the compiler, so this is what shows that a kernel is valid at all. The assembly
is searched for what would change bits: multiplication and addition made one, approximate division, flushed subnormals.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from thinwire.kernels.gpu import batch, levels, signs, ternary, zero_run

MODULES: tuple[ModuleType, ...] = (batch, levels, signs, ternary, zero_run)
FLOATS = {"fp32": tl.float32, "fp64": tl.float64}
# The arguments of all kernels, by name; F is the float type, I the integer type of its width.
ARGUMENTS = {
    **dict.fromkeys(("scales", "residual_scale", "scale", "out", "low", "high"), "*F"),
    **dict.fromkeys(("codes", "bits", "payload", "received"), "*u8"),
    **dict.fromkeys(("allowed", "levels"), "*i8"),
    **dict.fromkeys(("last_nonzero", "running", "counts", "ends", "table"), "*i64"),
    **dict.fromkeys(("lift", "sums"), "*fp64"),
    **dict.fromkeys(("size", "num_codes", "stride"), "i32"),
    "largest": "*I",
}
TILES = {1: (1, 4096), 5: (8, 512), 8: (8, 512)}


def encoder(per_byte: int, float_name: str, **more: Any) -> dict[str, Any]:
    width, block = TILES[per_byte]
    return {"DTYPE": FLOATS[float_name], "PER_BYTE": per_byte, "WIDTH": width, "BLOCK": block, **more}


def variants() -> Iterator[tuple[ModuleType, str, str, dict[str, Any]]]:
    """Each kernel in the forms in which it is launched."""
    for name, floats in FLOATS.items():
        wide = name == "fp64"
        integer = {"INTEGER": tl.int64 if wide else tl.int32, "MAGNITUDE": 2**63 - 1 if wide else 2**31 - 1}
        for residual, partition in ((False, False), (True, False), (True, True)):
            form = {"RESIDUAL": residual, "PARTITION": partition}
            yield batch, "_largest", name, encoder(5, name, **form, **integer)
            yield ternary, "_quantise", name, encoder(5, name, **form, PAD=1)
        for residual in (False, True):
            yield levels, "_round", name, encoder(1, name, RESIDUAL=residual, ROUNDS=1.5 * 2.0 ** (52 if wide else 23))
            yield signs, "_pack", name, encoder(8, name, RESIDUAL=residual)
            yield signs, "_sum", name, {"DTYPE": floats, "RESIDUAL": residual, "L1": residual, "GROUP": 32}
        for accumulate in (False, True):
            yield levels, "_scale", name, {"ACCUMULATE": accumulate, "BLOCK": 4096}
            yield signs, "_unpack", name, {"ACCUMULATE": accumulate, "BLOCK": 4096}
            for partition in (False, True):
                form = {"ACCUMULATE": accumulate, "PARTITION": partition}
                yield ternary, "_dequantise", name, {**form, "BLOCK": 1024}
    for kernel in ("_count", "_write"):
        yield zero_run, kernel, "fp32", {"BLOCK": 512}
    for kernel in ("_expand", "_place"):
        yield zero_run, kernel, "fp32", {"BLOCK": 1024}


def test_every_kernel_is_compiled_here() -> None:
    launched = set()
    for module in MODULES:
        for name, value in vars(module).items():
            # Kernels are private and return nothing; what kernels call returns something, or is public.
            if name.startswith("_") and hasattr(value, "arg_names") and value.__module__ == module.__name__:
                returns_nothing = value.fn.__annotations__["return"] == "None"
                launched |= {(module, name)} if returns_nothing else set()
    assert launched == {(module, name) for module, name, _, _ in variants()}


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_and_keep_every_bit(capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for module, name, float_name, constants in variants():
        kernel = getattr(module, name)
        types = {"F": float_name, "I": "i64" if float_name == "fp64" else "i32"}
        signature = {
            argument: "constexpr"
            if argument in constants
            else re.sub("[FI]", lambda match: types[match[0]], ARGUMENTS[argument])  # noqa: B023 - used at once
            for argument in kernel.arg_names
        }
        places = {(kernel.arg_names.index(argument),): value for argument, value in constants.items()}
        compiled = triton.compile(
            ASTSource(kernel, signature, places),
            target=GPUTarget("cuda", capability, 32),
            options={"enable_fp_fusion": False},
        )
        changes = re.findall(r"\b(?:fma|div\.full|div\.approx|sqrt\.approx)\.\S+|\.ftz\b", compiled.asm["ptx"])
        assert not changes, (name, float_name, constants, changes)
        assert compiled.asm["cubin"]

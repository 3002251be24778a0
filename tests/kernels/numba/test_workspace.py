"""A workspace grows, is used again, and serves encoder and decoder at once."""

from __future__ import annotations

import numpy as np

from thinwire.kernels.numba import Workspace, decode_ternary, encode_ternary


def test_a_workspace_grows_once_and_is_used_again() -> None:
    workspace = Workspace()
    values = np.ones(50_000, dtype=np.float32)
    encode_ternary(values, sparsity=1.0, workspace=workspace)
    buffer, held = workspace.payload.bytes, workspace.nbytes
    for size in (50_000, 10, 49_999):
        _, payload = encode_ternary(values[:size], sparsity=1.0, workspace=workspace)
        assert np.shares_memory(payload, buffer)
    assert workspace.nbytes == held


def test_a_payload_decodes_in_the_workspace_that_made_it() -> None:
    values = np.where(np.arange(3000) % 3, 0.0, 1.0).astype(np.float32)
    workspace, out = Workspace(), np.empty(3000, dtype=np.float32)
    scale, payload = encode_ternary(values, sparsity=1.0, workspace=workspace)
    decode_ternary(payload, scale=scale, out=out, workspace=workspace)
    assert np.array_equal(out, values)

"""Workers whose models have other dtypes are told so before anything is trained."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.hooks.cluster import run_cluster
from tests.hooks.local_runs import adamw, mlp, sgd, steps
from thinwire.errors import ProtocolError

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {"3lc": sgd, "local-sgd[h=2]": adamw}


@pytest.mark.parametrize("design", OPTIMIZERS)
def test_models_of_two_dtypes_are_refused_by_name(design: str) -> None:
    def mixed(rank: int) -> nn.Module:
        return mlp(rank) if rank == 0 else mlp(rank).bfloat16()

    with pytest.raises(ProtocolError, match=r"'0.weight' is (bfloat16|float32) in this worker's model and .* the same"):
        # The other one waits in vain.
        run_cluster(mixed, steps(1), workers=2, optimizer=OPTIMIZERS[design], design=design, timeout_s=0.5)


def test_statistics_of_another_dtype_are_refused_too() -> None:
    def mixed(rank: int) -> nn.Module:
        model = mlp(rank)
        if rank == 1:
            for name, buffer in model.named_buffers():
                if name.endswith("running_var"):
                    model.get_submodule("1").register_buffer("running_var", buffer.double())
        return model

    with pytest.raises(ProtocolError, match=r"'1.running_var' is float(64|32) in this worker's model and float"):
        run_cluster(mixed, steps(1), workers=2, optimizer=adamw, design="update", timeout_s=0.5)

"""A user's own script, profiled as it is: found model, steps of its optimizer, and what it may do meanwhile."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from thinwire.cli.plan import STARTUP
from thinwire.errors import ConfigError
from thinwire.planner.observing import Observer, refusal
from thinwire.planner.profile import profile
from thinwire.planner.script import profile_script

PLAIN = """
import torch
from torch import nn

body = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
model = nn.Sequential(body, nn.Linear(32, 4))
teacher = nn.Linear(8, 4)
torch.optim.SGD(teacher.parameters(), lr=0.1).step()  # trains nothing that is called
optimizer = torch.optim.AdamW(model.parameters())
steps = 0
try:
    while steps < {steps}:
        x = torch.randn(16, 8)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), teacher(x).detach()).backward()
        optimizer.step()
        steps += 1
finally:
    open({out!r}, "w").write(str(steps))
"""

WRAPPED = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from thinwire.hooks import ddp

dist.init_process_group("gloo", init_method="file://{out}", rank=0, world_size=1)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 4)))
model.register_comm_hook(state=None, hook=lambda state, bucket: None)
ddp.compress(model, codec="3lc", measure_link=False)
model = torch.compile(model, backend="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
"""


def script(folder: Path, text: str, steps: int = 1000) -> tuple[list[str], Path]:
    path, out = folder / "train.py", folder / "out"
    path.write_text(text.format(steps=steps, out=str(out)))
    return [sys.executable, str(path)], out


def test_profile_of_a_script_ends_it_after_the_measured_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text(f"open({str(own / 'came')!r}, 'w').close()")
    monkeypatch.syspath_prepend(own)
    monkeypatch.setenv("PYTHONPATH", f"{own}:{Path('src').resolve()}")
    command, out = script(tmp_path, PLAIN)
    found = profile_script(command, os.environ, STARTUP, steps=4, threads=1)
    shapes = {"0.0.weight": (32, 8), "0.0.bias": (32,), "1.weight": (4, 32), "1.bias": (4,)}
    assert {each.name: each.shape for each in found.tensors} == shapes
    assert [each.name for each in found.tensors] == list(shapes), "in the order of the forward pass"
    assert found.step_s > 0 and sum(each.backward_s for each in found.tensors) > 0
    assert len(found.steps_s) == 4 and min(found.steps_s) <= found.step_s <= max(found.steps_s)
    assert len(found.gradients) == 4 and found.gradients[0]["1.weight"].shape == (4, 32)
    assert found.trainer.name == "AdamW" and found.trainer.options["1.bias"]["betas"] == (0.9, 0.999)
    assert out.read_text() == "6", "one step finds the model, two warm up; the last of four does not come back"
    assert (own / "came").exists(), "what the environment itself starts with is started all the same"


def test_profile_of_a_compiled_script_leaves_out_ddp_and_the_hook(tmp_path: Path) -> None:
    command, _ = script(tmp_path, WRAPPED)
    found = profile_script(command, os.environ, STARTUP, steps=3, threads=1)
    assert [each.name for each in found.tensors] == ["0.weight", "0.bias", "1.weight", "1.bias"]


DISTRIBUTED = """
import torch, torch.distributed as dist
from torch import nn
import thinwire as tw

dist.init_process_group("gloo", init_method="file://{out}", rank=0, world_size=1)
model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters())
began = model[0].weight.detach().clone()
with tw.distribute(model, optimizer, {options}) as optimizer:
    while True:
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        optimizer.record_scores(loss=1.0)
        with optimizer.shared_weights():
            assert not torch.equal(model[0].weight, began), "what is evaluated has been trained"
"""


def test_profile_of_a_script_leaves_out_distribute(tmp_path: Path) -> None:
    options = "server='grpc://127.0.0.1:1', rank=1, workers=2, codec='3lc', sparsity=1.5"  # there is no server
    path = tmp_path / "train.py"
    path.write_text(DISTRIBUTED.format(out=tmp_path / "out", options=options))
    found = profile_script([sys.executable, str(path)], os.environ, STARTUP, steps=6, threads=1)
    assert [each.name for each in found.tensors] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert found.trainer.name == "AdamW" and len(found.gradients) == 6
    assert not any("another optimizer" in each for each in found.remarks)


def test_profile_refuses_short_scripts_and_unknown_commands(tmp_path: Path) -> None:
    command, out = script(tmp_path, PLAIN, steps=3)
    with pytest.raises(ConfigError, match=r"ended with status 0 before a profile was there: it takes 7 steps"):
        profile_script(command, os.environ, STARTUP, steps=4, threads=1)
    assert out.read_text() == "3"
    with pytest.raises(ConfigError, match=r"'no-such-command' cannot be started: No such file"):
        profile_script(["no-such-command"], os.environ, STARTUP)


def test_profile_of_a_script_names_the_reason_of_a_refusal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command, _ = script(tmp_path, PLAIN.replace(".backward()", ""))
    with pytest.raises(
        ConfigError, match=r"train\.py' was run, but no step made a gradient: each must call loss\.back"
    ):
        profile_script(command, os.environ, STARTUP, steps=2, threads=1)
    assert "Traceback" not in capfd.readouterr().err


def test_profile_names_a_gradient_that_is_not_finite() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ConfigError, match="gradient of weight holds NaN or Inf"):
        profile(model, lambda: (model(torch.ones(4, 3)).sum() * torch.nan).backward(), steps=1)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: nn.LazyLinear(2), "'weight' of a lazy module has no shape yet"),
        (lambda: nn.Linear(3, 2, dtype=torch.complex64), "'weight' has dtype torch.complex64; only floating-point"),
        (lambda: _sharded(nn.Linear(3, 2)), "'bias' is sharded over ranks .* leave out fully_shard"),
    ],
)
def test_profile_refuses_parameters_without_exchangeable_values_before_a_step(
    make: Callable[[], nn.Module], why: str, tmp_path: Path
) -> None:
    model = make()
    with pytest.raises(ConfigError, match=why):
        profile(model, lambda: pytest.fail("a step was made"))
    observer = Observer(tmp_path / "profile.pt", 2)
    observer._call(model, None)
    with pytest.raises(SystemExit):
        observer._stepped(torch.optim.SGD(model.parameters(), lr=0.1))
    assert re.search(why, refusal(tmp_path / "profile.pt").read_text())


def _sharded(model: nn.Linear) -> nn.Linear:
    model.bias.device_mesh = "of two ranks"  # type: ignore[attr-defined]
    return model

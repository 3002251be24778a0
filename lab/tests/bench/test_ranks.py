"""Real training ranks: with a hook, sharded, and for memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from thinwire.errors import ConfigError
from thinwire_lab.bench.cells import HookCell
from thinwire_lab.bench.hook_runs import measure
from thinwire_lab.bench.memory import MemoryBench, MemoryRun
from thinwire_lab.engines.namespaces import available

# ---- with a hook


def test_hook_run_ends_at_its_target() -> None:
    link = "100mbit" if available()[0] else None
    told: list[str] = []
    cell = HookCell(
        hook="3lc[s=1.5]",
        model="mlp",
        data="digits",
        link=link,
        ranks=2,
        steps=4,
        eval_every=2,
        eval_examples=50,
        target=0.0,
    )
    run = measure(cell, tell=told.append)
    assert run.steps_done == 2 and [point.step for point in run.curve] == [2]
    assert run.seconds_to_target == run.curve[0].seconds > 0
    assert (run.ended, run.error) == ("target", None)
    assert run.cpu_seconds_per_step and run.cpu_seconds_alone and run.seconds_per_step and run.test_accuracy
    assert round(50 * run.test_accuracy, 6) % 1 == 0, "of 50 examples"
    assert "5 compressed steps" in run.report
    assert told[0].startswith("step 1 of 4, ")
    if link is not None:
        assert run.shaping == "kernel" and run.sent_bytes_per_step
        # Two ranks send each other's shares of some 17,000 values; uncompressed it would be 68 kB and more.
        assert 1_000 < run.sent_bytes_per_step < 30_000


def test_hook_run_with_local_updates() -> None:
    cell = HookCell(
        hook="local-sgd[h=2]",
        model="byte-transformer",
        data="python-text",
        ranks=2,
        steps=4,
        eval_every=3,
        eval_examples=8,
    )
    run = measure(cell, counted=True)
    assert (run.ended, run.error, run.steps_done) == ("steps", None, 4)
    assert [point.step for point in run.curve] == [3, 4] and run.test_loss == run.curve[-1].loss
    if run.shaping == "kernel":
        # Four steps of 120,064 values in float32 would be 960 kB a rank.
        assert run.sent_bytes_per_step and 1_000 < run.sent_bytes_per_step < 40_000


@pytest.mark.gpu
@pytest.mark.cuda
@pytest.mark.parametrize("hook", ["none", "3lc[s=1.5]", "local-sgd[h=4]"])
def test_ranks_share_a_gpu(hook: str) -> None:
    run = measure(HookCell(hook=hook, model="byte-transformer", data="python-text", ranks=2, steps=4, device="cuda"))
    assert (run.ended, run.steps_done, run.error) == ("steps", 4, None)
    assert run.seconds_per_step and run.test_loss


# ---- sharded


def test_two_sites_behind_thin_links() -> None:
    """A step's bytes are counted on the links of the sites, without the steps before and after."""
    link = "100mbit" if available()[0] else None
    cell = HookCell(hook="hsdp:3lc[s=1.0]", model="mlp", data="digits", ranks=4, steps=2, batch=8, link=link)
    assert (cell.hosts, replace(cell, hook="fsdp:none").hosts) == (2, 4)
    told: list[str] = []
    run = measure(cell, tell=told.append)
    assert (run.ended, run.error) == ("steps", None)
    assert [each.partition(",")[0] for each in told] == ["step 1 of 2", "step 2 of 2"]
    assert run.report and run.test_accuracy
    if link is not None:
        assert run.sent_bytes_per_step is not None and 500 < run.sent_bytes_per_step < 10_000, "not of all steps"


# ---- for their memory


def test_memory_table_has_bytes_beyond_plain_ddp() -> None:
    bench = MemoryBench(hooks=["none", "3lc[s=1.0]"])
    plain, coded = bench.cells()
    runs = {
        plain: MemoryRun(held=20.0, peak=20.5, fixed_nbytes=2.7e8),
        coded: MemoryRun(held=24.4, peak=25.0, fixed_nbytes=2.9e8),
    }
    [table] = bench.tables(runs)
    assert [line[-1] for line in table.lines] == ["+0.0", "+4.4"]
    assert bench.compared(coded, {coded: runs[coded]}) == {"beyond plain DDP": None}
    steps = MemoryBench(hooks=["alone", "fsdp:none", "update", "local-sgd[h=4]", "diloco[h=30]"])
    assert [cell.steps for cell in steps.cells()] == [6, 6, 6, 12, 90], "local updates exchange three times"


def test_memory_of_two_ranks_with_plain_ddp() -> None:
    bench = MemoryBench(hooks=["none"], ranks=2, layers=[2, 10])
    run = bench.measure(bench.cells()[0], {}, lambda text: None)
    assert 18 < run.held < 24, "four bytes each, of AdamW two; and DDP's bucket"
    assert run.peak > 16 and run.fixed_nbytes > 5e7


CANNOT_BE: list[tuple[type[Any], dict[str, Any], str]] = [
    (HookCell, {"hook": "zip"}, "'zip'"),
    (HookCell, {"hook": "fp16[start_step=9]"}, "torch's hooks"),
    (HookCell, {"hook": "powersgd-1[start_step=1]"}, "start_step=1"),
    (HookCell, {"hook": "3lc[strt_step=9]"}, "'strt_step'"),
    (HookCell, {"hook": "none", "warmup": 1}, "1 warm-up"),
    (HookCell, {"hook": "none", "target": 0.5}, "eval_every"),
    (HookCell, {"hook": "none", "model": "resnet8", "data": "python-text"}, "python-text"),
    (HookCell, {"hook": "none", "batch": 0}, "batch is 0"),
    (HookCell, {"hook": "none", "device": "cuda:99"}, "device 'cuda:99'"),
    (HookCell, {"hook": "ddp:3lc"}, "'ddp:3lc'"),
    (HookCell, {"hook": "fsdp:none[gather=int8]"}, "leave out gather"),
    (HookCell, {"hook": "hsdp:nosuch"}, "'nosuch'"),
    (HookCell, {"hook": "hsdp:none", "ranks": 3}, "3 ranks"),
    (MemoryBench, {"hooks": ["server:3lc"]}, "'server:3lc'"),
    (MemoryBench, {"hooks": ["hsdp:none"], "ranks": 3}, "3 ranks"),
    (MemoryBench, {"layers": [4, 4]}, "the larger one last"),
]


@pytest.mark.parametrize(("kind", "given", "said"), CANNOT_BE)
def test_impossible_cells_raise_config_error(kind: type[Any], given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        kind(**given)

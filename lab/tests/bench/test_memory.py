"""What a method takes of memory: what can be asked for, the table, and two small ranks that are measured for real."""

from __future__ import annotations

import pytest

from thinwire.errors import ConfigError
from thinwire_lab.bench import harness
from thinwire_lab.bench.memory import MemoryBench, MemoryRun
from thinwire_lab.bench.memory_cells import MemoryCell
from thinwire_lab.jobs.results import Results


def test_the_table_holds_bytes_beyond_plain_ddp_where_that_was_measured() -> None:
    bench = MemoryBench(hooks=["none", "3lc[s=1.0]"])
    plain, coded = bench.cells()
    runs = {
        plain: [MemoryRun(held=20.0, peak=20.5, fixed_nbytes=2.7e8)],
        coded: [MemoryRun(held=24.4, peak=25.0, fixed_nbytes=2.9e8)],
    }
    [table] = bench.tables(runs)
    assert table.lines == [
        ["none", "20.0", "20.5", "270 MB", "+0.0"],
        ["3lc[s=1.0]", "24.4", "25.0", "290 MB", "+4.4"],
    ]
    assert bench.compared(coded, {coded: runs[coded]}) == {"beyond plain DDP": None}
    assert bench.line(coded, runs[coded][0]) == "3lc[s=1.0]: 24.4 bytes a parameter, 25.0 at most"


def test_local_updates_exchange_three_times() -> None:
    bench = MemoryBench(hooks=["alone", "fsdp:none", "update", "local-sgd[h=4]", "diloco[h=30]"])
    assert [cell.steps for cell in bench.cells()] == [6, 6, 6, 12, 90]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hooks": ["nosuch"]}, "unknown hook 'nosuch'"),
        ({"hooks": ["server:3lc"]}, "'server:3lc' needs a server"),
        ({"hooks": ["demo-authors"]}, "'demo-authors' needs a server or other people's files"),
        ({"hooks": ["fsdp:nosuch"]}, "unknown codec 'nosuch'"),
        ({"hooks": ["fsdp:3lc[s=3]"]}, "sparsity"),
        ({"hooks": ["fsdp:"]}, "codec"),
        ({"hooks": ["fsdp:none[s=1]"]}, "stock FSDP2 has no options"),
        ({"hooks": ["hsdp:none"], "ranks": 3}, "hsdp:none: 3 ranks"),
        ({"layers": [4]}, r"models of \[4\] layers"),
        ({"layers": [4, 4]}, "the larger one last"),
        ({"ranks": 1}, "1 ranks"),
        ({"device": "gpu"}, "device 'gpu'"),
        ({"device": "cuda:99"}, "device 'cuda:99'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_started(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        MemoryBench(**options)  # type: ignore[arg-type]


def test_two_ranks_hold_parameters_gradients_moments_and_buckets() -> None:
    bench = MemoryBench(hooks=["none"], ranks=2, layers=[2, 10])
    measured: dict[MemoryCell, list[MemoryRun]] = {}
    harness.run(bench, Results(None, bench.kinds), measured)
    [[run]] = measured.values()
    assert 18 < run.held < 24, "four bytes each, of AdamW two; and DDP's bucket"
    assert run.peak > 16 and run.fixed_nbytes > 5e7


@pytest.mark.gpu
@pytest.mark.cuda
def test_on_a_gpu_tensors_are_told_from_what_the_process_holds() -> None:
    bench = MemoryBench(hooks=["none"], ranks=2, layers=[2, 10], device="cuda")
    measured: dict[MemoryCell, list[MemoryRun]] = {}
    harness.run(bench, Results(None, bench.kinds), measured)
    [[run]] = measured.values()
    assert 19.5 < run.held < 24.5 and run.held <= run.peak and run.host is not None, run
    assert bench.tables(measured)[0].header[-2] == "on the host"


@pytest.mark.gpu
@pytest.mark.cuda
def test_what_shards_is_left_out_on_a_gpu() -> None:
    assert all("sdp:" not in cell.method for cell in MemoryBench(device="cuda").cells())
    with pytest.raises(ConfigError, match="NCCL"):
        MemoryBench(device="cuda", hooks=["fsdp:none"])

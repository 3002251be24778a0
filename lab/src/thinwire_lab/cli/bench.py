"""`thinwire bench`: measured beside the machine's own limit and beside what a user would pick instead."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from thinwire.cli.console import console, report, show, write_json
from thinwire.cli.lazy import lazy
from thinwire.cli.options import was_given
from thinwire.cli.server import grpc_options
from thinwire_lab.bench.options import (
    QUICK,
    ClockOptions,
    CodecsOptions,
    FsdpOptions,
    HooksOptions,
    MemoryOptions,
    PaysOptions,
    UpdatesOptions,
)
from thinwire_lab.cli import options
from thinwire_lab.cli.bench_options import (
    AllDesigns,
    AllSteps,
    Blocks,
    BlockSteps,
    Cores,
    Counts,
    Device,
    Layers,
    Links,
    LinkSeconds,
    LocalDesigns,
    Markdown,
    MemoryMethods,
    Methods,
    Place,
    Quick,
    Resume,
    Sharded,
    SomeModels,
    Steps,
    ThinSteps,
)
from thinwire_lab.cli.measuring import measure
from thinwire_lab.cli.options import takes
from thinwire_lab.cli.race import EXAMPLES, race

if TYPE_CHECKING:
    from thinwire.reports import codec_sample
    from thinwire_lab.bench import clock as clock_bench
    from thinwire_lab.bench import codecs as codecs_bench
    from thinwire_lab.bench import fsdp as fsdp_bench
    from thinwire_lab.bench import (
        fsdp_cells,
        harness,
        hook_cells,
        memory_cells,
        peer_costs,
        sharing,
        transport_costs,
        updates_cells,
    )
    from thinwire_lab.bench import hooks as hooks_bench
    from thinwire_lab.bench import memory as memory_bench
    from thinwire_lab.bench import pays as pays_bench
    from thinwire_lab.bench import sample as samples
    from thinwire_lab.bench import updates as updates_bench
else:
    clock_bench = lazy("thinwire_lab.bench.clock")
    codecs_bench = lazy("thinwire_lab.bench.codecs")
    fsdp_bench = lazy("thinwire_lab.bench.fsdp")
    fsdp_cells = lazy("thinwire_lab.bench.fsdp_cells")
    harness = lazy("thinwire_lab.bench.harness")
    hook_cells = lazy("thinwire_lab.bench.hook_cells")
    hooks_bench = lazy("thinwire_lab.bench.hooks")
    memory_bench, memory_cells = lazy("thinwire_lab.bench.memory"), lazy("thinwire_lab.bench.memory_cells")
    pays_bench = lazy("thinwire_lab.bench.pays")
    samples, sharing = lazy("thinwire_lab.bench.sample"), lazy("thinwire_lab.bench.sharing")
    codec_sample = lazy("thinwire.reports.codec_sample")
    peer_costs, transport_costs = lazy("thinwire_lab.bench.peer_costs"), lazy("thinwire_lab.bench.transport_costs")
    updates_bench, updates_cells = lazy("thinwire_lab.bench.updates"), lazy("thinwire_lab.bench.updates_cells")

app = typer.Typer(help="Measure codecs, transports and hooks on this machine.", no_args_is_help=True)


@app.command(epilog="Example: thinwire bench codecs --only 3lc --json codecs.json")
@takes(CodecsOptions, device=Device)
def codecs(given: CodecsOptions, resume: Resume = False, json: options.Json = None) -> None:
    """Encode and decode speed on one thread, beside memcpy, the two-pass floor, plain torch and raw compressors."""
    measure(codecs_bench.CodecsBench(**vars(given)), json, resume)


@app.command(
    epilog="Example: thinwire bench hooks --models lenet --links 10mbit,100mbit --hook none --hook '3lc[s=1.75]' "
    "--json out.json"
)
@takes(HooksOptions, steps=Steps, device=Place)
def hooks(
    given: HooksOptions,
    resume: Resume = False,
    png: options.Png = Path("thinwire-hooks.png"),
    json: options.Json = None,
) -> None:
    """Measure DDP hooks: seconds per step, CPU time and bytes at the interface.

    A hook with a start_step warms up for so many steps at least. Local updates take as many steps more as make whole
    periods between exchanges.

    Every finished run is in the JSON file at once; a hook that fails gives a row that says so, and the rest goes on.
    Ctrl-C keeps what has been measured. See `bench race` for the time to a test accuracy.
    """
    measure(hooks_bench.HooksBench(**vars(given)), json, resume, png)


@app.command(
    epilog="Example: thinwire bench fsdp --hook hsdp:none --hook 'hsdp:3lc[s=1.0]' --link 10mbit --json out.json"
)
@takes(FsdpOptions, hooks=Sharded, steps=AllSteps, short_steps=ThinSteps)
def fsdp(given: FsdpOptions, resume: Resume = False, json: options.Json = None) -> None:
    """FSDP2 and HSDP on thin links, stock and compressed: seconds per step, bytes, and the loss after some steps."""
    measure(fsdp_bench.FsdpBench(**vars(given)), json, resume)


app.command(epilog=EXAMPLES)(race)


@app.command(epilog="Example: thinwire bench updates --models byte-transformer-1m --designs update --json updates.json")
@takes(UpdatesOptions, models=SomeModels, designs=LocalDesigns, steps=BlockSteps, blocks=Blocks)
def updates(given: UpdatesOptions, resume: Resume = False, json: options.Json = None) -> None:
    """What local updates cost of the processor: a step alone, with plain DDP and with the design, in turn."""
    measure(updates_bench.UpdatesBench(**vars(given)), json, resume)


@app.command(epilog="Example: thinwire bench memory --hook none --hook '3lc[s=1.0]' --hook auto --json memory.json")
@takes(MemoryOptions, hooks=MemoryMethods, layers=Layers, device=Place)
def memory(given: MemoryOptions, resume: Resume = False, json: options.Json = None) -> None:
    """What a rank takes of memory with every method: bytes a parameter, between steps and at most."""
    measure(memory_bench.MemoryBench(**vars(given)), json, resume)


@app.command(epilog="Example: thinwire bench clock --workers 2 --workers 8 --links 10mbit,100mbit --json clock.json")
@takes(ClockOptions, designs=AllDesigns, links=Links, workers=Counts, steps=Steps)
def clock(given: ClockOptions, resume: Resume = False, json: options.Json = None) -> None:
    """The computed clock of runs in one process, beside processes behind links that the kernel shapes."""
    measure(clock_bench.ClockBench(**vars(given)), json, resume)


@app.command(
    epilog="Example: thinwire bench pays --quick --json pays.json --markdown pays.md; thinwire bench pays --hook "
    "server:fp32 --hook 'server:3lc[s=1.0]' --links none,1gbit,100mbit,10mbit --json server.json"
)
@takes(PaysOptions, methods=Methods, links=Links, seconds=LinkSeconds, cores=Cores)
def pays(
    given: PaysOptions,
    context: typer.Context,
    quick: Quick = False,
    markdown: Markdown = None,
    resume: Resume = False,
    json: options.Json = None,
) -> None:
    """Does compression pay? Measured steps of every method on every link, beside what the planner predicts.

    By DDP's hook, at a parameter server and with local updates, each against uncompressed training of its kind. Ctrl-C
    keeps what has been measured.
    """
    if quick:
        given = replace(given, **{name: value for name, value in QUICK.items() if not was_given(context, name)})
    with closing(pays_bench.PaysBench(**vars(given))) as bench:
        measure(bench, json, resume, markdown=markdown)


@app.command(epilog="Example: thinwire bench sample --json codec_sample.json")
def sample(json: options.Json = None) -> None:
    """Measure every codec's ratio and error on real gradients: the record that `thinwire codecs` shows."""
    rows = samples.sample_codecs()
    write_json(json, rows)
    show(codec_sample.table(rows))


@app.command(hidden=True)
def role(
    spec: Annotated[str, typer.Argument(help="What to do, as JSON.")],
    listen: Annotated[str, typer.Option()] = "127.0.0.1:0",
    shape: options.Shape = None,
    events: options.Events = False,
    insecure: options.Insecure = False,
) -> None:
    """One process of a benchmark; the others start it."""
    load = (
        hook_cells.HookRank
        | fsdp_cells.FsdpRank
        | updates_cells.UpdatesRank
        | memory_cells.MemoryRank
        | transport_costs.EchoServer
        | transport_costs.EchoWorker
        | peer_costs.PeerRank
        | sharing.SharingRank
    )
    part = msgspec.json.decode(spec.encode(), type=load)
    part.play(harness.Stage(report if events else console.print, listen, grpc_options(shape, insecure=insecure)))

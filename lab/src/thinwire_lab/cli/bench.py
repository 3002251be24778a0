"""`thinwire bench`: measured beside the machine's own limit and beside what a user would pick instead."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from thinwire.cli.console import console, report, show, write_json
from thinwire.cli.lazy import lazily
from thinwire.cli.options import was_given
from thinwire.cli.outputs import writable
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
from thinwire_lab.cli.measuring import measure
from thinwire_lab.cli.options import takes

with lazily():
    from thinwire.reports import codec_sample
    from thinwire_lab.bench import cells, peer_costs, ranks, roles, transport_costs
    from thinwire_lab.bench import clock as clock_bench
    from thinwire_lab.bench import codecs as codecs_bench
    from thinwire_lab.bench import fsdp as fsdp_bench
    from thinwire_lab.bench import hooks as hooks_bench
    from thinwire_lab.bench import memory as memory_bench
    from thinwire_lab.bench import pays as pays_bench
    from thinwire_lab.bench import sample as samples
    from thinwire_lab.bench import updates as updates_bench

app = typer.Typer(help="Measure codecs, hooks and whole trainings on this machine.", no_args_is_help=True)

Kernels = Annotated[str, typer.Option(help="cpu, or cuda (cuda:1, …): the GPU kernels, on the device's clock.")]
Counts = Annotated[list[int], typer.Option(min=1, help="How many workers; repeat for several.")]
LocalDesigns = options.names("Designs of local updates with commas between.")
BlockSteps = Annotated[int, typer.Option(min=1, help="Steps of a block; more where a design's rounds need them.")]
AllSteps = Annotated[int, typer.Option(min=1, help="Steps of the whole training, which the loss comes from.")]
ThinSteps = Annotated[int, typer.Option(min=1, help="How many of them run on thin links, and are timed.")]
LinkSeconds = Annotated[float, typer.Option(min=0.1, help="How long a method trains at each link, about.")]
Sharded = options.many(
    r"hsdp:METHOD, two sites of two ranks, or fsdp:METHOD, four ranks; a method is none, or a codec as in 3lc\[s=1.0], "
    "with gather=int8 in the brackets the parameters are coded too.",
    "--hook",
)
MemoryMethods = options.many(
    r"alone, a hook or a design as of `bench hooks`, and fsdp:METHOD or hsdp:METHOD as of `bench fsdp`.", "--hook"
)
Quick = Annotated[bool, typer.Option("--quick", help="Two models, three links and fewer methods, where not given.")]
Markdown = Annotated[
    Path | None, typer.Option(dir_okay=False, callback=writable, help="Write the tables as Markdown, to this file.")
]


@app.command(epilog="Example: thinwire bench codecs --only 3lc --json codecs.json")
@takes(CodecsOptions, device=Kernels)
def codecs(given: CodecsOptions, resume: options.ResumeGrid = False, json: options.Json = None) -> None:
    """Encode and decode speed on one thread, beside memcpy, the two-pass floor, plain torch and raw compressors."""
    measure(codecs_bench.CodecsBench(**vars(given)), json, resume)


@app.command(
    epilog="Example: thinwire bench hooks --models lenet --links 10mbit,100mbit --hook none --hook '3lc[s=1.75]' "
    "--json out.json"
)
@takes(HooksOptions, steps=options.Steps, device=options.Place)
def hooks(given: HooksOptions, resume: options.ResumeGrid = False, json: options.Json = None) -> None:
    """Measure DDP hooks: seconds per step, CPU time and bytes at the interface.

    A hook with a start_step warms up for so many steps at least; local updates take whole periods between exchanges. A
    hook that fails has a row with its error. See `thinwire race` for the time to a test accuracy.
    """
    measure(hooks_bench.HooksBench(**vars(given)), json, resume)


@app.command(
    epilog="Example: thinwire bench fsdp --hook hsdp:none --hook 'hsdp:3lc[s=1.0]' --link 10mbit --json out.json"
)
@takes(FsdpOptions, hooks=Sharded, steps=AllSteps, short_steps=ThinSteps)
def fsdp(given: FsdpOptions, resume: options.ResumeGrid = False, json: options.Json = None) -> None:
    """FSDP2 and HSDP on thin links, stock and compressed: seconds per step, bytes, and the loss after some steps."""
    measure(fsdp_bench.FsdpBench(**vars(given)), json, resume)


@app.command(epilog="Example: thinwire bench updates --models byte-transformer-1m --designs update --json updates.json")
@takes(UpdatesOptions, designs=LocalDesigns, steps=BlockSteps)
def updates(given: UpdatesOptions, resume: options.ResumeGrid = False, json: options.Json = None) -> None:
    """What local updates cost of the processor: a step alone, with plain DDP and with the design, in turn."""
    measure(updates_bench.UpdatesBench(**vars(given)), json, resume)


@app.command(epilog="Example: thinwire bench memory --hook none --hook '3lc[s=1.0]' --hook auto --json memory.json")
@takes(MemoryOptions, hooks=MemoryMethods, device=options.Place)
def memory(given: MemoryOptions, resume: options.ResumeGrid = False, json: options.Json = None) -> None:
    """What a rank takes of memory with every method: bytes a parameter, between steps and at most."""
    measure(memory_bench.MemoryBench(**vars(given)), json, resume)


@app.command(epilog="Example: thinwire bench clock --workers 2 --workers 8 --links 10mbit,100mbit --json clock.json")
@takes(ClockOptions, workers=Counts, steps=options.Steps)
def clock(given: ClockOptions, resume: options.ResumeGrid = False, json: options.Json = None) -> None:
    """The computed clock of runs in one process, beside processes behind links that the kernel shapes."""
    measure(clock_bench.ClockBench(**vars(given)), json, resume)


@app.command(
    epilog="Example: thinwire bench pays --quick --json pays.json --markdown pays.md; thinwire bench pays --hook "
    "server:fp32 --hook 'server:3lc[s=1.0]' --links none,1gbit,100mbit,10mbit --json server.json"
)
@takes(PaysOptions, seconds=LinkSeconds)
def pays(
    given: PaysOptions,
    context: typer.Context,
    quick: Quick = False,
    markdown: Markdown = None,
    resume: options.ResumeGrid = False,
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
        cells.HookRank
        | cells.FsdpRank
        | cells.UpdatesRank
        | cells.MemoryRank
        | transport_costs.EchoServer
        | transport_costs.EchoWorker
        | peer_costs.PeerRank
        | peer_costs.SharingRank
    )
    part = msgspec.json.decode(spec.encode(), type=load)
    stage = roles.Stage(report if events else console.print, listen, grpc_options(shape, insecure=insecure))
    if isinstance(part, cells.Rank):
        ranks.play(part, stage)
    else:
        part.play(stage)

"""`thinwire bench`: measurements beside the machine's limits and beside the alternatives of a user."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import msgspec
import typer

from thinwire.cli.console import console, report, show, write_json
from thinwire.cli.lazy import lazily
from thinwire.cli.options import was_given
from thinwire_lab.bench.options import (
    PARTS,
    QUICK,
    CodecsOptions,
    DecoupledOptions,
    GoodputOptions,
    HooksOptions,
    MemoryOptions,
    PaysOptions,
)
from thinwire_lab.cli import options
from thinwire_lab.cli.measuring import measure
from thinwire_lab.cli.options import takes

with lazily():
    from thinwire.reports import codec_sample
    from thinwire_lab.bench import codecs as codecs_bench
    from thinwire_lab.bench import goodput as goodput_bench
    from thinwire_lab.bench import hooks as hooks_bench
    from thinwire_lab.bench import memory as memory_bench
    from thinwire_lab.bench import pays as pays_bench
    from thinwire_lab.bench import ranks
    from thinwire_lab.bench import sample as samples
    from thinwire_lab.bench.decoupled import study

app = typer.Typer(help="Measure codecs, hooks and whole trainings on this machine.", no_args_is_help=True)

Kernels = Annotated[str, typer.Option(help="cpu, or cuda (cuda:1, …): the GPU kernels, on the device's clock.")]
LinkSeconds = Annotated[float, typer.Option(min=0.1, help="How long a method trains at each link, about.")]
MemoryMethods = options.many("alone, or a hook or a design as for `bench hooks`.", "--hook")
Quick = Annotated[bool, typer.Option("--quick", help="Two models, three links and fewer methods, where not given.")]


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

    A hook with a start_step warms up for at least that many steps; local updates take whole periods between exchanges.
    A failed hook has a row with its error. `thinwire race` measures the time to a test accuracy.
    """
    measure(hooks_bench.HooksBench(**vars(given)), json, resume)


@app.command(epilog="Example: thinwire bench memory --hook none --hook '3lc[s=1.0]' --hook auto --json memory.json")
@takes(MemoryOptions, hooks=MemoryMethods)
def memory(given: MemoryOptions, resume: options.ResumeGrid = False, json: options.Json = None) -> None:
    """Measure a rank's memory with every method: bytes a parameter, between steps and at most."""
    measure(memory_bench.MemoryBench(**vars(given)), json, resume)


@app.command(
    epilog="Example: thinwire bench pays --quick --json pays.json; thinwire bench pays --hook server:fp32 "
    "--hook 'server:3lc[s=1.0]' --links none,1gbit,100mbit,10mbit --json server.json"
)
@takes(PaysOptions, seconds=LinkSeconds)
def pays(
    given: PaysOptions,
    context: typer.Context,
    quick: Quick = False,
    resume: options.ResumeGrid = False,
    json: options.Json = None,
) -> None:
    """Does compression pay? Measured steps of every method on every link, beside the planner's predictions.

    Methods are DDP hooks, designs at a parameter server and local updates, each compared with uncompressed training of
    its kind. Ctrl-C keeps the finished measurements.
    """
    if quick:
        given = replace(given, **{name: value for name, value in QUICK.items() if not was_given(context, name)})
    measure(pays_bench.PaysBench(**vars(given)), json, resume)


@app.command(epilog="Example: thinwire bench goodput --learners 8,64 --mtbf-minutes 10 --json goodput.json")
@takes(GoodputOptions)
def goodput(given: GoodputOptions, resume: options.ResumeGrid = False, json: options.Json = None) -> None:
    """Model the goodput of learners that die, in virtual time, beside training in step and data-parallel training."""
    measure(goodput_bench.GoodputBench(**vars(given)), json, resume)


@app.command(
    epilog="Example: thinwire bench decoupled --json decoupled.json; the losses alone: thinwire bench decoupled "
    "--parts loss --steps 480 --json losses.json --resume"
)
@takes(
    DecoupledOptions,
    parts=options.names(f"Parts with commas between: {', '.join(PARTS)}."),
    design=Annotated[str, typer.Option(help="A decoupled design, options in brackets.")],
    rivals=options.names("Designs whose workers exchange in step; losses are compared with the last one's."),
    seconds=Annotated[float, typer.Option(help="How long real processes train.")],
    steps=Annotated[int, typer.Option(min=3, help="Inner steps of a learner of the mean speed, for a loss.")],
    pace_s=Annotated[float, typer.Option(help="Seconds of an inner step of a learner of speed 1.")],
    kill_every_s=Annotated[float, typer.Option(help="Seconds between two deaths.")],
    link=Annotated[str, typer.Option(help=options.LINK)],
)
def decoupled(given: DecoupledOptions, resume: options.ResumeGrid = False, json: options.Json = None) -> None:
    """Measure decoupled learners: goodput with a slow one and with deaths, traffic, and the loss.

    Real processes, which sleep to keep their paces, give goodput and traffic. One process with a computed clock gives
    losses. The table's last column is the share of steps in which the machine was too busy to keep the pace.
    """
    measure(study.DecoupledBench(**vars(given)), json, resume)


@app.command(epilog="Example: thinwire bench sample --json codec_sample.json")
def sample(json: options.Json = None) -> None:
    """Measure every codec's ratio and error on real gradients: the record that `thinwire codecs` shows."""
    rows = samples.sample_codecs()
    write_json(json, rows)
    show(codec_sample.table(rows))


@app.command(hidden=True)
def role(
    spec: Annotated[str, typer.Argument(help="The rank's settings as JSON.")],
    events: options.Events = False,
) -> None:
    """Run one rank of a benchmark; other commands start it."""
    rank = msgspec.json.decode(spec.encode(), type=ranks.AnyRank)
    ranks.run(rank, report if events else console.print)

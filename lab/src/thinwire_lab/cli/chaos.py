"""`thinwire chaos`: trainings of real processes with faults."""

from __future__ import annotations

from typing import Annotated

import typer

from thinwire.cli.lazy import lazily
from thinwire_lab.chaos.faults import KINDS, StormsOptions
from thinwire_lab.cli import options
from thinwire_lab.cli.measuring import measure

with lazily():
    from thinwire_lab.chaos import storms as many_storms

app = typer.Typer(
    no_args_is_help=True, help="Kill, freeze and cut off real processes, and check how the training ends."
)

Steps = Annotated[int, typer.Option(min=30, help="Steps of each training.")]
AllDesigns = options.names("Designs with commas between, one training each in turn; by default all.")
Faults = options.names(f"Kinds with commas between: {', '.join(KINDS)}.")
Link = Annotated[str, typer.Option(help=options.LINK)]


@app.command(
    epilog="Example: thinwire chaos storms --runs 20 --json storms.json; one death of the server each: thinwire chaos "
    "storms --faults server --strikes 1 --designs 3lc --runs 20; one long training: thinwire chaos storms --runs 1 "
    "--steps 2000 --every 20 --designs 3lc --faults kill,stop --peace; the 17th once more: thinwire chaos storms "
    "--first 17 --runs 1"
)
@options.takes(StormsOptions, steps=Steps, designs=AllDesigns, faults=Faults, link=Link)
def storms(given: StormsOptions, resume: options.ResumeGrid = False, json: options.Json = None) -> None:
    r"""Strike trainings with faults: no gradient lost or counted twice, and weights or accuracy as without faults.

    By default many short trainings of all designs. With --strikes each fault ends before the next begins: a killed
    worker's command joins again, and after the death of a server the weights are those of an undisturbed training.
    In trainings of more than ten minutes the server may not grow.
    Workers that do not return need backup workers: --faults gone --strikes 1 --consistency 'backup\[1]'.
    """
    measure(many_storms.Storms(**vars(given)), json, resume)

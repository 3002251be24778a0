"""The lab's commands, which `thinwire` finds under the entry point `thinwire.commands`.

This file imports no command: `thinwire --help` reads this table alone.
"""

from __future__ import annotations

import typer

from thinwire.cli.lazy import add_lazy

PANEL = "Lab (thinwire-lab)"
COMMANDS = {
    "demo": "Train digits twice over a thin link, uncompressed and with 3LC, each in the same time.",
    "train": "Train a model with a server and N workers on this machine, over an emulated link; or on a Ray cluster.",
    "worker": "Train as one worker. All workers take the same options but `--rank`.",
    "run": "Run a script of torchrun's on this machine, each rank in a separate network behind a thin link.",
    "compare": "Compare designs on links: accuracy from full runs, seconds per step from short runs on every link.",
    "race": "Race DDP hooks to a test accuracy, or language models to a held-out loss.",
    "reproduce": "Reproduce tables and figures of the papers, and show ours beside the paper's.",
}
BENCH = {
    "codecs": "Encode and decode speed on one thread, beside memcpy, the two-pass floor, plain torch and raw "
    "compressors.",
    "sample": "Measure every codec's ratio and error on real gradients: the record that `thinwire codecs` shows.",
    "hooks": "Measure DDP hooks: seconds per step, CPU time and bytes at the interface.",
    "memory": "Measure a rank's memory with every method: bytes a parameter, between steps and at most.",
    "pays": "Does compression pay? Measured steps of every method on every link, beside the planner's predictions.",
    "goodput": "Model the goodput of learners that die, in virtual time, beside training in step and data-parallel "
    "training.",
    "decoupled": "Measure decoupled learners: goodput with a slow one and with deaths, traffic, and the loss.",
    "role": "Run one rank of a benchmark; other commands start it.",
}
CHAOS = {
    "storms": "Strike trainings with faults: no gradient lost or counted twice, and weights or accuracy as without "
    "faults.",
}


def add_commands(app: typer.Typer) -> None:
    """Adds the lab's commands to the application of `thinwire`."""
    for name, about in COMMANDS.items():
        add_lazy(app, name, about, f"thinwire_lab.cli.{name}", panel=PANEL)
    for group, commands, about in (
        ("bench", BENCH, "Measure codecs, hooks and whole trainings on this machine."),
        ("chaos", CHAOS, "Kill, freeze and cut off real processes, and check how the training ends."),
    ):
        grouped = typer.Typer(help=about, no_args_is_help=True)
        for name, said in commands.items():
            add_lazy(grouped, name, said, f"thinwire_lab.cli.{group}", hidden=name == "role")
        app.add_typer(grouped, name=group, rich_help_panel=PANEL)

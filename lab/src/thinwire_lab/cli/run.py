"""`thinwire run --link 20mbit SCRIPT …`: a script of torchrun's, each rank behind a thin link."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Annotated

import typer

from thinwire.cli.lazy import lazily
from thinwire.quantities import nbytes_text
from thinwire_lab.engines.system_tools import with_privileges

with lazily():
    from thinwire_lab.bench import courses
    from thinwire_lab.engines import namespaces

app = typer.Typer()

PORT = "29400"


@app.command(
    context_settings={"allow_interspersed_args": False},
    epilog="Example: thinwire run --link 20mbit --ranks 4 examples/one_line.py --optimizer adamw; a link that steps: "
    "thinwire run --link 100mbit/5mbit@30 examples/one_line.py; a module: "
    "thinwire run -- -m thinwire_lab.bench.one_line",
)
def run(
    script: Annotated[list[str], typer.Argument(help="The script, as after `torchrun`, and its arguments.")],
    link: Annotated[
        str, typer.Option(help="The rate of every rank's link, both ways; several with / and @ the seconds of each.")
    ] = "none",
    ranks: Annotated[int, typer.Option(min=1, max=64, help="How many ranks train together.")] = 4,
) -> None:
    """Run a script of torchrun's on this machine, each rank in a separate network behind a thin link.

    The kernel shapes the links. The output is that of all ranks, and at the end the bytes that each has sent.
    """
    with_privileges(link.partition("/")[0], "kernel")
    course = courses.course(link)
    rate = course.links[0]
    hosts = [f"rank {rank}" for rank in range(ranks)]
    with namespaces.Fabric(dict.fromkeys(hosts, rate)) as fabric:
        shared = {"WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": "eth0"}
        shared |= {"MASTER_ADDR": fabric.addresses[hosts[0]], "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        started = [
            subprocess.Popen(
                fabric.inside(host, [sys.executable, "-u", *script]), env=os.environ | shared | {"RANK": str(rank)}
            )
            for rank, host in enumerate(hosts)
        ]
        try:
            began = time.monotonic()
            while None in (ended := [each.poll() for each in started]) and not any(ended):
                time.sleep(course.poll_s or 0.1)
                if (now := course.rate(time.monotonic() - began, []) or rate) != rate:
                    rate = now
                    fabric.set_rates(dict.fromkeys(hosts, rate))
        finally:
            for each in started:
                if each.poll() is None:
                    each.terminate()
            for each in started:
                each.wait()
        sent = [fabric.sent(host).nbytes for host in hosts]
    typer.echo(f"sent by each rank: {', '.join(nbytes_text(each) for each in sent)}")
    raise typer.Exit(next(filter(None, ended), 0))  # not the status of a rank that was ended because another failed

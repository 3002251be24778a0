"""The options of a command that fill a `Job`: listed once, with the job's own defaults.

A command declares a parameter `job` and is given one; its command line has the job's options instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any

from thinwire.cli import options
from thinwire.jobs.job import Job

OPTIONS: dict[str, Any] = {
    "design": options.Design,
    "model": options.Model,
    "data": options.Data,
    "workers": options.Workers,
    "steps": options.Steps,
    "seconds": options.Seconds,
    "link": options.Link,
    "seed": options.Seed,
    "batch": options.Batch,
    "lr": options.Rate,
    "eval_every": options.EvalEvery,
    "data_root": options.DataRoot,
    "servers": options.Servers,
    "servers_on_workers": options.ServersOnWorkers,
    "codec_up": options.CodecUp,
    "codec_down": options.CodecDown,
    "consistency": options.Consistency,
    "placement": options.Placement,
    "compression": options.Compression,
    "transmission": options.Transmission,
}
"""Every field of a job, in the order in which help shows them."""


def takes_job(*, without: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replaces a command's parameter `job` by one option for each of the job's fields.

    Args:
        without: fields that the command fills itself, or leaves at their defaults.

    Example:
        >>> @takes_job(without=("link",))
        ... def command(job: Job, verbose: bool = False) -> None:
        ...     print(job.design, job.workers, verbose)
        >>> command(design="fp32", verbose=True)
        fp32 4 True
        >>> "workers" in inspect.signature(command).parameters, "link" in inspect.signature(command).parameters
        (True, False)
    """
    defaults = {field.name: field.default for field in fields(Job)}
    chosen = {name: option for name, option in OPTIONS.items() if name not in without}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def parameter(name: str) -> inspect.Parameter:
            kind = inspect.Parameter.KEYWORD_ONLY
            return inspect.Parameter(name, kind, default=defaults[name], annotation=chosen[name])

        own = [
            each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for each in inspect.signature(command, eval_str=True).parameters.values()
            if each.name != "job"
        ]
        required = [each for each in own if each.default is each.empty]
        further = [each for each in own if each.default is not each.empty]
        parameters = [*required, *(parameter(name) for name in chosen), *further]

        @wraps(command)
        def filled(**values: Any) -> None:
            job = Job(**{name: values.pop(name) for name in chosen if name in values})
            command(job=job, **values)

        filled.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
        filled.__annotations__ = {each.name: each.annotation for each in parameters}
        return filled

    return decorate

"""Runs a training script for as many steps as a profile takes, and returns what rank 0 found.

The script is not changed: Python imports `cli/startup/sitecustomize.py` before it, in every process of the command,
which begins to observe there. Its output is shown.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from thinwire.engines.ending import end_all
from thinwire.errors import ConfigError
from thinwire.planner.observing import STEPS_VARIABLE, VARIABLE, load, refusal
from thinwire.planner.profile import STEPS, WARM_UP, Profile

END_WITHIN_S = 10.0
"""Seconds in which a profiled command may end by itself."""


def profile_script(
    command: Sequence[str],
    environment: Mapping[str, str],
    startup: Path,
    *,
    steps: int = STEPS,
    threads: int | None = None,
    stdout: int | None = None,
) -> Profile:
    """Measures the steps of a training script.

    Its first steps are really made, whatever they write; then it is ended. The exchange of DDP and of `tw.distribute`
    is left out.

    Args:
        command: as it is typed, such as `["torchrun", "--nproc-per-node", "1", "train.py"]`.
        environment: of the command.
        startup: the folder of `sitecustomize.py`.
        steps: that are measured, after the one in which the model is found and two that are not.
        threads: of the arithmetic of every process; None: as many as it takes by itself.
        stdout: the file descriptor that the script prints to; None: this process's standard output.

    Raises:
        ConfigError: the command cannot be started, fails, or ends before so many steps of an optimizer; or what its
            steps leave cannot be planned with.
    """
    with tempfile.TemporaryDirectory(prefix="thinwire-plan-") as folder:
        found = Path(folder) / "profile.pt"
        path = os.pathsep.join(filter(None, (str(startup), environment.get("PYTHONPATH", ""))))
        given = {VARIABLE: str(found), STEPS_VARIABLE: str(steps), "PYTHONPATH": path}
        if threads is not None:
            given["OMP_NUM_THREADS"] = str(threads)
        try:
            process = subprocess.Popen(command, env={**environment, **given}, start_new_session=True, stdout=stdout)
        except OSError as error:
            raise ConfigError(f"{command[0]!r} cannot be started: {error.strerror or error}") from error
        refused = refusal(found)
        try:
            while process.poll() is None and not found.exists() and not refused.exists():
                time.sleep(0.05)
            if found.exists() or refused.exists():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_WITHIN_S)
        finally:
            end_all(process)
        if refused.exists():
            raise ConfigError(f"{' '.join(command)!r} was run, but {refused.read_text()}")
        if not found.exists():
            raise ConfigError(
                f"{' '.join(command)!r} ended with status {process.returncode} before a profile was there: it takes "
                f"{steps + WARM_UP + 1} steps of a torch optimizer that trains a module, by a Python that has thinwire"
            )
        return load(found)

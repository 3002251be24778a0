"""Profiles an unchanged training script from inside its process.

`begin` runs before the script does (see `cli/startup/sitecustomize.py`). The steps are those of the script's optimizer,
the model is the outermost called module that holds parameters of that optimizer. The exchanges of DDP and
`tw.distribute` are left out, since the plan predicts them: every rank trains alone. After enough steps rank 0 writes
the profile or the reason why there is none, and all ranks end.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from thinwire.errors import ConfigError
from thinwire.hooks.wrapping import inside_compiled
from thinwire.planner.optimizers import Trainer
from thinwire.planner.profile import STEPS, Profile, TensorSeconds, Watch
from thinwire.runtime.metrics import MetricsWriter
from thinwire.runtime.serving import serving
from thinwire.server.core import ServerCore
from thinwire.transports.memory import MemoryServer

VARIABLE = "THINWIRE_PROFILE"
"""Names the file that a profile is written to; `STEPS_VARIABLE` how many steps are measured."""
STEPS_VARIABLE = "THINWIRE_PROFILE_STEPS"
ALONE = "local-sgd[h=1000000]"
"""A design whose workers exchange nothing in the steps of a profile."""


class Observer:
    """Follows the steps of one process.

    Args:
        path: where the profile goes; None on all ranks but 0.
        steps: that are measured.
    """

    def __init__(self, path: Path | None, steps: int) -> None:
        self._path, self._steps = path, steps
        self._called: dict[int, nn.Module] = {}
        self._watch: Watch | None = None
        self._optimizer: Optimizer | None = None
        self._finished = False
        self._others: dict[int, int] = {}
        """Values of parameters that other optimizers train."""
        self._hooks = ExitStack()

    def observe(self) -> None:
        """Begins to follow modules and optimizers, and leaves out what DDP and `tw.distribute` exchange."""
        # Compiled models warn that such hooks are called twice, which makes no difference to this one.
        warnings.filterwarnings("ignore", "Using `torch.compile", UserWarning)
        calls = register_module_forward_pre_hook(self._call)
        self._hooks.callback(calls.remove)
        register_optimizer_step_post_hook(self._stepped)
        _leave_out_exchanges()
        _leave_out_ours()

    def _call(self, module: nn.Module, _: Any) -> None:
        if not torch.compiler.is_compiling():  # a graph may not change this dict, and its wrapper was noted
            self._called.setdefault(id(module), module)

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if self._finished:  # the script caught SystemExit: the profile is complete
            raise SystemExit(0)
        if self._watch is None:
            called = self._outermost(optimizer)
            if not called:
                return
            self._hooks.close()
            self._called.clear()
            inner = [_unwrapped(each) for each in called]
            try:
                self._watch = Watch(inner[0] if len(inner) == 1 else nn.ModuleList(inner), self._steps, called)
            except ConfigError as error:
                self._refuse(error)
            self._optimizer = optimizer
            self._hooks.enter_context(self._watch.watching())
        elif optimizer is self._optimizer:  # of several, the first that trains a module ends a step
            self._watch.end()
            if self._watch.done:
                self._finish(self._watch)
        else:
            self._others.update((id(each), each.numel()) for each in _parameters(optimizer))
        self._watch.begin()

    def _outermost(self, optimizer: Optimizer) -> list[nn.Module]:
        """The modules that were called and hold an optimizer's parameters, without those that are parts of others."""
        trained = {id(each) for each in _parameters(optimizer)}
        found: list[tuple[nn.Module, set[int]]] = []
        for module in self._called.values():  # outer modules are called before inner ones
            held = trained.intersection(map(id, module.parameters()))
            if held and not any(held <= more for _, more in found):
                found = [(each, less) for each, less in found if not less <= held]
                found.append((module, held))
        return [module for module, _ in found]

    def _finish(self, watch: Watch) -> None:
        own = {id(each): each.numel() for each in watch.parameters()}
        if left_out := sum(numel for each, numel in self._others.items() if each not in own):
            watch.remarks.append(
                f"another optimizer trains {left_out:,} values: neither they nor its steps are in this plan, which is "
                f"of the {sum(own.values()):,} values of the first optimizer that steps"
            )
        try:
            found = watch.profile()
        except ConfigError as error:
            self._refuse(error)
        self._end(lambda part: torch.save(_as_dict(found), part), lambda path: path)

    def _refuse(self, error: ConfigError) -> NoReturn:
        """Writes why there can be no profile, and ends the script."""
        self._end(lambda part: part.write_text(str(error)), refusal)

    def _end(self, write: Callable[[Path], object], name: Callable[[Path], Path]) -> NoReturn:
        self._finished = True
        if self._path is not None:
            part = self._path.with_suffix(".part")
            write(part)
            part.replace(name(self._path))
        raise SystemExit(0)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _unwrapped(module: nn.Module) -> nn.Module:
    inner = inside_compiled(module)
    inner = inner.module if isinstance(inner, DistributedDataParallel) else inner
    inner = inside_compiled(inner) if isinstance(inner, nn.Module) else module
    return inner if isinstance(inner, nn.Module) else module


def begin(environment: Mapping[str, str]) -> None:
    """Begins to observe this process, where its environment asks for it."""
    if found := environment.get(VARIABLE):
        path = Path(found) if environment.get("RANK", "0") == "0" else None
        Observer(path, int(environment.get(STEPS_VARIABLE, STEPS))).observe()


def refusal(path: Path) -> Path:
    """Returns the file that says, in place of the profile at `path`, why there can be none."""
    return path.with_suffix(".refused")


def load(path: Path) -> Profile:
    """Returns the profile that a script left behind."""
    saved = torch.load(path, weights_only=True)
    tensors = tuple(TensorSeconds(**each) for each in saved.pop("tensors"))
    return Profile(tensors=tensors, trainer=Trainer(**saved.pop("trainer")), **saved)


def _as_dict(profile: Profile) -> dict[str, Any]:
    tensors = [asdict(each) for each in profile.tensors]
    return {**vars(profile), "tensors": tensors, "trainer": vars(profile.trainer)}


def _leave_out_exchanges() -> None:
    """Gives every DDP model a hook that sends nothing, in place of the script's own, if it has one."""
    made, registered = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook

    def init(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        registered(self, None, _kept)
        self._comm_hooks.clear()  # the script may ask for one of its own

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
    DistributedDataParallel.register_comm_hook = lambda *_, **__: None  # type: ignore[method-assign]


def _leave_out_ours() -> None:
    """Replaces `tw.distribute`: the script's optimizer steps alone, and no exchange follows."""
    home = import_module("thinwire.hooks.distribute")
    joined = home.distribute

    def alone(
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        metrics: Sequence[MetricsWriter] = (),
        **_: Any,
    ) -> Any:
        # With the script's own servers it would join a running training.
        server = MemoryServer(serving(ServerCore())).connect()
        opt = joined(model, optimizer, server=server, design=ALONE, metrics=metrics)
        # The shards hold the initial weights; the local weights are the nearest to the shared ones.
        opt.shared_weights = opt.averaged_weights = nullcontext
        return opt

    home.distribute = alone  # type: ignore[attr-defined]  # which `thinwire.distribute` is looked up in


def _kept(_: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


_kept.__annotations__.clear()  # DDP compares them with real types

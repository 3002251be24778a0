"""FSDP2's parameter groups; only this file and `passes.py` touch FSDP2's private names.

On a mesh with replicas, torch's `dist.all_reduce` gets a group with only this rank; averages are added later.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from thinwire.collective.cut import Cut
from thinwire.errors import ConfigError
from thinwire.schema.tensor_names import plain_name

try:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as AllGather
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
        DefaultAllGather,
        DefaultReduceScatter,
        _get_gradient_divide_factors,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
except ImportError as error:
    raise ConfigError(
        f"this torch is {torch.__version__}; thinwire.hooks.fsdp replaces what FSDP2 sends, and that has been tried "
        "with torch 2.9 to 2.14: install one of these, or use thinwire.hooks.ddp"
    ) from error

_FSDP1 = (
    "fsdp.compress takes FSDP2, and this model is wrapped in FullyShardedDataParallel (FSDP1), which has no place for "
    "it. Use FSDP2: `from torch.distributed.fsdp import fully_shard`; `for block in model.blocks: fully_shard(block, "
    "mesh=mesh)`; `fully_shard(model, mesh=mesh)`; the optimizer takes model.parameters() afterwards"
)
_UNWRAPPED = (
    "no module of this {kind} is sharded; wrap it first: `for block in model.blocks: fully_shard(block, mesh=mesh)`; "
    "`fully_shard(model, mesh=mesh)`"
)
_UNUSED_TAKES = (
    "" if hasattr(FSDPModule, "set_reduce_scatter_unused_params") else ", which later versions of torch have"
)


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    """A trained parameter with a shard on this rank."""

    name: str
    cut: Cut
    dtype: torch.dtype
    param: Any
    """FSDP's own record of it."""


class ParameterGroup:
    """The parameters that one call of `fully_shard` reduces together.

    Args:
        group: FSDP's own record of it.
        names: of its parameters, in its order.

    Attributes:
        parameters: the trained ones, in the order of the flat gradient.
        stride: number of values in one shard's flat gradient, padding included.
        gathered_names: of all parameters, frozen ones too, in the order in which their shards are gathered.
    """

    def __init__(self, group: Any, names: list[str]) -> None:
        self._group = group
        self._hook: Callable[[torch.Tensor], None] | None = None
        self._scatters: ReduceScatter | None = None
        self._gathers: AllGather | None = None
        self._trained = [param.sharded_param.requires_grad for param in group.fsdp_params]
        self.gathered_names = names
        self.parameters = [
            ShardedParameter(
                name,
                Cut(tuple(param.sharded_param.shape), param.fsdp_placement.dim),
                param.sharded_param.dtype,
                param,
            )
            for name, param in zip(names, group.fsdp_params, strict=True)
            if param.sharded_param.requires_grad
        ]
        self.replicated = isinstance(group.mesh_info, HSDPMeshInfo)
        self.mesh: DeviceMesh = group.mesh_info.mesh
        self.device: torch.device = group.device
        self.shards: int = group.mesh_info.shard_mesh_size
        self.shard: int = group.mesh_info.shard_mesh_rank
        # The first shard is the longest, and all are padded to its length.
        self.offsets = [0]
        for parameter in self.parameters:
            self.offsets.append(self.offsets[-1] + parameter.cut.numel(self.shards, 0))
        self.stride = self.offsets.pop()

    @property
    def compressed(self) -> bool:
        """Whether the group's collectives have been replaced or hooked."""
        custom = not isinstance(self._group._reduce_scatter_comm, DefaultReduceScatter)
        gathers = not isinstance(self._group._all_gather_comm, DefaultAllGather)
        return custom or gathers or self._group._all_reduce_hook is not None

    def check_hooks(self) -> None:
        """Raises ConfigError if a hook of `fsdp.compress` has been replaced."""
        group = self._group
        for what, there, ours in (
            ("set_all_reduce_hook", group._all_reduce_hook, self._hook),
            ("set_custom_reduce_scatter", group._reduce_scatter_comm, self._scatters),
            ("set_custom_all_gather", group._all_gather_comm, self._gathers),
        ):
            # Without replicas there is no all-reduce, and a hook for it would never see the exchanged gradients.
            if there is not ours and (ours is not None or what == "set_all_reduce_hook"):
                raise ConfigError(
                    f"{what} was called after fsdp.compress, and replaces its hook in {self}: ranks would no longer "
                    "average their gradients as they do now. Leave it out, or train without compression"
                )

    def replace_all_reduce(
        self, alone: dist.ProcessGroup, hook: Callable[[ParameterGroup, torch.Tensor], None]
    ) -> None:
        """Replaces the all-reduce among replicas by a call of `hook` with this rank's flat gradient shard.

        Args:
            alone: a process group with only this rank, for FSDP's own all-reduce.
            hook: receives this group and the gradient, which it changes in place.
        """
        self._replicas: dist.ProcessGroup = self._group.mesh_info.replicate_process_group
        info = copy.copy(self._group.mesh_info)
        info.replicate_process_group = alone
        self._group.mesh_info = info
        self._group._all_reduce_hook = self._hook = lambda flat: hook(self, flat)

    def all_reduce(self, flat: torch.Tensor) -> None:
        """Averages a flat gradient shard over the replicas as FSDP does."""
        dist.all_reduce(flat, group=self._replicas)
        if self._group.gradient_divide_factor is None:
            flat.div_(self._replicas.size())

    def take_all_reduce(self, flat: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
        """Copies the gradient in place of its all-reduce, and sets it to zero.

        Returns:
            The copy in `dtype`, in units of the gradient; and the factor for its average over the replicas.
        """
        self._check(flat, self.stride)
        _, after = self._divisors(flat, self._group._all_reduce_process_group)
        values = flat.to(dtype, copy=True).div_(after)
        flat.zero_()
        return values, 1.0 if self._group.gradient_divide_factor is None else self._replicas.size()

    def add_waiting(self, flat: torch.Tensor, waiting: torch.Tensor) -> None:
        """Adds values, in units of the gradient as `take_…` returns them, to a gradient before its reduction."""
        self._check(flat, self.stride * (1 if self.replicated else self.shards))
        if self.replicated:
            _, after = self._divisors(flat, self._group._all_reduce_process_group)
            flat.add_(waiting, alpha=after)
        else:
            before, _ = self._divisors(flat, None)
            flat.add_(waiting, alpha=1 / before)

    def replace_reduce_scatter(self, comm: ReduceScatter) -> ReduceScatter:
        """Replaces the reduce-scatter by `comm`, and returns FSDP's own."""
        before: ReduceScatter = self._group._reduce_scatter_comm
        self._group._reduce_scatter_comm = self._scatters = comm
        return before

    def take_reduce_scatter(
        self, output: torch.Tensor, flat: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, float]:
        """Takes the gradients of all shards in place of their reduce-scatter, and sets its output to zero.

        Returns:
            The gradients in `dtype`, in units of the gradient, sharing their memory if possible; and the factor for
            their average over the ranks.
        """
        self._check(flat, self.stride * self.shards)
        before, _ = self._divisors(flat, None)
        output.zero_()
        divisor = self._group.gradient_divide_factor
        return flat.to(dtype).mul_(before), 1.0 if divisor is None else self.shards / divisor

    def replace_all_gather(self, comm: AllGather) -> None:
        """Replaces the all-gather of parameters by `comm`."""
        self._group._all_gather_comm = self._gathers = comm

    def default_all_gather(self) -> AllGather:
        """Returns FSDP's own all-gather."""
        comm: AllGather = self._group._all_gather_comm
        return comm

    def gathered(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns views of the shards of all parameters in one rank's input of a gather, padding included."""
        return torch.split(flat, [param._sharded_param_data.numel() for param in self._group.fsdp_params])

    def own(self, values: torch.Tensor) -> torch.Tensor:
        """Returns this rank's shards of a flat gradient, which contains this rank's shards or all ranks'."""
        begin = 0 if self.replicated else self.shard * self.stride
        return values[begin : begin + self.stride]

    def wait_reduced(self) -> None:
        """Makes the current stream wait for gradients that FSDP has written.

        FSDP itself waits only at a step's end, and not after `set_is_last_backward(False)`.
        """
        if self.device.type == "cuda" and self._group._post_reduce_event is not None:
            torch.cuda.current_stream(self.device).wait_event(self._group._post_reduce_event)

    @property
    def reduces(self) -> bool:
        """Whether a backward pass reduces its gradients, and not only accumulates them."""
        return bool(self._group.reduce_grads)

    def fill_gradient(self, value: float) -> None:
        """Fills the gradients of this rank's shards."""
        for parameter in self.parameters:
            if (gradient := parameter.param.sharded_param.grad) is not None:
                with torch.no_grad():
                    gradient.to_local().fill_(value)

    def add_gradient(self, flat: torch.Tensor) -> None:
        """Adds a flat gradient of this rank's shards to those of the parameters."""
        if flat.is_cuda:
            flat.record_stream(torch.cuda.current_stream(flat.device))  # it comes from FSDP's own stream
        for parameter, offset in zip(self.parameters, self.offsets, strict=True):
            gradient = parameter.param.sharded_param.grad
            with torch.no_grad():
                local = gradient.to_local()
                local.add_(flat[offset : offset + local.numel()].view(local.shape).to(local.device))

    def _divisors(self, flat: torch.Tensor, replicas: dist.ProcessGroup | None) -> tuple[float, float]:
        """Returns FSDP's divisors before its reduce-scatter and at the end, without those of the collectives."""
        before, after, _, _ = _get_gradient_divide_factors(
            self._group._reduce_scatter_process_group,
            replicas,
            flat.dtype,
            flat.device.type,
            self._group.gradient_divide_factor,
            self._group.force_sum_reduction_for_comms,
        )
        return before or 1.0, after or 1.0

    def _check(self, flat: torch.Tensor, numel: int) -> None:
        # A parameter that was unfrozen instead may have as many values.
        if frozen := [each.name for each in self.parameters if not each.param.sharded_param.requires_grad]:
            raise ConfigError(
                f"{frozen[0]} was trained when fsdp.compress was called, and is frozen now: another parameter's "
                "gradients would be taken for its own. Leave it unfrozen, with a learning rate of 0, or build and "
                "compress the model anew"
            )
        trained = [param.sharded_param.requires_grad for param in self._group.fsdp_params]
        if unfrozen := [
            n for n, now, then in zip(self.gathered_names, trained, self._trained, strict=True) if now > then
        ]:
            raise ConfigError(
                f"{unfrozen[0]} was frozen when fsdp.compress was called, and is trained now: its gradients would be "
                "taken for another parameter's. Build and compress the model anew after unfreezing"
            )
        if flat.numel() != numel:
            raise ConfigError(
                f"{self} has {numel} values and {flat.numel()} came: some parameters have no gradient in this step, or "
                "were unfrozen since fsdp.compress. Where steps leave parameters out, call "
                f"model.set_reduce_scatter_unused_params(True){_UNUSED_TAKES}"
            )
        for parameter in self.parameters:
            if getattr(parameter.param.sharded_param, "_post_accumulate_grad_hooks", None):
                raise ConfigError(
                    f"{parameter.name} has a hook for accumulated gradients, and would see it before the ranks have "
                    "exchanged theirs; step the optimizer after the backward pass"
                )

    def __repr__(self) -> str:
        names = [parameter.name for parameter in self.parameters]
        return f"the parameter group of {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"


def parameter_groups(model: nn.Module) -> list[ParameterGroup]:
    """Returns the model's parameter groups with trained parameters, in the order of its modules.

    Raises:
        ConfigError: not an FSDP2 model, or one that cannot be compressed.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"fsdp.compress takes a model that fully_shard has sharded; a {type(model).__name__} came")
    if isinstance(model, DistributedDataParallel):
        raise ConfigError("fsdp.compress takes FSDP2, and this model is DistributedDataParallel: use ddp.compress")
    modules = dict(model.named_modules())
    if any(isinstance(module, FullyShardedDataParallel) for module in modules.values()):
        raise ConfigError(_FSDP1)
    paths = {module: path for path, module in reversed(modules.items())}
    found: list[ParameterGroup] = []
    for module in modules.values():
        if isinstance(module, FSDPModule):
            for group in _groups_of(module._get_fsdp_state()):
                if all(group is not each._group for each in found):
                    found.append(ParameterGroup(group, [_name(paths, param) for param in group.fsdp_params]))
                    _check_group(found[-1], group)
    found = [group for group in found if group.parameters]
    if not found:
        raise ConfigError(_UNWRAPPED.format(kind=type(model).__name__))
    if any(group.mesh != found[0].mesh or group.replicated != found[0].replicated for group in found):
        raise ConfigError(
            "the model's parameter groups lie on different meshes; call fully_shard with one mesh for all"
        )
    return found


def _groups_of(state: Any) -> list[Any]:
    """Returns the parameter groups of one call of `fully_shard`; one in earlier versions of torch."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def ranks_of(mesh: DeviceMesh) -> list[list[int]]:
    """Returns the global ranks of each site, by shard number; without replicas there is one site.

    FSDP numbers shards by the ranks of a process group, in ascending order, whatever the order in the mesh.

    Raises:
        ConfigError: this rank is not in the mesh, or sites number their shards differently.
    """
    sites: list[list[int]] = mesh.mesh.reshape(-1, mesh.mesh.shape[-1]).tolist()
    if mesh.get_coordinate() is None:
        raise ConfigError(f"rank {dist.get_rank()} is not in the model's mesh of ranks {mesh.mesh.tolist()}")
    orders = [[sorted(site).index(rank) for rank in site] for site in sites]
    if any(order != orders[0] for order in orders):
        raise ConfigError(
            f"the mesh {sites} has replicas of different shards side by side, as FSDP numbers the shards of each site "
            "by ascending ranks; order the ranks of all sites alike"
        )
    return [sorted(site) for site in sites]


def in_order(model: nn.Module, groups: Sequence[ParameterGroup]) -> dict[str, ShardedParameter]:
    """Returns the groups' parameters by name, in the model's order, which determines its last layer."""
    order = {plain_name(name): number for number, (name, _) in enumerate(model.named_parameters())}
    parameters = [parameter for group in groups for parameter in group.parameters]
    parameters.sort(key=lambda parameter: order.get(parameter.name, len(order)))
    return {parameter.name: parameter for parameter in parameters}


def check_backend(device: torch.device, group: dist.ProcessGroup) -> None:
    """Raises ConfigError for gradients on a GPU that FSDP would reduce by gloo."""
    if device.type == "cuda" and group._get_backend(device).name() == "gloo":
        raise ConfigError(
            "the parameters lie on a GPU and FSDP's process group is gloo, which has no reduce-scatter for them: "
            'init_process_group("cpu:gloo,cuda:nccl")'
        )


def _check_group(found: ParameterGroup, group: Any) -> None:
    if not isinstance(group.mesh_info, FSDPMeshInfo):
        raise ConfigError(f"{found} is replicated and not sharded: use DistributedDataParallel and ddp.compress")
    for parameter in found.parameters:
        mesh = parameter.param.sharded_param.device_mesh
        if parameter.param.is_dtensor or mesh.ndim > 2:
            raise ConfigError(
                f"parameter {parameter.name!r} lies on a mesh of {mesh.ndim} dimensions, with other parallelism than "
                "FSDP's; fsdp.compress takes a mesh of one dimension (FSDP) or two (replicas and shards, HSDP)"
            )
    if found.compressed:
        raise ConfigError(
            f"{found} has a communication hook already; FSDP takes one: build and shard the model anew before "
            "fsdp.compress"
        )
    if found.parameters:
        check_backend(group.device, group.mesh_info.shard_process_group)


def _name(paths: dict[nn.Module, str], param: Any) -> str:
    """Returns a parameter's name in the model, without wrappers' prefixes."""
    info = param._module_info
    return plain_name(f"{paths[info.module]}.{info.param_name}".lstrip("."))

"""A compression context: the state for one tensor in one direction (3LC §3, figure 1)."""

from __future__ import annotations

from typing import Any

import torch

from thinwire.codecs.base import Codec, Tensor
from thinwire.codecs.tensors import DeviceFlat, Flat, FloatArray, aligned_zeros, flatten, off_host
from thinwire.errors import ConfigError


class Context:
    """What one tensor needs between steps: the residual, and how far its random stream has run.

    Made for a tensor on a GPU, by a codec with kernels for it, a context keeps the residual there and encodes there
    (`thinwire.codecs.device`, which also encodes many tensors at once); else in the host's memory.

    Example:
        >>> import torch, thinwire as tw
        >>> codec = tw.codec("3lc", sparsity=1.0)
        >>> context = codec.context(torch.zeros(3))
        >>> sent = tw.decode(context.encode(torch.tensor([1.0, 0.25, -0.125])))
        >>> sent + context.residual
        tensor([ 1.0000,  0.2500, -0.1250])
    """

    def __init__(self, codec: Codec, like: Flat | DeviceFlat, *, name: str, seed: int) -> None:
        self.codec = codec
        self.name = name
        self.seed = seed
        self.step = 0
        self.payload_nbytes = 0
        """Payload size of the frame that was encoded last, in bytes."""
        values = like.values if isinstance(like, DeviceFlat) else torch.from_numpy(like.values)
        self.device = values.device
        """Where the residual is, and where tensors are encoded."""
        self.on_host = isinstance(like, Flat)
        self._dtype = like.dtype
        self._wide = values.dtype
        self._shape = like.shape
        self._residual: torch.Tensor | None = None
        self._residual_array: FloatArray | None = None
        if codec.residual_by_default and isinstance(like, Flat):
            self._residual_array = aligned_zeros(like.values.size, like.values.dtype)
            self._residual = torch.from_numpy(self._residual_array)
        elif codec.residual_by_default:
            self._residual = torch.zeros_like(values)

    @property
    def residual(self) -> torch.Tensor | None:
        """What was not sent yet, shape of the tensor, float32 (float64 for float64 tensors); a view, not a copy.

        None where the codec runs without error feedback.
        """
        return None if self._residual is None else self._residual.view(self._shape)

    def encode(self, tensor: Tensor) -> bytes:
        """Encodes residual + tensor into a frame; what was not sent stays in `residual`.

        Raises:
            NonFiniteError: NaN or Inf; the residual is then bit for bit what it was.
            ConfigError: another shape or dtype class than the context was made for.
        """
        if not self.on_host:
            from thinwire.codecs import device

            return device.encode_all([self], [tensor])[0]
        if off_host(tensor):
            from thinwire.codecs import device

            device.warn_of_host_context(self, tensor.device)
        flat = flatten(tensor, self.name)
        self.check(flat)
        draws = self.codec.draws(self.seed, self.name, self.step)
        encoded = self.codec.encode_flat(flat, self.name, self._residual_array, draws)
        self.sent(encoded.payload_nbytes)
        return encoded.frame

    def check(self, flat: Flat | DeviceFlat) -> None:
        """Raises ConfigError where a tensor is not of the shape and dtype class that the context was made for."""
        if flat.shape != self._shape:
            raise ConfigError(f"{self.name} has shape {flat.shape}; this context is for {self._shape}")
        if self._residual is not None and (flat.dtype == "fp64") != (self._dtype == "fp64"):
            raise ConfigError(
                f"{self.name} has dtype {flat.dtype}; this context was made for {self._dtype} "
                f"and keeps its residual as {str(self._wide).removeprefix('torch.')}"
            )

    def sent(self, payload_nbytes: int) -> None:
        """Counts what was encoded."""
        self.payload_nbytes = payload_nbytes
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of the state, for an exact resume: `step`, `seed` and, where there is one, `residual`."""
        state: dict[str, Any] = {"step": self.step, "seed": self.seed}
        if self.residual is not None:
            state["residual"] = self.residual.clone()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the state back.

        Raises:
            ConfigError: the state is of another shape, or of a codec with (or without) error feedback.
        """
        residual = state.get("residual")
        if (residual is None) != (self._residual is None):
            kept = "keeps" if self._residual is not None else "does not keep"
            raise ConfigError(f"{self.name}: this context {kept} a residual and the state says otherwise")
        if residual is not None and self._residual is not None:
            if tuple(residual.shape) != self._shape:
                raise ConfigError(
                    f"{self.name}: the state's residual has shape {tuple(residual.shape)}, not {self._shape}"
                )
            self._residual.copy_(torch.as_tensor(residual).reshape(-1))
        self.step = int(state["step"])
        self.seed = int(state["seed"])

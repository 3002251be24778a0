"""The codecs' arithmetic in Triton, for tensors on a GPU: the same bytes and the same residual bits as on the CPU.

Everything works on a *batch*, a list of flat tensors of one type on one device; one tensor is a batch of one. A batch
is encoded by a handful of launches, however many tensors it has. `batch` says which program works on which values,
`workspace` owns the memory and the stream; then one file per codec.

Importing this package imports no Triton; importing one of its files does. Triton's interpreter
(`TRITON_INTERPRET=1`, set before Triton is imported) runs every kernel on CPU tensors.
"""

from __future__ import annotations

from importlib.util import find_spec


def missing() -> str | None:
    """Says why no kernel of this package can run here; None where they can.

    Example:
        >>> missing() is None or "pip install" in missing()
        True
    """
    return None if find_spec("triton") else "Triton is not installed (pip install triton)"

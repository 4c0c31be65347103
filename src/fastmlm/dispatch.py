"""Which implementation runs: ``reference`` (PyTorch, anywhere) or ``triton`` (GPU, or its CPU interpreter)."""

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

IMPLS = ("reference", "cpp", "triton")


def available_impls() -> tuple[str, ...]:
    """The names ``impl=`` accepts on this machine; ``"reference"`` is always among them."""
    return tuple(impl for impl in IMPLS if _missing(impl) is None)


def resolve(impl: str | None, device: torch.device) -> str:
    """The implementation for a device: the named one, or the fastest that runs there.

    Raises:
        ValueError: the name is unknown.
        RuntimeError: the named one cannot run here; the message says what would make it run.
    """
    if impl is None:
        return "triton" if device.type == "cuda" and _missing("triton") is None else "reference"
    if impl not in IMPLS:
        raise ValueError(f"impl: expected None or one of {', '.join(IMPLS)}, got {impl!r}")
    reason = _missing(impl)
    if reason is None and impl == "triton" and device.type == "cpu" and not _interpreted():
        reason = "it runs on tensors on a GPU; on the CPU only in Triton's interpreter"
    if reason is not None:
        raise RuntimeError(f"impl: {impl!r} cannot run here: {reason}")
    return impl


def kernel(impl: str, op: str) -> Callable[..., Any]:
    """The function that implements ``op`` (``"masking.mask_tokens"``), imported at its first use."""
    module, _, function = op.partition(".")
    path = "fastmlm.reference" if impl == "reference" else f"fastmlm.kernels.gpu.{module}"
    return getattr(import_module(path), function)


def _missing(impl: str) -> str | None:
    """What an implementation lacks on this machine, None if nothing."""
    if impl == "cpp":
        return "this version has no native CPU kernel"
    if impl == "triton":
        if find_spec("triton") is None:
            return 'the package triton is not installed: pip install "fastmlm[gpu]"'
        if not torch.cuda.is_available() and not _interpreted():
            return "there is no GPU (for tests, TRITON_INTERPRET=1 set before the import runs kernels on the CPU)"
    return None


@lru_cache(maxsize=1)
def _interpreted() -> bool:
    return find_spec("triton") is not None and bool(import_module("fastmlm.kernels.gpu").interpreted())

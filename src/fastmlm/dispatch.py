"""Which implementation runs: ``reference`` (PyTorch, anywhere), ``cpp`` (CPU), ``triton`` (GPU, or its interpreter)."""

import warnings
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

IMPLS = ("reference", "cpp", "triton")
_NATIVE = "fastmlm.kernels.cpu._native"
_PACKAGES = {"cpp": "fastmlm.kernels.cpu", "triton": "fastmlm.kernels.gpu"}


def available_impls() -> tuple[str, ...]:
    """The names ``impl=`` accepts on this machine; ``"reference"`` is always among them."""
    return tuple(impl for impl in IMPLS if _missing(impl, None) is None)


def resolve(impl: str | None, device: torch.device, of_op: tuple[str, ...] = IMPLS) -> str:
    """The implementation for a device: the named one, or the fastest that runs there; ``of_op`` are those there are.

    Raises:
        ValueError: the name is unknown.
        RuntimeError: the named one cannot run here; the message says what would make it run.
    """
    check_name(impl)
    if impl is None:
        fastest = _fastest(device.type)
        return fastest if fastest in of_op else "reference"
    reason = _missing(impl, device.type) if impl in of_op else f"there are {' and '.join(of_op)} of this op"
    if reason is not None:
        raise RuntimeError(f"impl: {impl!r} cannot run here: {reason}")
    return impl


def check_name(impl: str | None) -> None:
    """Raise ValueError unless it is None or the name of an implementation."""
    if impl is not None and impl not in IMPLS:
        raise ValueError(f"impl: expected None or one of {', '.join(IMPLS)}, got {impl!r}")


@lru_cache(maxsize=64)
def kernel(impl: str, op: str) -> Callable[..., Any]:
    """The function that implements ``op`` (``"masking.mask_tokens"``), imported at its first use."""
    module, _, function = op.partition(".")
    path = f"{_PACKAGES[impl]}.{module}" if impl in _PACKAGES else "fastmlm.reference"
    return getattr(import_module(path), function)


def _fastest(device_type: str) -> str:
    if device_type == "cuda" and _installed("triton"):
        return "triton"
    if device_type == "cpu":
        if _installed(_NATIVE):
            return "cpp"
        _warn_without_native()
    return "reference"


@lru_cache(maxsize=1)
def _warn_without_native() -> None:
    reason = _missing("cpp", "cpu")
    warnings.warn(f"masking and the loss run in PyTorch, masking many times slower: {reason}", stacklevel=5)


@lru_cache(maxsize=8)
def _installed(module: str) -> bool:
    return find_spec(module) is not None


def _missing(impl: str, device_type: str | None) -> str | None:
    """What an implementation lacks to run on a device, or on any this machine has (None); None if nothing."""
    if impl == "cpp":
        if not _installed(_NATIVE):
            return "the native module was not built; reinstall fastmlm where there is a C++ compiler"
        if device_type not in ("cpu", None):
            return f"it runs on tensors on the CPU, and these are on {device_type}"
    if impl == "triton":
        if not _installed("triton"):
            return 'the package triton is not installed: pip install "fastmlm[gpu]"'
        on_gpu = device_type == "cuda" or (device_type is None and torch.cuda.is_available())
        if not on_gpu and not import_module("fastmlm.kernels.gpu").interpreted():
            return "it runs on tensors on a GPU (for tests, on the CPU with TRITON_INTERPRET=1 set before the import)"
    return None

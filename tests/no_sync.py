"""A mode in which everything fails that makes the host wait for a device: values read, or shapes that depend on them.

Run under it on meta tensors, code takes the branches that it takes for a GPU, without one.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAIT = {
    "_local_scalar_dense", "item", "nonzero", "nonzero_numpy", "is_nonzero", "equal", "masked_select", "argwhere",
    "unique_consecutive", "unique_dim", "_unique", "_unique2", "unique_dim_consecutive", "allclose", "_to_cpu",
    "lift_fresh",  # torch.tensor(...): on a GPU a copy from pageable memory, which no CUDA graph can capture either
}  # fmt: skip


class NoSync(TorchDispatchMode):
    """Raises where an operation waits for the device its tensors are on; keeps the names of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @property
    def operations(self) -> int:
        return len(self.names)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.name().removeprefix("aten::").split(".")[0]
        self.names.append(name)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in _WAIT:
            raise AssertionError(f"{function} waits for the device")
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            picked = [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, Tensor)]
            if any(leaf.dtype in (torch.bool, torch.uint8) for leaf in picked):
                raise AssertionError(f"{function} by a mask waits for the device")
        if name == "repeat_interleave" and kwargs.get("output_size") is None and len(args) < 3:
            raise AssertionError(f"{function} waits for the device")
        result = function(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        away = any(leaf.device.type != "cpu" for leaf in tensors)
        if away and name in ("_to_copy", "copy_", "to") and any(leaf.device.type == "cpu" for leaf in results):
            raise AssertionError(f"{function} to the host waits for the device")
        return result

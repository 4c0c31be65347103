"""The loss of a linear layer on the CPU: matrix products by PyTorch, what lies between them in native kernels."""

from typing import Any

import torch
from torch import Tensor

from fastmlm import chunked
from fastmlm.kernels.cpu import _native

# Rows of the weight at a time: those of a product in float32, which takes a third longer with all of them at once, and
# those of products in bfloat16 on their way to their sum, which then find it in cache.
_PROJECTED = 1024
_ADDED = 2048


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class _Chunks(chunked.Chunks):
    """Chunks in float32 and bfloat16; other types go the way of the reference."""

    def rows(self, count: int, weight: Tensor) -> int:
        """About as many as have no more logits than the weight has elements: fewer would take less memory, but time.

        From there on, adding up the gradients of chunks costs next to nothing (2 cores). In bfloat16 the sums take
        half as much memory again as the weight, which a single chunk spares.
        """
        vocab_size, width = weight.shape
        size = max((1 << 24) // max(vocab_size * weight.itemsize, 1), 256)
        if weight.dtype != torch.bfloat16:
            return max(size, width)
        size = max(size, width // 2)
        return max(size, count if count <= size + width // 2 else 0)

    def project(self, x: Tensor, weight: Tensor, logits: Tensor) -> None:
        if x.dtype != torch.float32 or len(weight) <= _PROJECTED:
            super().project(x, weight, logits)
            return
        for start in range(0, len(weight), _PROJECTED):
            part = slice(start, start + _PROJECTED)
            torch.mm(x, weight[part].t(), out=logits[:, part])

    def cross_entropy(
        self, logits: Tensor, bias: Tensor | None, target: Tensor, scale: Tensor, label_smoothing: float,
        losses: Tensor, grad_bias: Tensor | None, ranks: Tensor | None, with_grad: bool,
    ) -> None:  # fmt: skip
        if logits.dtype not in (torch.float32, torch.bfloat16):
            rest = (target, scale, label_smoothing, losses, grad_bias, ranks, with_grad)
            super().cross_entropy(logits, bias, *rest)
            return
        bias = None if bias is None else bias.float().contiguous()
        _native.cross_entropy(
            logits.data_ptr(),
            logits.dtype == torch.bfloat16,
            _address(bias),
            target.data_ptr(),
            scale.data_ptr(),
            losses.data_ptr(),
            _address(grad_bias),
            _address(ranks),
            *logits.shape,
            label_smoothing,
            with_grad,
            torch.get_num_threads(),
        )

    def weight_gradient(self, weight: Tensor, several: bool) -> chunked.WeightGradient:
        if several and weight.dtype == torch.bfloat16:
            return _Sums(weight)
        return super().weight_gradient(weight, several)


class _Sums(chunked.WeightGradient):
    """Sums of bfloat16 products in 24 bits, 16 of precision; two thirds of them become the result where they are."""

    def __init__(self, weight: Tensor) -> None:
        self.high = torch.empty_like(weight, memory_format=torch.contiguous_format)
        self.low = torch.zeros_like(self.high, dtype=torch.uint8)
        self.product = self.high.new_empty(min(_ADDED, len(weight)), weight.shape[1])
        self.empty = True

    def add(self, grad: Tensor, x: Tensor) -> None:
        if self.empty:
            torch.mm(grad.t(), x, out=self.high)
            self.empty = False
            return
        for start in range(0, len(self.high), _ADDED):
            part = slice(start, start + _ADDED)
            high, low = self.high[part], self.low[part]
            torch.mm(grad[:, part].t(), x, out=self.product[: len(high)])
            _native.add_to_sums(
                high.data_ptr(), low.data_ptr(), self.product.data_ptr(), high.numel(), torch.get_num_threads()
            )

    def total(self) -> Tensor:
        _native.round_sums(self.high.data_ptr(), self.low.data_ptr(), self.high.numel(), torch.get_num_threads())
        return self.high


_CHUNKS = _Chunks()


def linear_cross_entropy(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `fastmlm.chunked.linear_cross_entropy`, of tensors on the CPU."""
    return chunked.linear_cross_entropy(*arguments, chunks=_CHUNKS)

"""Triton kernels, one file per op; imported only when a call needs them."""


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors, as ``TRITON_INTERPRET=1`` asks of Triton."""
    import triton

    return bool(triton.knobs.runtime.interpret)

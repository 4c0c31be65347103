"""Which tokens each token sees: attention masks of whole rows in modes of their own, and of tokens predicted in steps.

Operations of PyTorch alone, on any device, none of which waits for it.
"""

import torch
from torch import Tensor

from fastmlm.philox import first_real

MODES = ("bidirectional", "seq2seq", "left_to_right", "right_to_left")  # a row's mode is an index into these
_BIDIRECTIONAL, _SEQ2SEQ, _RIGHT_TO_LEFT = 0, 1, 3


def attention_masks(
    modes: Tensor, attention_mask: Tensor, prefix_lengths: Tensor | None = None, *, dtype: torch.dtype = torch.bool
) -> Tensor:
    """``torch.ones(S, S).tril().bool() & (attention_mask != 0)[:, None, None, :]``, and three other modes, by row

    What token q of a row sees of its real tokens: in mode 0, bidirectional, all; 1, sequence-to-sequence, the first
    ``prefix_length`` and those up to q; 2, left to right, those up to q; 3, right to left, those from q on. Nothing
    else sees padding, and padding sees itself alone, so that no row of attention is empty, and none gives NaN.

    Args:
        modes: (B,) integers from 0 to 3, indices into `fastmlm.attention.MODES`.
        attention_mask: (B, S) integers or bool, not 0 where a token is real; with padding on either side, and holes.
        prefix_lengths: (B,) integers, how many tokens, special ones included, the source of each row has, counted from
            its first real one; of rows in mode 1 alone. None: no row is in mode 1.
        dtype: ``torch.bool``: True where q sees k, for ``scaled_dot_product_attention``. Of floating point: 0 there and
            the lowest number elsewhere, to be added to scores of that dtype; transformers' ``"eager"`` attention adds
            bools as well, as 0 and 1, and says nothing.

    Returns:
        (B, 1, S, S), [b, 0, q, k].

    Raises:
        TypeError, ValueError: naming the argument. Values are looked at on the CPU alone; elsewhere other modes are
            left to right.

    Source: Dong et al., "Unified language model pre-training" (UniLM, 2019), section 2.3.
    """
    _check_masks(modes, attention_mask, prefix_lengths)
    check_dtype("dtype", dtype)
    rows, length = attention_mask.shape
    column = torch.arange(length, dtype=torch.int32, device=attention_mask.device)
    real, mode = attention_mask != 0, modes[:, None]
    # In each mode a token sees an interval of columns.
    start = torch.where(mode == _RIGHT_TO_LEFT, column, 0)
    stop = (column + 1).expand(rows, length)
    if prefix_lengths is not None:
        source = (first_real(attention_mask) + prefix_lengths).clamp(max=length).to(torch.int32)[:, None]
        stop = torch.where(mode == _SEQ2SEQ, stop.maximum(source), stop)
    stop = torch.where((mode == _BIDIRECTIONAL) | (mode == _RIGHT_TO_LEFT), length, stop)
    stop = torch.where(real, stop, 0)
    sees = (column >= start[:, :, None]).logical_and_(column < stop[:, :, None])
    return _finish(sees.logical_and_(real[:, None, :]), dtype)


def stepwise_masks(steps: Tensor, contents: Tensor, attention_mask: Tensor, *, dtype: torch.dtype) -> Tensor:
    """``main[k] | contents[k] & (steps[k] < steps[q] + contents[q])``: tokens predicted in steps, given earlier ones

    Three kinds of tokens: the main ones, of step 0, which all see; the contents of steps 1, 2, ..., which contents of
    the same step see, and all of later ones; and the queries of a step, which nobody sees but itself.

    Args:
        steps: (B, T) integers from 0 on.
        contents: (B, T) bool, False at main tokens.
        attention_mask: (B, T), not 0 where a token is real.
        dtype: as in `attention_masks`.

    Returns:
        (B, 1, T, T), [b, 0, q, k]; padding sees itself alone.
    """
    real = attention_mask != 0
    sees = steps[:, None, :] < (steps + contents)[:, :, None]
    sees.logical_and_(contents[:, None, :]).logical_or_((steps == 0)[:, None, :])
    return _finish(sees.logical_and_(real[:, None, :]).logical_and_(real[:, :, None]), dtype)


def check_dtype(name: str, dtype: object) -> None:
    """Raise unless it is one that attention masks come in."""
    if not isinstance(dtype, torch.dtype) or not (dtype == torch.bool or dtype.is_floating_point):
        raise TypeError(f"{name}: expected torch.bool or a floating-point dtype, got {dtype!r}")


def _finish(sees: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, S, S) bool as (B, 1, S, S) of a dtype, where every token sees itself."""
    sees.diagonal(dim1=1, dim2=2).fill_(True)
    if dtype == torch.bool:
        return sees[:, None]
    # 0 times anything, or -1 times the largest: half the time that `where` takes on a CPU.
    return sees.to(dtype).sub_(1).mul_(torch.finfo(dtype).max)[:, None]


def _check_masks(modes: Tensor, attention_mask: Tensor, prefix_lengths: Tensor | None) -> None:
    if attention_mask.dim() != 2 or attention_mask.is_floating_point():
        got = f"{attention_mask.dtype} of shape {tuple(attention_mask.shape)}"
        raise ValueError(f"attention_mask: expected (B, S) integers or bool, got {got}")
    for name, values in (("modes", modes), ("prefix_lengths", prefix_lengths)):
        if values is None:
            continue
        whole = not (values.is_floating_point() or values.dtype == torch.bool)
        if not whole or values.shape != attention_mask.shape[:1] or values.device != attention_mask.device:
            raise ValueError(
                f"{name}: expected {len(attention_mask)} integers on {attention_mask.device}, one for each row of "
                f"attention_mask, got {values.dtype} of shape {tuple(values.shape)} on {values.device}"
            )
    if modes.device.type != "cpu" or not len(modes):
        return
    if not bool(((modes >= 0) & (modes < len(MODES))).all()):
        raise ValueError(f"modes: expected integers from 0 to {len(MODES) - 1}, got {modes.tolist()}")
    if prefix_lengths is None and bool((modes == _SEQ2SEQ).any()):
        raise ValueError(f"prefix_lengths: expected one for each row, since some are in mode {_SEQ2SEQ}, got None")
    if prefix_lengths is not None and bool((prefix_lengths < 0).any()):
        raise ValueError(f"prefix_lengths: expected integers from 0 on, got {prefix_lengths.tolist()}")

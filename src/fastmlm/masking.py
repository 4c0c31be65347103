"""Masking a batch: the public function, which checks its arguments once and hands them to the op."""

from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor

from fastmlm import _ops, philox, spec as _spec
from fastmlm.dispatch import check_name, kernel, resolve
from fastmlm.philox import as_int64, first_real
from fastmlm.selection_spec import NO_MOST, Selection
from fastmlm.spec import MaskingSpec

_PLAIN = (False, None, None, False, False, 0, NO_MOST)  # the op's arguments of a selection, where there is none
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class MaskedTokens(NamedTuple):
    """``input_ids`` with selected tokens replaced; ``labels``: the original id where selected, else ignore_index."""

    input_ids: Tensor
    labels: Tensor


def mask_tokens(
    input_ids: Tensor,
    spec: MaskingSpec,
    *,
    seed: int | Tensor,
    row_keys: Tensor | None = None,
    attention_mask: Tensor | None = None,
    special_tokens_mask: Tensor | None = None,
    units: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mlm_probability: float | Tensor | None = None,
    selection: Selection | None = None,
    impl: str | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> MaskedTokens:
    """``selected = torch.rand(ids.shape) < p``, 80/10/10, ``labels = torch.where(selected, ids, -100)`` in one.

    The draws are counter-based (:mod:`fastmlm.philox`): the mask of a token depends on (seed, row key, position in its
    row) and on nothing else, so padding, batching, packing, device and implementation do not change it. Never selected:
    special ids, positions with ``attention_mask == 0`` or ``special_tokens_mask == 1``, ids outside [0, vocab_size).

    Args:
        input_ids: (B, S), or (S,) for one row, or packed (N,) or (1, N) with ``cu_seqlens``; int64, int32 or narrower.
            Never changed.
        spec: what to mask and with what.
        seed: the 64-bit key, an int in [0, 2^64), or an int64 tensor of one element on the device (which a compiled
            function takes whatever its value; ints that change it takes up to 2^63).
        row_keys: (rows,) int64 that name the rows (:func:`fastmlm.philox.row_keys` names them by content); default: the
            row's index in the batch.
        attention_mask: like input_ids; a row's positions count from its first nonzero column. Default: all ones.
        special_tokens_mask: like input_ids, nonzero where a token must not be selected.
        units: like input_ids, the position (counted as above) of the first token of each token's word or span; a
            unit is selected as a whole, by the draw and the rate of its first token.
        cu_seqlens: (rows + 1,) int32 or int64, where each packed row starts, from 0 to N.
        mlm_probability: in place of the spec's: one number, one a row (rows, 1) or (rows,), or one a token, like
            input_ids.
        selection: words, spans, rates by id and how many tokens of a row (:class:`fastmlm.Selection`). None: each token
            by itself, at its rate.
        impl: ``"reference"``, ``"cpp"`` or ``"triton"``; None: the native kernel on the CPU, Triton for CUDA tensors
            where it is installed, else the reference. All give the same bits.
        out: where to write the result: two contiguous tensors like it, which later calls can use again. The first may
            be input_ids itself (int64 or int32), which is then masked in place.

    Returns:
        MaskedTokens of the shape and device of input_ids; int64 and int32 are kept, narrower ids widen to int64. With
        ``out``, its tensors.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came. Values (ids, probabilities, units,
            cu_seqlens) are checked on the CPU only, so that nothing waits for a GPU: there, ids out of range are not
            selected and probabilities are clamped to [0, 1].
        RuntimeError: the named impl cannot run here.

    Source: Devlin et al., "BERT" (2019), section 3.1; the draw law stands in :mod:`fastmlm.philox`.
    """
    ids = _check_ids(input_ids, spec)
    rows, cu_seqlens = _check_packing(cu_seqlens, input_ids)
    seed_int, seed_tensor = check_seed(seed, ids.device)
    row_keys = _check_row_keys(row_keys, rows, ids.device)
    attention_mask = _check_like("attention_mask", attention_mask, input_ids)
    special_tokens_mask = _check_like("special_tokens_mask", special_tokens_mask, input_ids)
    units = _check_like("units", units, input_ids, _INTEGERS)
    limit, limits = _check_probability(mlm_probability, spec, input_ids, rows)
    _check_selection(selection, spec, units, limits, rows)
    check_name(impl)
    if _readable(ids):
        _check_values(ids, spec, attention_mask, units, cu_seqlens, impl)
    if out is not None:
        read = (attention_mask, special_tokens_mask, units, cu_seqlens, row_keys, limits, seed_tensor)
        _check_out(out, input_ids, ids.dtype, read)
    if ids.numel() == 0:
        return MaskedTokens(*(out or (ids.reshape(input_ids.shape).clone(), ids.reshape(input_ids.shape).clone())))
    flags, random_ids = spec.tables(ids.device)
    how: tuple[object, ...] = _PLAIN
    if selection is not None:
        flags, how = _selection_arguments(selection, spec, ids.device)
    arguments = (
        ids,
        seed_int,
        seed_tensor,
        row_keys,
        attention_mask,
        special_tokens_mask,
        units,
        cu_seqlens,
        limits,
        flags,
        random_ids,
        limit,
        spec.mask_token_id,
        spec.mask_threshold,
        spec.random_threshold,
        spec.ignore_index,
        spec.exclude_original,
        *how,
        impl or "",
    )
    if out is not None:
        output, labels = out if out[0].shape == ids.shape else (out[0].view(ids.shape), out[1].view(ids.shape))
        _ops.mask_tokens_out(*arguments, output_ids=output, labels=labels)
        return MaskedTokens(*out)
    output, labels = _ops.mask_tokens(*arguments)
    if output.shape == input_ids.shape:
        return MaskedTokens(output, labels)
    return MaskedTokens(output.view(input_ids.shape), labels.view(input_ids.shape))


def advance_seed(seed: Tensor) -> None:
    """``seed += 0x9E3779B97F4A7C15``, modulo 2^64: the next step's key, where the seed lies

    A captured CUDA graph that masks with a seed on the device, and then advances it, draws anew on every replay; so
    does a compiled step. Keys come again after 2^64 steps, and runs whose first seeds are small numbers never meet.

    Args:
        seed: int64, one element, on any device; changed in place.

    Raises:
        TypeError: it is anything else.
    """
    if not isinstance(seed, Tensor) or seed.dtype != torch.int64 or seed.numel() != 1:
        raise TypeError(f"seed: expected an int64 tensor of one element, got {_describe(seed)}")
    seed.add_(as_int64(philox.GOLDEN))


def row_keys(input_ids: Tensor, attention_mask: Tensor | None = None, impl: str | None = None) -> Tensor:
    """:func:`fastmlm.philox.row_keys`, by the implementation named or the fastest: (B, S) → (B,) int64."""
    attention_mask = _check_like("attention_mask", attention_mask, input_ids)
    if resolve(impl, input_ids.device) != "cpp" or input_ids.dtype not in (torch.int64, torch.int32):
        return philox.row_keys(input_ids, attention_mask)
    weights = philox.position_weights(input_ids.shape[1], input_ids.device)
    return kernel("cpp", "masking.row_keys")(input_ids.contiguous(), attention_mask, weights)


def _readable(tensor: Tensor) -> bool:
    """Whether reading values costs no wait for a device and no graph break."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} tensor of shape {tuple(value.shape)} on {value.device}"
    return f"{type(value).__name__}"


def _check_ids(input_ids: Tensor, spec: MaskingSpec) -> Tensor:
    """input_ids as a contiguous (B, S) int64 or int32 tensor."""
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in _INTEGERS or input_ids.dim() not in (1, 2):
        raise TypeError(f"input_ids: expected a tensor of integers, (B, S) or (S,), got {_describe(input_ids)}")
    if not isinstance(spec, MaskingSpec):
        raise TypeError(f"spec: expected a MaskingSpec, got {_describe(spec)}")
    ids = input_ids if input_ids.dtype in (torch.int64, torch.int32) else input_ids.to(torch.int64)
    return (ids[None] if ids.dim() == 1 else ids).contiguous()


def _check_packing(cu_seqlens: Tensor | None, input_ids: Tensor) -> tuple[int, Tensor | None]:
    """The number of rows, and cu_seqlens as a contiguous tensor."""
    if cu_seqlens is None:
        return 1 if input_ids.dim() == 1 else input_ids.shape[0], None
    fits = isinstance(cu_seqlens, Tensor) and cu_seqlens.dtype in (torch.int32, torch.int64) and cu_seqlens.dim() == 1
    if not fits or cu_seqlens.numel() < 1 or cu_seqlens.device != input_ids.device:
        raise TypeError(
            "cu_seqlens: expected an int32 or int64 tensor of shape (rows + 1,) on the device of input_ids "
            f"({input_ids.device}), got {_describe(cu_seqlens)}"
        )
    if input_ids.dim() == 2 and input_ids.shape[0] != 1:
        raise ValueError(f"input_ids: expected (N,) or (1, N) with cu_seqlens, got {_describe(input_ids)}")
    if cu_seqlens.numel() == 1 and input_ids.numel():
        raise ValueError(f"cu_seqlens: expected where rows start, from 0 to {input_ids.numel()}, got no row at all")
    return cu_seqlens.numel() - 1, cu_seqlens.contiguous()


def check_seed(seed: int | Tensor, device: torch.device) -> tuple[int, Tensor | None]:
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != device:
            raise TypeError(f"seed: expected an int64 tensor of one element on {device}, got {_describe(seed)}")
        return 0, seed.reshape(1)
    if isinstance(seed, bool) or not isinstance(seed, (int, Integral)):
        raise TypeError(f"seed: expected an int or an int64 tensor of one element, got {_describe(seed)}")
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed: expected an int in [0, 2^64), got {seed}")
    return as_int64(int(seed)), None


def _check_row_keys(row_keys: Tensor | None, rows: int, device: torch.device) -> Tensor | None:
    """row_keys as a contiguous tensor."""
    if row_keys is None:
        return None
    if not isinstance(row_keys, Tensor) or row_keys.dtype != torch.int64 or row_keys.device != device:
        raise TypeError(f"row_keys: expected an int64 tensor on {device}, got {_describe(row_keys)}")
    if row_keys.shape != (rows,):
        raise ValueError(f"row_keys: expected one key a row, shape ({rows},), got {_describe(row_keys)}")
    return row_keys.contiguous()


def _check_like(
    name: str, value: Tensor | None, input_ids: Tensor, dtypes: tuple[torch.dtype, ...] = (*_INTEGERS, torch.bool)
) -> Tensor | None:
    """An argument with one value a token, as a contiguous (B, S) tensor."""
    if value is None:
        return None
    if not isinstance(value, Tensor) or value.dtype not in dtypes:
        kind = "integers or bool" if torch.bool in dtypes else "integers"
        raise TypeError(f"{name}: expected a tensor of {kind}, got {_describe(value)}")
    if value.shape != input_ids.shape or value.device != input_ids.device:
        expected = f"the shape {tuple(input_ids.shape)} and device {input_ids.device} of input_ids"
        raise ValueError(f"{name}: expected {expected}, got {_describe(value)}")
    return (value[None] if value.dim() == 1 else value).contiguous()


def _check_probability(
    p: float | Tensor | None, spec: MaskingSpec, input_ids: Tensor, rows: int
) -> tuple[int, Tensor | None]:
    """T(p) as one number, or as a tensor (rows, 1) or (B, S)."""
    if p is None:
        return _spec.threshold(spec.mlm_probability), None
    if not isinstance(p, Tensor):
        return _spec.threshold(_spec.probability("mlm_probability", p)), None
    if not (p.is_floating_point() or p.dtype in (*_INTEGERS, torch.bool)) or p.device != input_ids.device:
        raise TypeError(f"mlm_probability: expected real numbers on {input_ids.device}, got {_describe(p)}")
    if p.shape == input_ids.shape:
        shape = (1, p.shape[0]) if p.dim() == 1 else tuple(p.shape)
    elif p.shape in ((rows,), (rows, 1)):
        shape = (rows, 1)
    elif p.dim() == 0:
        shape = (1, 1)
    else:
        raise ValueError(
            f"mlm_probability: expected one number, one a row ({rows},) or one a token {tuple(input_ids.shape)}, "
            f"got {_describe(p)}"
        )
    limits = _limits(p).reshape(shape)
    return 0, (limits.expand(rows, 1) if p.dim() == 0 else limits).contiguous()


def _limits(p: Tensor) -> Tensor:
    """T(p) of every element, checked where that costs no wait."""
    readable = _readable(p) and p.numel() > 0
    limits = None
    # In one pass, not a dozen operations, which took as long as masking 64 rows.
    if readable and p.dtype in (torch.float32, torch.float64) and resolve(None, p.device) == "cpp":
        limits = kernel("cpp", "masking.thresholds")(p.contiguous())
    if limits is None and readable and not bool(((p >= 0) & (p <= 1)).all()):
        raise ValueError(
            f"mlm_probability: expected numbers between 0 and 1, got values from {p.min().item()} to {p.max().item()}"
        )
    return _spec.thresholds(p) if limits is None else limits


def _check_selection(
    selection: Selection | None, spec: MaskingSpec, units: Tensor | None, limits: Tensor | None, rows: int
) -> None:
    """That a selection fits the spec, and the other arguments beside it."""
    if selection is None:
        return
    if not isinstance(selection, Selection):
        raise TypeError(f"selection: expected a Selection, got {_describe(selection)}")
    selection.check(spec)
    if selection.word_marks is not None and units is not None:
        raise ValueError("units: expected None with a selection of word_marks, which make units, got a tensor")
    if selection.rates_by_id is not None and limits is not None:
        raise ValueError("mlm_probability: expected no tensor with a selection of rates_by_id, which take its place")
    if selection.counts and limits is not None and limits.shape != (rows, 1):
        raise ValueError(
            "mlm_probability: expected one number or one a row with a selection of exact, at_least or at_most, "
            "got one a token"
        )


def _selection_arguments(
    selection: Selection, spec: MaskingSpec, device: torch.device
) -> tuple[Tensor, tuple[object, ...]]:
    """The table by id, and the op's arguments from ``words`` to ``at_most``."""
    _, flags, span_limits, id_thresholds = selection.tables(spec, device)
    words, most = selection.word_marks is not None, NO_MOST if selection.at_most is None else selection.at_most
    counts = (selection.exact, selection.at_least, most)
    return flags, (words, span_limits, id_thresholds, selection.replace_per_unit, *counts)


def _check_out(
    out: tuple[Tensor, Tensor], input_ids: Tensor, dtype: torch.dtype, read: tuple[Tensor | None, ...]
) -> None:
    """Two tensors like the result, apart in memory from each other, what is read and, unless the same, input_ids."""
    tensors = isinstance(out, tuple) and len(out) == 2 and all(isinstance(tensor, Tensor) for tensor in out)
    alike = tensors and all(
        tensor.dtype is dtype
        and tensor.shape == input_ids.shape
        and tensor.device == input_ids.device
        and tensor.is_contiguous()
        for tensor in out
    )
    if not alike:
        got = ", ".join(map(_describe, out)) if tensors else _describe(out)
        raise (ValueError if tensors else TypeError)(
            f"out: expected a tuple of two contiguous {dtype} tensors of shape {tuple(input_ids.shape)} on "
            f"{input_ids.device}, got {got}"
        )
    if torch.compiler.is_compiling() or input_ids.is_meta:
        return  # there are no addresses
    output, labels, ids = _span(out[0]), _span(out[1]), _span(input_ids)
    others = [_span(tensor) for tensor in read if tensor is not None]
    shared = _meet(output, labels) or _meet(labels, ids) or (output != ids and _meet(output, ids))
    if shared or any(_meet(mine, other) for mine in (output, labels) for other in others):
        raise ValueError("out: expected tensors that share no memory (the first may be input_ids), got some that do")


def _span(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor lies in memory; one with gaps may lie anywhere in its storage."""
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _meet(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _check_values(
    ids: Tensor,
    spec: MaskingSpec,
    attention_mask: Tensor | None,
    units: Tensor | None,
    cu_seqlens: Tensor | None,
    impl: str | None,
) -> None:
    if ids.numel() and resolve(impl, ids.device) != "cpp":  # the native kernel checks ids as it reads them
        lowest, highest = ids.aminmax()
        _spec.check_ids(int(lowest), int(highest), spec.vocab_size)
    if cu_seqlens is not None:
        ends = (int(cu_seqlens[0]), int(cu_seqlens[-1]))
        if ends != (0, ids.shape[1]) or bool((cu_seqlens[1:] < cu_seqlens[:-1]).any()):
            raise ValueError(f"cu_seqlens: expected to rise from 0 to {ids.shape[1]}, got {_preview(cu_seqlens)}")
    if units is not None and units.numel():
        _check_units(units, attention_mask, cu_seqlens, impl)


def _check_units(units: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None, impl: str | None) -> None:
    """No unit of a real token starts after the token itself, or before the row."""
    native = cu_seqlens is None and units.dtype == torch.int64 and resolve(impl, units.device) == "cpp"
    if native and kernel("cpp", "masking.units_fit")(units, attention_mask):
        return  # in a tenth of the time of what follows, which also finds what is wrong
    real = torch.ones_like(units, dtype=torch.bool) if attention_mask is None else attention_mask != 0
    columns = torch.arange(units.shape[1], device=units.device)
    if cu_seqlens is None:
        position = columns - first_real(real)[:, None]
    else:
        row = torch.searchsorted(cu_seqlens, columns, right=True) - 1
        starts = cu_seqlens.new_full((cu_seqlens.numel(),), units.shape[1], dtype=torch.int64)
        position = columns - starts.scatter_reduce(0, row, torch.where(real[0], columns, units.shape[1]), "amin")[row]
    wrong = real & ((units < 0) | (units > position))
    if bool(wrong.any()):
        raise ValueError(
            "units: expected for each token the position of its unit's first token, counted from the row's first real "
            f"token, from 0 to the token's own position, got {_preview(units[wrong])}"
        )


def _preview(values: Tensor) -> str:
    flat = values.flatten().tolist()
    return f"{flat[:12]}{' ...' if len(flat) > 12 else ''}"

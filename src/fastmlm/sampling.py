"""One sample of each row's softmax in one pass, and the input of a model that looks for the tokens so replaced."""

from typing import NamedTuple

import torch
from torch import Tensor

from fastmlm import _ops
from fastmlm.dispatch import check_name
from fastmlm.masking import check_seed
from fastmlm.philox import fold_tensor

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_TEMPERATURES = (2.0**-64, 2.0**64)  # float32 has the inverse of all between


def sample_tokens(
    logits: Tensor,
    *,
    seed: int | Tensor,
    row_keys: Tensor | None = None,
    positions: Tensor | None = None,
    temperature: float = 1.0,
    impl: str | None = None,
) -> Tensor:
    """``torch.multinomial((logits / temperature).softmax(-1), 1).squeeze(-1)``, by counter and not by a generator

    A row's sample depends on nothing but the seed, the row's key and position, and its logits: not on other rows, on
    their order, or on the device, where rounding does not decide between two ids whose scores are nearly equal.

    By the draw law (:mod:`fastmlm.philox`), in stream 4, the id v of a row has the draw ``d = draw_4(v)`` of the key
    ``seed`` and the row key ``fold(row_key, position)``, or ``row_key`` itself without positions. It scores
    ``logits[v] / temperature - log(E)`` with ``E = -log(1 - x)`` and ``x = (d + 1/2) / 2^32``, of which the first
    maximum is the sample: Gumbel noise in that E is exponential. What wins is noise from small E, which are small x,
    that float32 has with all its digits; the noise of rare ids is not rounded off, as it would be from x near 1. The
    score is computed in float32. Draws have 32 bits, so that the probability of an id is right to 2^-32.

    Args:
        logits: (N, V), float32, float16 or bfloat16; float64 is rounded to float32. -inf is never sampled. No gradient.
        seed: the key, an int in [0, 2^64), or an int64 tensor of one element on the device, which a CUDA graph's
            replays read anew.
        row_keys: (N,) int64, what each row is called, such as `fastmlm.masking.row_keys` of its text; None: its index.
        positions: (N,) int64, which of several rows of that key it is, such as the token's place in the text.
        temperature: from 2^-64 to 2^64.
        impl: ``"reference"``, ``"cpp"`` or ``"triton"``; None: as in :func:`fastmlm.mask_tokens`.

    Returns:
        (N,) int64, in [0, V); -1 for rows that have no softmax: with a NaN or inf, or nothing but -inf, in
        ``logits / temperature``.

    Raises:
        TypeError, ValueError: naming the argument.
        RuntimeError: the named impl cannot run here.

    Source: Gumbel, "Statistical theory of extreme values" (1954); Maddison et al., "A* sampling" (2014).
    """
    if not isinstance(logits, Tensor) or logits.dtype not in _DTYPES:
        raise TypeError(f"logits: expected a tensor of floating numbers, got {getattr(logits, 'dtype', type(logits))}")
    if logits.dim() != 2:
        raise ValueError(f"logits: expected (N, V), got {tuple(logits.shape)}")
    if not _TEMPERATURES[0] <= temperature <= _TEMPERATURES[1]:
        raise ValueError(f"temperature: expected a number from 2^-64 to 2^64, got {temperature}")
    check_name(impl)
    seed_int, seed_tensor = check_seed(seed, logits.device)
    keys = torch.arange(len(logits), device=logits.device)
    if row_keys is not None:
        keys = _check_named("row_keys", row_keys, logits)
    if positions is not None:
        keys = fold_tensor(keys, _check_named("positions", positions, logits))
    if not logits.numel():
        return torch.full_like(keys, -1)
    if logits.dtype == torch.float64:
        logits = logits.float()
    return _ops.sample_tokens(logits.detach(), seed_int, seed_tensor, keys.contiguous(), float(temperature), impl or "")


class ReplacedTokens(NamedTuple):
    """``input_ids``: of the discriminator; ``labels``: 1 where a token was replaced, 0 elsewhere, -100 at padding."""

    input_ids: Tensor
    labels: Tensor


def replace_tokens(
    input_ids: Tensor,
    labels: Tensor,
    tokens: Tensor,
    *,
    rows: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> ReplacedTokens:
    """``ids[labels != -100] = tokens``, and whether that changed each of the original ids

    Replaced-token detection (ELECTRA, Clark et al. 2020): what a generator fills in for the selected tokens, and where
    a discriminator is to say so. A token that comes out as it was is not a replaced one.

    Args:
        input_ids: (B, S), before or after masking.
        labels: (B, S), the original ids of the selected tokens, -100 elsewhere.
        tokens: (K,), what is put in for them, in order; where below 0, the original.
        rows: (K,) int64, their flat indices, where these are known: else they are looked for.
        attention_mask: (B, S), 0 at padding; None: there is none.

    Returns:
        ids and labels, (B, S), int64.

    Raises:
        ValueError: shapes do not fit.
    """
    if labels.shape != input_ids.shape:
        raise ValueError(f"labels: expected {tuple(input_ids.shape)}, like input_ids, got {tuple(labels.shape)}")
    selected = labels.reshape(-1).to(torch.int64)
    if rows is None:
        rows = (selected != -100).nonzero().squeeze(1)
    if tokens.shape != rows.shape:
        raise ValueError(f"tokens: expected one for each of {len(rows)} selected positions, got {tuple(tokens.shape)}")
    original = selected.index_select(0, rows)
    tokens = torch.where(tokens < 0, original, tokens)
    ids = input_ids.reshape(-1).to(torch.int64).index_copy(0, rows, tokens)
    replaced = torch.zeros_like(ids).index_copy(0, rows, (tokens != original).to(torch.int64))
    if attention_mask is not None:
        replaced = replaced.masked_fill(attention_mask.reshape(-1) == 0, -100)
    return ReplacedTokens(ids.view(input_ids.shape), replaced.view(input_ids.shape))


def _check_named(name: str, value: Tensor, logits: Tensor) -> Tensor:
    if not isinstance(value, Tensor) or value.dtype != torch.int64 or value.device != logits.device:
        got = f"{value.dtype} on {value.device}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name}: expected an int64 tensor on {logits.device}, got {got}")
    if value.shape != logits.shape[:1]:
        raise ValueError(f"{name}: expected one a row, ({len(logits)},), got {tuple(value.shape)}")
    return value

"""Masking on the device: what a collator ships instead of masks, and how a batch is masked from it where it lies.

A batch of int64 ids, attention mask and labels takes 24 bytes a token on its way to a GPU. All of it follows from the
ids, the rows' lengths and two keys a row: 4 bytes a token, or 1 where there are no more than 256 ids. The masks are
those that the collator itself would have made, bit for bit, since they depend on keys and positions alone.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmlm.masking import mask_tokens
from fastmlm.packing import check_undivided, flatten
from fastmlm.philox import as_int64, first_real, real_tokens
from fastmlm.planning import Plan
from fastmlm.selection import SHIPPED_KEYS, Overflow, row_capacity, select_rows
from fastmlm.selection_spec import Selection
from fastmlm.spec import MaskingSpec, check_ids
from fastmlm.strategies.base import Strategies

# Columns of a shipped batch, of names that no data set has. The keys come one row each, (B, 2): the key of the batch,
# and that of the row. So what divides a batch among processes divides them with it.
_KEYS, _LENGTHS, _UNITS, _RATES = SHIPPED_KEYS, "fastmlm_lengths", "fastmlm_units", "fastmlm_rates"
_SPECIAL, _BOUNDS = "special_tokens_mask", "cu_seq_lens_q"
_NARROW = ("token_type_ids", _SPECIAL)  # small numbers, shipped as bytes
# Σ size² / Σ size of words is 1.2 for English under BERT's tokenizer; rare words and other scripts have larger ones.
_WORD_SIZE = 4.0


class Collator(Protocol):
    """What is asked of a `fastmlm.DataCollatorForMaskedLM`."""

    tokenizer: Any
    mlm_probability: Any
    mask_on_device: bool
    packing: bool
    pad_to_multiple_of: int | None
    position_ids_start: int
    impl: str | None

    @property
    def spec(self) -> MaskingSpec: ...

    @property
    def strategies(self) -> Strategies: ...

    def selection(self, by_vocabulary: bool) -> Selection | None: ...


# ---- On the host ----


def ship(
    columns: dict[str, Any],
    examples: Sequence[Any],
    attention_mask: Tensor,
    plan: Plan,
    collator: Collator,
) -> dict[str, Any]:
    """A padded batch in the columns that go to the device; packed, if the collator packs.

    Args:
        columns: of `fastmlm.padding.pad_rows`.
        examples: the rows they were made of.
        attention_mask: (B, S), whether among the columns or not.
        plan: how to mask it.
        collator: whose masks these will be.

    Returns:
        The columns, ids narrowed, with the keys; lengths in place of the attention mask where it is made of them.

    Raises:
        ValueError: an id is out of range, a column has a name that is kept for what is shipped, or a row has a 0 in its
            attention mask that packing would drop.
    """
    ids, vocab_size = columns["input_ids"], collator.spec.vocab_size
    if ids.numel():
        lowest, highest = ids.aminmax()
        check_ids(int(lowest), int(highest), vocab_size)
    if taken := {_KEYS, _LENGTHS, _UNITS, _RATES} & columns.keys():
        raise ValueError(f"features: expected other names of columns with mask_on_device=True, got {sorted(taken)}")
    batch = columns | plan.added
    if plan.special_tokens_mask is not None:
        batch[_SPECIAL] = plan.special_tokens_mask
    batch["input_ids"] = ids.to(torch.uint8 if vocab_size <= 256 else torch.int32)
    batch |= {name: _as_bytes(batch[name]) for name in _NARROW if name in batch}
    if plan.units is not None:
        batch[_UNITS] = plan.units.to(torch.int32)
    if plan.rates is not None:
        batch[_RATES] = torch.as_tensor(plan.rates, dtype=torch.float64, device="cpu").expand(
            plan.rates.shape if isinstance(plan.rates, Tensor) else len(ids)
        )
    keys = torch.stack([torch.full_like(plan.row_keys, as_int64(plan.key)), plan.row_keys], 1)
    if collator.packing:
        return _pack(batch, examples, attention_mask, keys, collator)
    batch[_KEYS] = keys
    lengths = (attention_mask != 0).sum(1)
    left = collator.tokenizer.padding_side == "left"
    implied = ("attention_mask" in columns) == _models_take_masks(collator)
    whole = attention_mask.dtype == torch.int64
    if implied and whole and torch.equal(attention_mask, real_tokens(lengths, ids.shape[1], left)):
        batch.pop("attention_mask", None)
        batch[_LENGTHS] = lengths.to(torch.int32)
    else:
        batch["attention_mask"] = _as_bytes(attention_mask)
    return batch


def _pack(
    batch: dict[str, Any], examples: Sequence[Any], attention_mask: Tensor, keys: Tensor, collator: Collator
) -> dict[str, Any]:
    lengths = (attention_mask != 0).sum(1)
    last = attention_mask.shape[1] - first_real(attention_mask.flip(1))
    holes = (lengths > 0) & (lengths != last - first_real(attention_mask))
    if bool(holes.any()):
        raise ValueError(
            f"attention_mask, row {int(holes.nonzero()[0])}: expected no 0 between the first and the last 1 of a row, "
            "since masks on the device are made after packing, which drops it"
        )
    packed = flatten(
        batch,
        examples,
        attention_mask,
        collator.tokenizer,
        pad_to_multiple_of=collator.pad_to_multiple_of,
        position_ids_start=collator.position_ids_start,
    )
    if "position_ids" not in batch:
        del packed["position_ids"]  # which follow from the bounds
    del packed["cu_seq_lens_k"]
    return packed | {_KEYS: keys[lengths > 0]}


def _models_take_masks(collator: Collator) -> bool:
    return "attention_mask" in collator.tokenizer.model_input_names


def _as_bytes(column: Tensor) -> Tensor:
    """int64 as uint8, where they fit; `_as_they_were` is the way back."""
    if column.dtype != torch.int64 or not column.numel():
        return column
    low, high = column.aminmax()
    return column.to(torch.uint8) if int(low) >= 0 and int(high) < 256 else column


def _as_they_were(column: Tensor) -> Tensor:
    return column.to(torch.int64) if column.dtype == torch.uint8 else column


# ---- On the device ----


def is_shipped(batch: Any) -> bool:
    """Whether a batch came from a collator with ``mask_on_device=True`` and is not masked yet."""
    return isinstance(batch, Mapping) and _KEYS in batch


def mask_batch(batch: Mapping[str, Any], collator: Collator) -> Any:
    """What the collator gives with ``mask_on_device=False``, made of what it gives with True, on that one's device.

    Nothing waits for the device. The batch given is left as it is.
    """
    columns: dict[str, Any] = dict(batch)
    keys = columns.pop(_KEYS)
    units, special, rates = columns.pop(_UNITS, None), columns.pop(_SPECIAL, None), columns.pop(_RATES, None)
    ids = columns["input_ids"].to(torch.int64)  # from a narrower type, so that these are its own
    row_keys, bounds = keys[:, 1], columns[_BOUNDS] if collator.packing else None
    if bounds is not None:
        row_keys, attention_mask = _packed_rows(bounds, row_keys, ids)
        if rates is not None and rates.dim() == 1:
            rates = F.pad(rates, (0, len(bounds) - 1 - len(rates)))
        columns["cu_seq_lens_k"] = bounds.clone()
        if "position_ids" not in columns:
            columns["position_ids"] = _positions(bounds.to(torch.int64), ids) + collator.position_ids_start
    elif _LENGTHS in columns:
        left = collator.tokenizer.padding_side == "left"
        attention_mask = real_tokens(columns.pop(_LENGTHS).to(torch.int64), ids.shape[1], left)
        if _models_take_masks(collator):
            columns["attention_mask"] = attention_mask
    else:
        attention_mask = columns["attention_mask"] = _as_they_were(columns["attention_mask"])
    if "token_type_ids" in columns:
        columns["token_type_ids"] = _as_they_were(columns["token_type_ids"])
    columns["input_ids"], columns["labels"] = mask_tokens(
        ids,
        collator.spec,
        seed=keys[:1, 0],
        row_keys=row_keys,
        attention_mask=attention_mask,
        special_tokens_mask=special,
        units=units,
        cu_seqlens=bounds,
        mlm_probability=rates,
        selection=collator.selection(units is None),
        impl=collator.impl,
        out=(ids, torch.empty_like(ids)),
    )
    columns = collator.strategies.arrange(columns, attention_mask, collator.tokenizer, None)
    return type(batch)(columns)  # type: ignore[call-arg]


def _packed_rows(bounds: Tensor, row_keys: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """The keys of all rows of a packed batch, and what keeps the last one from being masked if that is padding."""
    if len(row_keys) == len(bounds) - 1:
        return row_keys, None
    columns = torch.arange(ids.shape[1], device=ids.device)
    return F.pad(row_keys, (0, 1)), (columns < bounds[-2])[None]


def _positions(bounds: Tensor, ids: Tensor) -> Tensor:
    """The position of each token in its row, (1, N), from where rows start."""
    columns = torch.arange(ids.shape[1], device=ids.device)
    row = torch.searchsorted(bounds, columns, right=True) - 1
    return (columns - bounds.index_select(0, row))[None]


def capacity_of(collator: Collator, tokens: int) -> int:
    """`fastmlm.row_capacity` by the law of a collator's masks; of a schedule's, at its highest probability."""
    rate, strategies = collator.mlm_probability, collator.strategies
    if callable(rate):
        rate = getattr(rate, "highest", None)
    rate = strategies.highest(rate)
    if rate is None:
        raise ValueError(
            "row_capacity (rows of mask_batches): expected how many, since the highest mask probability is not known, "
            f"got none with mlm_probability={collator.mlm_probability!r} and strategies {strategies.parts!r}"
        )
    return row_capacity(tokens, rate, unit_size=strategies.unit_size(_WORD_SIZE))


def with_rows(batch: Any, collator: Collator, capacity: int | None, overflow: Overflow) -> Any:
    """A masked batch with ``rows`` and ``count`` beside its labels, by the law of the masks if no capacity is given."""
    labels = batch["labels"]
    selected = select_rows(labels, capacity_of(collator, labels.numel()) if capacity is None else capacity)
    overflow.add(selected)
    return type(batch)({**batch, **selected._asdict()})


def collator_of(loader: Any) -> Any:
    """The collator of a loader if it ships its batches, out of what the Trainer puts around it; else None."""
    collator = getattr(loader, "collate_fn", None)
    collator = getattr(collator, "data_collator", collator)
    return collator if getattr(collator, "mask_on_device", False) else None


def check_masks_on_device(name: str, collator: Any) -> None:
    """Raise unless a collator ships its batches."""
    if not getattr(collator, "mask_on_device", False):
        raise ValueError(
            f"{name}: expected a fastmlm.DataCollatorForMaskedLM with mask_on_device=True, whose batches come without "
            f"masks, got {type(collator).__name__}"
        )


class MaskedBatches:
    """What `mask_batches` makes; the length is that of the batches."""

    def __init__(
        self, batches: Iterable[Any], collator: Collator, device: torch.device | None, rows: bool | int
    ) -> None:
        self._batches, self._collator, self._device, self._rows = batches, collator, device, rows

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        overflow = Overflow()
        capacity = None if self._rows is True else int(self._rows)
        try:
            for batch in self._batches:
                if not is_shipped(batch):
                    raise ValueError(
                        "batches: expected batches of a collator with mask_on_device=True, got one with "
                        f"{', '.join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__}"
                    )
                masked = mask_batch(self._move(batch), self._collator)
                yield with_rows(masked, self._collator, capacity, overflow) if self._rows is not False else masked
        finally:  # also where the loop was left before
            overflow.warn()

    def _move(self, batch: Any) -> Any:
        if self._device is None:
            return batch
        moved = {
            name: value.to(self._device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in batch.items()
        }
        return type(batch)(moved)


def mask_batches(
    batches: Iterable[Any],
    *,
    collator: Any = None,
    device: torch.device | str | None = None,
    rows: bool | int = False,
) -> MaskedBatches:
    """``(mask(batch.to(device)) for batch in batches)``, on each pass over the batches

    For loops of one's own and Accelerate's, of batches that a `fastmlm.DataCollatorForMaskedLM` with
    ``mask_on_device=True`` has made; the result is what it gives without, masks bit for bit the same::

        loader = accelerator.prepare(DataLoader(rows, collate_fn=collator))
        for batch in mask_batches(loader):
            accelerator.backward(model(**batch).loss)

    Args:
        batches: a DataLoader or any other iterable of batches.
        collator: which made them; None: the ``collate_fn`` of the batches.
        device: where to mask and to move batches to, without waiting where they lie in pinned memory; None: where the
            batches are.
        rows: add ``rows`` and ``count`` of `fastmlm.select_rows`, for a sparse model or `fastmlm.MaskedLMHead` (others
            do not look at them): True for as many as `fastmlm.row_capacity` says (of words: units of 4 tokens), or how
            many. Selected positions for which there were no rows are told at the end of a pass, by a warning.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    collator = getattr(batches, "collate_fn", None) if collator is None else collator
    check_masks_on_device("collator", collator)
    check_undivided(batches, collator.packing)
    if not isinstance(rows, (bool, int)):
        raise TypeError(f"rows: expected True, False or how many, got {rows!r}")
    if rows is not False and rows < 1:
        raise ValueError(f"rows: expected at least 1, got {rows}")
    return MaskedBatches(batches, collator, None if device is None else torch.device(device), rows)

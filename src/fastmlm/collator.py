"""The data collator: Hugging Face's arguments and calling convention, fastmlm's masks."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from inspect import signature
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import BatchEncoding, TrainerCallback

from fastmlm import on_device, packing as _packing
from fastmlm.collator_check import check_arguments, check_arrangement, warn_of_many_specials
from fastmlm.dispatch import resolve
from fastmlm.epochs import TellEpoch
from fastmlm.hf_random import HuggingFaceRandom
from fastmlm.masking import mask_tokens
from fastmlm.padding import pad_rows
from fastmlm.philox import real_tokens
from fastmlm.planning import Planner
from fastmlm.schedules import Schedule
from fastmlm.seeding import Keys
from fastmlm.spec import integer, probability
from fastmlm.strategies import Strategy

_CPU = torch.device("cpu")
_SPECIAL = "special_tokens_mask"


class _Running(NamedTuple):
    """The batch being collated, for overrides of our methods that do not know of all its columns."""

    attention_mask: Any
    columns: Mapping[str, Any]  # which the masks depend on
    added: dict[str, Tensor]  # by strategies


_running: ContextVar[_Running | None] = ContextVar("fastmlm_batch", default=None)


@dataclass
class DataCollatorForMaskedLM(Planner, HuggingFaceRandom):
    """``transformers.DataCollatorForLanguageModeling(tokenizer, ...)``: same arguments, order and outputs, 15/80/10/10.

    Takes rows as dicts (lists, arrays or tensors of any integer type) or bare ids, pads them, and adds ``labels``:
    the original id where a token was selected, -100 elsewhere. Differences to Hugging Face's, each on purpose: inputs
    are never changed; rows given as bare ids get an ``attention_mask``; special tokens are recognised by id as well as
    by a ``special_tokens_mask`` column, and ``attention_mask == 0`` is never selected; whole words are read off the
    vocabulary where no ``offset_mapping`` or ``word_ids`` column is there, and keep the 80/10/10 split; columns of
    strings pass through; tokens are drawn by counter (:mod:`fastmlm.philox`), not by a generator.

    Args:
        tokenizer: a transformers tokenizer.
        mlm: False: labels are the inputs, padding ignored.
        whole_word_mask: select all tokens of a word or none; short for ``strategy=WholeWords()``.
        mlm_probability: share of the tokens to select; or a schedule: `fastmlm.schedules.Linear`, ``Cosine``,
            ``Stages`` or any function of the optimizer step, from 0 on, which is told as the epoch is (`set_step`).
        mask_replace_prob: share of the selected tokens that become the mask token.
        random_replace_prob: share that become a random token; the rest stay.
        pad_to_multiple_of: round padded lengths up to a multiple of this.
        return_tensors: ``"pt"`` or ``"np"``.
        seed: with an epoch told (:meth:`set_epoch`, :meth:`callback`), masks are a function of (seed, epoch, row
            content) alone, whatever the batches, workers, ranks and resumes are, none of which need to know of another;
            equal rows of a data set then get equal masks, and of n different ones two do with a probability of about
            n² · 2⁻⁶⁵. With a seed and no epoch, which is told once by a warning, each batch has a key of its own from
            the seed and a count (in a loader's worker also from the seed PyTorch gave it); with None, from torch's
            global generator. Rows then differ by their index in the batch (their content adds
            nothing to a key that no other batch has).
        rng: ``"philox"``, or ``"torch"``: Hugging Face's own random stream and special-token rule, bit for bit.
        random_words: ids that random tokens are drawn from: ``"all"`` (the BERT paper), ``"non_special"``, or a list.
        exclude_original: never draw the original as its own random replacement.
        special_token_ids: ids never selected; None: the tokenizer's ``all_special_ids``.
        impl: as in :func:`fastmlm.mask_tokens`.
        packing: all rows in one row without padding, in the form of ``transformers.DataCollatorWithFlattening`` with
            ``return_flash_attn_kwargs=True``, each with the masks it has in the padded form. Tokens with
            ``attention_mask == 0``, and rows that have no others, are dropped; positions count those that stay. With
            ``pad_to_multiple_of`` one more row, of padding, fills the end up. Load the model with
            ``attn_implementation="flash_attention_2"`` (or 3), which keeps rows apart; with ``"sdpa"`` or ``"eager"``
            tokens see the other rows. ESM's ``token_dropout`` takes all rows for one: turn it off.
        position_ids_start: the first position of each packed row. RoBERTa and its like (XLM-R, CamemBERT, MPNet, ESM
            with absolute positions) number from ``padding_idx + 1``: give them 2.
        static: the masks of a row are the same in every epoch (BERT); needs a seed, and no epoch to be told.
        static_copies: after so many epochs, masks come again (RoBERTa's data, duplicated ten times); needs a seed.
        row_key_column: a column of integers or strings, one a row, that tells equal rows apart: then each has masks of
            its own. Models do not get to see it. (`MaskedLMTrainer` keeps it from being removed before; for other
            Trainers, ``remove_unused_columns=False``.)
        strategy: what is selected together, how many, at which rates: one of `fastmlm.strategies` or several, each of
            which says something else. None: each token by itself.
        mask_on_device: leave the masks to the device. Batches then hold ids in 4 bytes or 1, the rows' lengths and
            keys, and are masked by `fastmlm.mask_batches` or `fastmlm.trainer.MaskOnDevice`, which give what comes
            without it, bit for bit. (Attention masks of packed rows may then have no zero between first and last one.)

    Shapes: ``input_ids``, ``attention_mask`` and ``labels`` (B, S), int64; a BatchEncoding for dicts, a dict for ids.
    Packed: ``input_ids``, ``labels`` and ``position_ids`` (1, N), int64; ``cu_seq_lens_q`` and ``cu_seq_lens_k``
    (rows + 1,), int32; ``max_length_q`` and ``max_length_k``, ints; no ``attention_mask``; other columns (1, N, ...)
    where they hold one value a token. With ``mlm=False`` the first label of each row is -100, since models shift.

    Raises:
        TypeError, ValueError: naming the argument, or the column and row, what was expected and what came.

    Source: Devlin et al., "BERT" (2019), section 3.1; Liu et al., "RoBERTa" (2019), section 4.1 (dynamic masking).
    """

    mlm_probability: float | Schedule = 0.15
    rng: Literal["philox", "torch"] = field(default="philox", kw_only=True)
    random_words: str | Sequence[int] = field(default="all", kw_only=True)
    exclude_original: bool = field(default=False, kw_only=True)
    special_token_ids: Sequence[int] | None = field(default=None, kw_only=True)
    impl: str | None = field(default=None, kw_only=True)
    packing: bool = field(default=False, kw_only=True)
    position_ids_start: int = field(default=0, kw_only=True)
    static: bool = field(default=False, kw_only=True)
    static_copies: int | None = field(default=None, kw_only=True)
    row_key_column: str | None = field(default=None, kw_only=True)
    mask_on_device: bool = field(default=False, kw_only=True)
    strategy: Strategy | Sequence[Strategy] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_arguments(self)
        self._start_planning()
        if self.rng == "torch" or not self.mlm:
            super().__post_init__()
            return
        self.generator: Any = None
        self.selection()  # whose strategies may contradict one another
        check_arrangement(self)
        if self._has_default_random_words and self.spec.random_replace_prob > 0:
            warn_of_many_specials(self.spec)

    @property
    def _has_default_random_words(self) -> bool:
        return isinstance(self.random_words, str) and self.random_words == "all"

    @property
    def _reads_words(self) -> bool:
        return self.whole_word_mask or self.strategies.whole_words

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that are read where rows have them, beside those that models take."""
        named = () if self.row_key_column is None else (self.row_key_column,)
        of_words = ("offset_mapping", "word_ids") if self._reads_words else ()
        return (*named, *self.strategies.columns, _SPECIAL, *of_words)

    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch, before the loader is iterated; reaches workers, also persistent ones."""
        self._keys.set_epoch(integer("epoch", epoch, 0, 1 << 64))

    def set_step(self, step: int, batches_per_step: int = 1) -> None:
        """Tell a schedule, before the loader is iterated, the optimizer step of the pass's first batch.

        Batches are numbered from there, also in workers, ``batches_per_step`` of them a step (those that gradients are
        accumulated over). Their numbers are right for a data set with a length; one without, shared among workers that
        run out of rows at different times, has the last batches of a pass in another order.
        """
        self._steps.tell(integer("step", step, 0, 1 << 62), integer("batches_per_step", batches_per_step, 1, 1 << 62))

    def for_evaluation(self, mlm_probability: float | None = None) -> "DataCollatorForMaskedLM":
        """A copy for evaluation: a row's masks are the same each time, in every run and on any number of processes.

        They are drawn with the seed, or 0 where there is none, and are those of no epoch of training.

        Args:
            mlm_probability: None: as in training, or 0.15 where that is a schedule.
        """
        other = copy.copy(self)
        other._keys = Keys(for_evaluation=True)
        if mlm_probability is not None or callable(self.mlm_probability):
            other.mlm_probability = 0.15 if mlm_probability is None else probability("mlm_probability", mlm_probability)
        return other

    def callback(self) -> TrainerCallback:
        """A callback for ``Trainer(callbacks=[...])`` that tells this collator the epochs, on resume too."""
        return TellEpoch(self)

    # Hugging Face's members, which user code calls and overrides.

    def torch_call(self, examples: Sequence[Any]) -> Any:
        """Collate to tensors."""
        if self.mask_on_device:
            return self._ship(examples)
        return self._collate(examples, self.torch_mask_tokens, torch.where, _for_models)

    def numpy_call(self, examples: Sequence[Any]) -> Any:
        """Collate to arrays."""
        check_arrangement(self, "np")
        return self._collate(examples, self.numpy_mask_tokens, np.where, lambda column: column.numpy())

    def torch_mask_tokens(
        self,
        inputs: Tensor,
        special_tokens_mask: Tensor | None = None,
        offset_mapping: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        word_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Mask a padded batch, (B, S) each: the new input_ids and the labels. ``inputs`` are not changed."""
        return self._mask(inputs, special_tokens_mask, offset_mapping, attention_mask, word_ids)

    def _mask(
        self,
        inputs: Tensor,
        special_tokens_mask: Tensor | None,
        offset_mapping: Tensor | None,
        attention_mask: Tensor | None,
        word_ids: Tensor | None,
        batch: _Running | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Mask in place where the batch is given."""
        if self.rng == "torch":
            return self._mask_by_generator(inputs, special_tokens_mask, offset_mapping)
        running = batch or _running.get()
        if running is None or running.attention_mask.shape != inputs.shape:
            running = _Running(attention_mask, {}, {})
        attention_mask = running.attention_mask if attention_mask is None else attention_mask
        plan = self.plan(inputs, special_tokens_mask, offset_mapping, attention_mask, word_ids, running.columns)
        running.added.update(plan.added)
        return mask_tokens(
            inputs,
            plan.spec,
            seed=plan.key,
            row_keys=plan.row_keys,
            attention_mask=attention_mask,
            special_tokens_mask=plan.special_tokens_mask,
            units=plan.units,
            mlm_probability=plan.rates,
            selection=plan.selection,
            impl=self.impl,
            out=None if batch is None else (inputs, torch.empty_like(inputs)),
        )

    def numpy_mask_tokens(
        self,
        inputs: np.ndarray,
        special_tokens_mask: np.ndarray | None = None,
        offset_mapping: np.ndarray | None = None,
        **extra: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """:meth:`torch_mask_tokens` for arrays; with ``rng="torch"`` from numpy's generator, as Hugging Face does."""
        if self.rng == "torch":
            self._seed_generator("np")
            return super().numpy_mask_tokens(inputs.copy(), special_tokens_mask, offset_mapping)
        tensors = {"special_tokens_mask": special_tokens_mask, "offset_mapping": offset_mapping, **extra}
        masked = self.torch_mask_tokens(
            torch.from_numpy(np.array(inputs)),  # copied, since PyTorch takes only writable arrays of positive strides
            **{name: None if array is None else torch.from_numpy(np.array(array)) for name, array in tensors.items()},
        )
        return masked[0].numpy(), masked[1].numpy()

    # What the members above share.

    def _pad(self, examples: Sequence[Any]) -> tuple[dict[str, Any], Tensor]:
        """The rows as padded columns; and their attention mask, among the columns or not."""
        skip = () if self._reads_words else ("offset_mapping",)
        native = resolve(None if self.mask_on_device else self.impl, _CPU) == "cpp"
        padded = pad_rows(examples, self.tokenizer, None if self.packing else self.pad_to_multiple_of, skip, native)
        attention = padded.get("attention_mask")
        if attention is None:
            left = self.tokenizer.padding_side == "left"
            lengths = torch.tensor(_packing.row_lengths(examples), device="cpu")
            attention = real_tokens(lengths, padded["input_ids"].shape[1], left)
        return padded, attention

    def _take_out(self, columns: dict[str, Any]) -> dict[str, Any]:
        """The columns that masks depend on; out of all columns, if models do not know them."""
        names = (self.row_key_column, *self.strategies.columns)
        taken = {name: columns.pop(name) for name in names if name is not None and name in columns}
        return taken | {name: columns[name] for name in self.strategies.reads if name in columns}

    def _ship(self, examples: Sequence[Any]) -> Any:
        """Collate to what the device needs to mask the batch itself."""
        if type(self).torch_mask_tokens is not DataCollatorForMaskedLM.torch_mask_tokens:
            raise TypeError(f"mask_on_device: expected False, since {type(self).__name__} has torch_mask_tokens itself")
        columns, attention = self._pad(examples)
        columns = {name: _for_models(x) if isinstance(x, Tensor) else x for name, x in columns.items()}
        read = self._take_out(columns)
        offsets, ids, special = columns.pop("offset_mapping", None), columns["input_ids"], columns.get(_SPECIAL)
        word_ids = columns.pop("word_ids", None) if self._reads_words else None
        plan = self.plan(ids, special, offsets, attention, word_ids, read)
        batch = on_device.ship(columns, examples, attention, plan, self)
        return BatchEncoding(batch) if isinstance(examples[0], Mapping) else batch

    def _collate(
        self,
        examples: Sequence[Any],
        mask: Callable[..., tuple[Any, Any]],
        where: Callable[..., Any],
        convert: Callable[[Tensor], Any],
    ) -> Any:
        padded, attention = self._pad(examples)
        batch = {name: convert(column) if isinstance(column, Tensor) else column for name, column in padded.items()}
        special, offsets = batch.pop(_SPECIAL, None), batch.pop("offset_mapping", None)
        read = {name: padded[name] for name in self._take_out(batch)}
        if self.mlm:
            word_ids = batch.pop("word_ids", None) if self._reads_words else None
            function, running = getattr(mask, "__func__", mask), _Running(attention, read, {})
            if function is DataCollatorForMaskedLM.torch_mask_tokens:
                # The padded ids are nobody else's: they are masked where they are.
                masked = self._mask(batch["input_ids"], special, offsets, attention, word_ids, running)
            else:
                extra = {"attention_mask": convert(attention)}
                if self._reads_words:
                    extra["word_ids"] = word_ids
                # A subclass may override with Hugging Face's arguments only, and call ours from there.
                if not _takes_extra(function):
                    extra = {}
                token = _running.set(running)
                try:
                    masked = mask(batch["input_ids"], special_tokens_mask=special, offset_mapping=offsets, **extra)
                finally:
                    _running.reset(token)
            batch |= {name: convert(column) for name, column in running.added.items()}
            batch["input_ids"], batch["labels"] = masked
            batch = self.strategies.arrange(batch, attention, self.tokenizer, self.pad_to_multiple_of)
        else:
            ids, pad = batch["input_ids"], self.tokenizer.pad_token_id
            batch["labels"] = where(ids == (-1 if pad is None else pad), -100, ids)
        if self.packing:
            packed = _packing.flatten(
                batch,
                examples,
                attention,
                self.tokenizer,
                pad_to_multiple_of=self.pad_to_multiple_of,
                position_ids_start=self.position_ids_start,
                separate=not self.mlm,
            )
            batch = {name: convert(column) if isinstance(column, Tensor) else column for name, column in packed.items()}
        return BatchEncoding(batch) if isinstance(examples[0], Mapping) else batch


def _for_models(column: Tensor) -> Tensor:
    """Floats in the default dtype, as ``torch.tensor`` makes them of Python's."""
    return column.to(torch.get_default_dtype()) if column.is_floating_point() else column


@lru_cache(maxsize=64)
def _takes_extra(mask: Callable[..., Any]) -> bool:
    """Whether a mask function takes more than Hugging Face's arguments."""
    parameters = signature(mask).parameters
    return "attention_mask" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

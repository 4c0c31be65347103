"""Masks made on the device: the batches of the collator bit for bit, from few bytes, without a wait."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from no_sync import NoSync
from test_packing import rows_of
from torch import Tensor
from transformers import BatchEncoding

from fastmlm import DataCollatorForMaskedLM, dispatch
from fastmlm.on_device import mask_batch

LENGTHS = [7, 64, 1, 33, 65]


def pair(tokenizer: Any, epoch: int | None = 3, **kwargs: Any) -> tuple[Any, Any]:
    """Two collators of equal settings, which mask by themselves and on the device."""
    collators = []
    for on_device in (False, True):
        settings = {"seed": 42, "mlm_probability": 0.4, **kwargs}
        collator = DataCollatorForMaskedLM(tokenizer, mask_on_device=on_device, **settings)
        if epoch is not None:
            collator.set_epoch(epoch)
        collators.append(collator)
    return tuple(collators)  # type: ignore[return-value]


def both(tokenizer: Any, rows: list[Any], **kwargs: Any) -> tuple[Any, Any]:
    """One batch, masked by the collator; and shipped, then masked."""
    plain, ships = pair(tokenizer, **kwargs)
    torch.manual_seed(5)
    expected = plain(copy.deepcopy(rows))
    torch.manual_seed(5)
    shipped = ships(copy.deepcopy(rows))
    assert "labels" not in shipped
    before = {name: x.clone() if isinstance(x, Tensor) else x for name, x in shipped.items()}
    masked = mask_batch(shipped, ships)
    assert_same(shipped, before)  # left as it was
    assert type(masked) is type(expected)
    return expected, masked


def assert_same(one: Any, other: Any) -> None:
    assert set(one) == set(other)
    for name, column in one.items():
        if isinstance(column, Tensor):
            assert column.dtype == other[name].dtype, name
            assert torch.equal(column, other[name]), name
        else:
            assert type(column) is type(other[name]), name
            assert column == other[name], name


# ---- The same batches ----


@pytest.mark.parametrize("epoch", [3, None])
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("multiple", [None, 16])
@pytest.mark.parametrize("side", ["left", "right"])
def test_it_is_the_batch_of_the_collator(wordpiece, side, multiple, packing, epoch) -> None:
    wordpiece.padding_side = side
    kwargs = {"packing": packing, "pad_to_multiple_of": multiple, "epoch": epoch}
    for kind in ("lists", "arrays", "ids"):
        expected, masked = both(wordpiece, rows_of(LENGTHS, kind), **kwargs)
        assert_same(masked, expected)
        assert (masked["labels"] != -100).any()


@pytest.mark.parametrize("impl", ["reference", "cpp", "triton"])
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_every_implementation(wordpiece, packing, impl) -> None:
    plain, _ = pair(wordpiece, packing=packing)
    _, ships = pair(wordpiece, packing=packing, impl=impl)
    rows = rows_of(LENGTHS)
    assert_same(mask_batch(ships(rows), ships), plain(rows))


@pytest.mark.parametrize("seed", [None, 7, 2**64 - 1, -3])
def test_any_seed(wordpiece, seed) -> None:
    expected, masked = both(wordpiece, rows_of(LENGTHS), seed=seed, epoch=1)
    assert_same(masked, expected)


@pytest.mark.parametrize("name", ["wordpiece", "byte_level", "unigram", "amino_acids", "slow_bert"])
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_every_tokenizer(tokenizers, make_rows, name, packing) -> None:
    tokenizer = tokenizers[name]
    rows = make_rows(tokenizer, return_special_tokens_mask=True)
    kwargs: dict[str, Any] = {"random_words": "non_special", "packing": packing}
    assert_same(*both(tokenizer, rows, **kwargs))
    assert_same(*both(tokenizer, rows, **kwargs, whole_word_mask=True))


def test_special_tokens_of_a_column(wordpiece) -> None:
    """Of ids that no tokenizer knows as special."""
    rows = rows_of(LENGTHS)
    for row in rows:
        row["special_tokens_mask"] = [i % 2 for i in range(len(row["input_ids"]))]
    for packing in (False, True):
        expected, masked = both(wordpiece, rows, packing=packing, mlm_probability=1.0)
        assert_same(masked, expected)
        assert (masked["labels"] != -100).sum() == sum((n + 1) // 2 for n in LENGTHS)


def test_words_of_columns(wordpiece, sentences) -> None:
    encoded = [wordpiece(text, truncation=True, max_length=40, return_offsets_mapping=True) for text in sentences[:8]]
    offsets = [dict(row) for row in encoded]
    words = [{"input_ids": row["input_ids"], "word_ids": row.word_ids()} for row in encoded]
    for packing in (False, True):
        for rows in (offsets, words):
            assert_same(*both(wordpiece, rows, whole_word_mask=True, packing=packing))


def test_holes_and_odd_masks(wordpiece) -> None:
    """Where lengths do not tell what is real, the attention mask itself is shipped, a byte a token."""
    rows = rows_of(LENGTHS, holes=True)
    assert_same(*both(wordpiece, rows))
    for odd in (2, -1, 300):
        rows = rows_of(LENGTHS)
        for row in rows:
            row["attention_mask"] = [odd] * len(row["input_ids"])
        assert_same(*both(wordpiece, rows))


def test_models_that_take_no_attention_mask(wordpiece) -> None:
    wordpiece.model_input_names = ["input_ids"]
    expected, masked = both(wordpiece, rows_of(LENGTHS, "ids"))
    assert "attention_mask" not in expected
    assert_same(masked, expected)
    rows = rows_of(LENGTHS)
    for row in rows:
        row["attention_mask"] = [1] * len(row["input_ids"])
    expected, masked = both(wordpiece, rows)
    assert "attention_mask" in expected
    assert_same(masked, expected)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_other_columns(wordpiece, packing) -> None:
    """One value a token or a row, of any kind, positions of their own, token types too large for a byte."""
    rows = rows_of(LENGTHS)
    for i, row in enumerate(rows):
        n = len(row["input_ids"])
        row |= {"weights": [0.5 * i] * n, "row": i, "text": f"row {i}", "position_ids": list(range(100, 100 + n))}
        row["token_type_ids"] = [300 * i - 1] * n
    assert_same(*both(wordpiece, rows, packing=packing))


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_columns_keep_their_types(wordpiece, packing) -> None:
    """Only int64 is shipped in fewer bytes; and names like those of what is shipped mean nothing."""
    rows = rows_of(LENGTHS)
    for i, row in enumerate(rows):
        n = len(row["input_ids"])
        row["token_type_ids"] = np.full(n, 0.5)
        row["attention_mask"] = np.ones(n, bool)
        row |= {"units": [0] * n, "lengths": 3 * i, "mask_keys": [1, 2]}
    assert_same(*both(wordpiece, rows, packing=packing))


def test_bounds_of_packed_rows_are_tensors_of_their_own(wordpiece) -> None:
    _, masked = both(wordpiece, rows_of(LENGTHS), packing=True)
    assert masked["cu_seq_lens_q"].data_ptr() != masked["cu_seq_lens_k"].data_ptr()


def test_a_host_without_the_kernel_of_the_device(wordpiece, monkeypatch) -> None:
    """``impl`` is that of the device: the host collates by whatever it has."""
    monkeypatch.setattr(dispatch, "_missing", lambda impl, device: "not here" if impl == "triton" else None)
    for words in (False, True):
        _, ships = pair(wordpiece, impl="triton", whole_word_mask=words)
        shipped = ships(rows_of(LENGTHS))
        with pytest.raises(RuntimeError, match="impl: 'triton' cannot run here: not here"):
            mask_batch(shipped, ships)


def test_rows_without_a_real_token(wordpiece) -> None:
    rows = rows_of(LENGTHS)
    for i, row in enumerate(rows):
        row["attention_mask"] = [int(i != 1)] * len(row["input_ids"])
    for packing in (False, True):
        for epoch in (3, None):
            assert_same(*both(wordpiece, rows, packing=packing, epoch=epoch))


def test_padding_that_is_not_special(wordpiece) -> None:
    """Padding of a packed batch is no row of its own that masks could fall on."""
    expected, masked = both(wordpiece, rows_of(LENGTHS), packing=True, pad_to_multiple_of=64, special_token_ids=[2])
    assert_same(masked, expected)
    assert (masked["labels"][0, sum(LENGTHS) :] == -100).all()


def test_positions_that_start_later(byte_level) -> None:
    assert_same(*both(byte_level, rows_of(LENGTHS), packing=True, position_ids_start=2))


def test_a_batch_may_be_divided(wordpiece) -> None:
    """As Accelerate does with ``dispatch_batches``: each row brings its keys."""
    _, ships = pair(wordpiece)
    shipped = ships(rows_of(LENGTHS))
    whole = mask_batch(shipped, ships)
    parts = [mask_batch(BatchEncoding({k: x[i : i + 2] for k, x in shipped.items()}), ships) for i in (0, 2, 4)]
    assert_same({name: torch.cat([part[name] for part in parts]) for name in whole}, dict(whole))


# ---- Few bytes, no wait ----


@pytest.mark.parametrize("name", ["wordpiece", "amino_acids"])
def test_few_bytes(tokenizers, name) -> None:
    tokenizer = tokenizers[name]
    rows = [{"input_ids": np.full(512, 5)} for _ in range(64)]
    plain, ships = pair(tokenizer, random_words="non_special")
    size = lambda batch: sum(x.nbytes for x in batch.values())  # noqa: E731
    ratio = size(plain(rows)) / size(ships(rows))
    assert ratio > (5.9 if name == "wordpiece" else 22)  # of 6 and 24, less 20 bytes a row


@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_nothing_waits(wordpiece, packing, words) -> None:
    _, ships = pair(wordpiece, packing=packing, whole_word_mask=words, pad_to_multiple_of=16)
    shipped = ships(rows_of(LENGTHS))
    assert ships.spec.tables(torch.device("meta")) is not None  # of the first batch: copied to the device once
    with NoSync() as mode:
        there = {k: x.to("meta") if isinstance(x, Tensor) else x for k, x in shipped.items()}
        masked = mask_batch(there, ships)
    assert masked["labels"].device.type == "meta"
    assert mode.operations > 10


# ---- Bad arguments ----


class Overriding(DataCollatorForMaskedLM):
    def torch_mask_tokens(self, *args: Any, **kwargs: Any) -> Any:
        return super().torch_mask_tokens(*args, **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"rng": "torch"}, "mask_on_device: expected False with rng='torch'"),
        ({"mlm": False}, "mask_on_device: expected False with .*mlm=False"),
        ({"return_tensors": "np"}, "mask_on_device: expected False with .*return_tensors='np'"),
    ],
)
def test_arguments_that_do_not_go_together(wordpiece, kwargs, message) -> None:
    with pytest.raises(ValueError, match=message):
        DataCollatorForMaskedLM(wordpiece, mask_on_device=True, **kwargs)


def test_bad_input(wordpiece) -> None:
    _, ships = pair(wordpiece)
    with pytest.raises(TypeError, match="mask_on_device: expected False, since Overriding has"):
        Overriding(wordpiece, mask_on_device=True)(rows_of(LENGTHS))
    with pytest.raises(ValueError, match=r"input_ids: expected ids in \[0, 800\), got 900"):
        ships([{"input_ids": [5, 900]}])
    rows = rows_of(LENGTHS)
    for row in rows:
        row["fastmlm_units"] = row["input_ids"]
    with pytest.raises(ValueError, match=r"features: expected other names of columns .* got \['fastmlm_units'\]"):
        ships(rows)
    with pytest.raises(ValueError, match="features: expected at least one token with attention_mask 1 to pack"):
        pair(wordpiece, packing=True)[1]([{"input_ids": []}] * 2)
    holes = rows_of(LENGTHS)
    holes[1]["attention_mask"] = [1, 0] + [1] * (LENGTHS[1] - 2)
    for i in (0, 2, 3, 4):
        holes[i]["attention_mask"] = [1] * LENGTHS[i]
    with pytest.raises(ValueError, match="attention_mask, row 1: expected no 0 between the first and the last 1"):
        pair(wordpiece, packing=True)[1](holes)

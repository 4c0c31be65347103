"""``packing=True``: the padded batch without its padding, in Hugging Face's packed form."""

import copy
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from batches import equal
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import DataLoader
from transformers import AttentionInterface, BatchEncoding, DataCollatorWithFlattening

from fastmlm import DataCollatorForMaskedLM, mask_tokens, sparsify
from fastmlm.philox import fold, row_keys
from fastmlm.testing import CLOSE, MASKED_LM_NAMES, V, dense_loss, make_config, make_model

PACKED = ["position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"]
# Unequal, equal (nothing to drop: another way through the code), one row, one token, and the stripes of the draw law.
LENGTHS = {"unequal": [7, 64, 1, 130, 65], "equal": [33, 33, 33], "one row": [15], "one token": [1]}
KINDS = {"lists": list, "arrays": np.array, "int32": lambda x: torch.tensor(x, dtype=torch.int32), "ids": list}


def rows_of(lengths, kind="lists", holes=False, seed=0) -> list:
    """Rows of ordinary ids with token types; with ``holes`` some, first and last ones too, are not real."""
    rng = np.random.default_rng(seed)
    rows = []
    for n in lengths:
        row = {"input_ids": rng.integers(5, 700, n), "token_type_ids": rng.integers(0, 2, n)}
        if holes:
            row["attention_mask"] = (rng.random(n) < 0.7).astype(int)
        rows.append({name: KINDS[kind](column.tolist()) for name, column in row.items()})
    return [row["input_ids"] for row in rows] if kind == "ids" else rows


def both(tokenizer, rows, epoch=3, **kwargs):
    """The padded and the packed form of one batch, by two collators of equal settings."""
    batches = []
    for packing in (False, True):
        collator = DataCollatorForMaskedLM(tokenizer, packing=packing, **{"seed": 42, "mlm_probability": 0.4, **kwargs})
        if epoch is not None:
            collator.set_epoch(epoch)
        torch.manual_seed(5)
        batches.append(collator(copy.deepcopy(rows)))
    return batches


def assert_packs(packed, padded, start=0) -> None:
    """What packing must give of a padded batch, one row and one token after another."""
    tensor = lambda column: torch.as_tensor(column)  # noqa: E731
    names = [name for name in padded if name != "attention_mask"]
    assert list(packed) == [*names, *PACKED]
    real = tensor(padded["attention_mask"]) != 0
    counts = [n for n in real.sum(1).tolist() if n]
    assert tensor(packed["cu_seq_lens_q"]).tolist() == np.cumsum([0, *counts]).tolist()
    assert packed["position_ids"].tolist() == [[start + s for n in counts for s in range(n)]]
    assert packed["max_length_q"] == packed["max_length_k"] == max(counts)
    assert type(packed["max_length_q"]) is type(packed["max_length_k"]) is int
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        assert tensor(packed[name]).dtype == torch.int32
        assert torch.equal(tensor(packed[name]), tensor(packed["cu_seq_lens_q"]))
    for name in names:
        column = tensor(padded[name])
        expected = torch.cat([column[i, real[i]] for i in range(len(real))])[None]
        assert tensor(packed[name]).dtype == column.dtype
        assert torch.equal(tensor(packed[name]), expected), name


# The same masks as the padded form.


@pytest.mark.parametrize("impl", [None, "reference"])
@pytest.mark.parametrize("epoch", [3, None])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    ("kind", "holes"), [(kind, holes) for kind in KINDS for holes in (False, True) if (kind, holes) != ("ids", True)]
)
def test_equals_the_padded_form(wordpiece, kind, lengths, holes, side, epoch, impl):
    wordpiece.padding_side = side
    rows = rows_of(LENGTHS[lengths], kind, holes)
    if holes and lengths == "one token":
        rows[0]["attention_mask"][0] = 1
    padded, packed = both(wordpiece, rows, epoch, impl=impl)
    assert_packs(packed, padded)
    assert type(packed) is type(padded) is (dict if kind == "ids" else BatchEncoding)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("seed", [42, None])
@pytest.mark.parametrize(
    "kwargs",
    [
        {"whole_word_mask": True},
        {"rng": "torch"},
        {"mask_replace_prob": 0.1, "random_replace_prob": 0.8, "exclude_original": True},
        {"return_tensors": "np"},
        {"return_tensors": "np", "whole_word_mask": True},
        {"return_tensors": "np", "rng": "torch"},
    ],
    ids=str,
)
def test_every_way_of_masking(wordpiece, make_rows, kwargs, seed, side):
    wordpiece.padding_side = side
    rows = make_rows(wordpiece, return_special_tokens_mask=True)
    if kwargs.get("return_tensors") == "np" and kwargs.get("rng") == "torch" and seed is None:
        seed = 1  # numpy's own generator has no seed to set
    padded, packed = both(wordpiece, rows, epoch=None, seed=seed, **kwargs)
    kind = np.ndarray if "return_tensors" in kwargs else torch.Tensor
    assert all(type(packed[name]) is kind for name in packed if not name.startswith("max_length"))
    assert_packs(packed, padded)
    assert (packed["labels"] != -100).any()


@pytest.mark.parametrize("kind", ["word_ids", "offset_mapping"])
def test_whole_words_from_a_column(wordpiece, kind):
    # Words of two tokens that the vocabulary does not know of, in rows of unequal length.
    rows = rows_of([9, 20, 2])
    for row in rows:
        n = len(row["input_ids"])
        row["input_ids"] = [wordpiece.convert_tokens_to_ids("a")] * n
        words = [s // 2 for s in range(n)]
        spans = [(3 * (s // 2) + s % 2, 3 * (s // 2) + s % 2 + 1) for s in range(n)]
        row[kind] = words if kind == "word_ids" else spans
    padded, packed = both(wordpiece, rows, whole_word_mask=True)
    assert_packs(packed, padded)
    if kind == "word_ids":
        chosen = (packed["labels"] != -100)[0]
        starts = packed["position_ids"][0] % 2 == 0
        assert torch.equal(chosen[:-1][starts[:-1] & ~starts[1:]], chosen[1:][starts[:-1] & ~starts[1:]])
        assert 0 < chosen.sum() < chosen.numel()


def test_equals_the_masks_of_a_packed_call(wordpiece):
    """The draw law says the same of packed rows; so a GPU that masks the packed batch gives these masks."""
    rows = rows_of(LENGTHS["unequal"])
    _, packed = both(wordpiece, rows)
    collator = DataCollatorForMaskedLM(wordpiece, mlm_probability=0.4)
    keys = torch.cat([row_keys(torch.tensor([row["input_ids"]])) for row in rows])
    flat = torch.tensor([list(chain.from_iterable(row["input_ids"] for row in rows))])
    masked = mask_tokens(flat, collator.spec, seed=fold(42, 3), row_keys=keys, cu_seqlens=packed["cu_seq_lens_q"])
    assert torch.equal(packed["input_ids"], masked.input_ids)
    assert torch.equal(packed["labels"], masked.labels)


# Hugging Face's form.


@pytest.mark.parametrize("return_tensors", ["pt", "np"])
@pytest.mark.parametrize("kind", ["lists", "int32"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_is_hugging_faces_flattening(wordpiece, lengths, kind, return_tensors):
    """Without masking, and with its label rule, everything is equal: names, order, dtypes, shapes and values."""
    rows = [{"input_ids": row["input_ids"]} for row in rows_of(LENGTHS[lengths], kind)]
    theirs = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(copy.deepcopy(rows), return_tensors)
    ours = DataCollatorForMaskedLM(wordpiece, mlm=False, packing=True, return_tensors=return_tensors)(rows)
    masked = DataCollatorForMaskedLM(wordpiece, packing=True, return_tensors=return_tensors)(rows)
    assert list(ours) == list(masked) == list(theirs)
    for name, expected in theirs.items():
        for batch in (ours, masked):
            assert type(batch[name]) is type(expected)
            assert getattr(batch[name], "dtype", None) == getattr(expected, "dtype", None)
            assert getattr(batch[name], "shape", None) == getattr(expected, "shape", None)
        assert np.array_equal(ours[name], expected), name
        if name not in ("input_ids", "labels"):
            assert np.array_equal(masked[name], expected), name


def test_inputs_are_not_changed(wordpiece):
    for mlm in (True, False):
        for kind in ("arrays", "int32"):
            rows = rows_of([5, 5], kind)
            before = copy.deepcopy(rows)
            batch = DataCollatorForMaskedLM(wordpiece, mlm=mlm, packing=True)(rows)
            for name in ("input_ids", "labels", "token_type_ids"):
                batch[name].fill_(77)
            for row, old in zip(rows, before, strict=True):
                assert all(np.array_equal(row[name], old[name]) for name in row)


# Columns.


def test_columns_of_tokens_and_of_rows(wordpiece):
    """(B, ...) stays; also where a row has as many values as the longest row has tokens (4)."""
    rows = [
        {
            "input_ids": list(range(5, 5 + n)), "weight": [0.5 * n] * n, "pairs": [[s, n] for s in range(n)],
            "label": n, "score": n / 2, "vector": [1.0, 2.0, 3.0, float(n)], "text": f"row {n}", "words": ["a"] * n,
        }
        for n in (2, 4, 1)
    ]  # fmt: skip
    batch = DataCollatorForMaskedLM(wordpiece, packing=True)(rows)
    assert batch["weight"].tolist() == [[1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 0.5]]
    assert batch["pairs"].tolist() == [[[0, 2], [1, 2], [0, 4], [1, 4], [2, 4], [3, 4], [0, 1]]]
    assert batch["label"].tolist() == [2, 4, 1]
    assert batch["score"].tolist() == [1.0, 2.0, 0.5]
    assert batch["vector"].tolist() == [[1, 2, 3, 2], [1, 2, 3, 4], [1, 2, 3, 1]]
    assert batch["text"] == ["row 2", "row 4", "row 1"]
    assert batch["words"] == [["a"] * 2, ["a"] * 4, ["a"]]
    assert "attention_mask" not in batch


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("return_tensors", ["pt", "np"])
def test_rows_without_a_real_token_are_dropped(wordpiece, return_tensors, side):
    wordpiece.padding_side = side
    lengths = [0, 3, 2, 0, 4]
    rows = rows_of(lengths)
    for i, row in enumerate(rows):
        row.update(attention_mask=[int(i != 2)] * lengths[i], label=10 * i, text=str(i))
    batch = DataCollatorForMaskedLM(wordpiece, packing=True, mlm_probability=0, return_tensors=return_tensors)(rows)
    assert batch["input_ids"].tolist() == [rows[1]["input_ids"] + rows[4]["input_ids"]]
    assert batch["token_type_ids"].tolist() == [rows[1]["token_type_ids"] + rows[4]["token_type_ids"]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 7]
    assert batch["label"].tolist() == [10, 40]
    assert batch["text"] == ["1", "4"]


@pytest.mark.parametrize("rows", [[[]], [[], []], [{"input_ids": [5, 6], "attention_mask": [0, 0]}]])
def test_nothing_left_is_an_error(wordpiece, rows):
    with pytest.raises(ValueError, match=r"^features: expected at least one token with attention_mask 1"):
        DataCollatorForMaskedLM(wordpiece, packing=True)(rows)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_tokenizer_without_attention_masks(wordpiece, side):
    """Real tokens are those the rows brought; padding then counts for neither positions nor row keys."""
    wordpiece.padding_side = side
    rows = [{"input_ids": row["input_ids"]} for row in rows_of(LENGTHS["unequal"])]
    expected, packed = both(wordpiece, rows)
    wordpiece.model_input_names = ["input_ids"]
    padded, alike = both(wordpiece, rows)
    assert "attention_mask" not in padded
    assert equal(padded, {name: expected[name] for name in padded})
    names = [name for name in packed if not name.startswith("max_length")]
    assert all(torch.equal(alike[name], packed[name]) for name in names)


# Arguments.


@pytest.mark.parametrize("return_tensors", ["pt", "np"])
@pytest.mark.parametrize("holes", [False, True])
def test_pad_to_multiple_of_adds_a_row_of_padding(wordpiece, holes, return_tensors):
    rows = rows_of([9, 20, 4], holes=holes)
    kwargs = {"seed": 42, "return_tensors": return_tensors}
    collators = [DataCollatorForMaskedLM(wordpiece, packing=True, pad_to_multiple_of=m, **kwargs) for m in (None, 64)]
    plain, filled = (collator(rows) for collator in collators)
    n = plain["input_ids"].shape[1]
    fill = {"input_ids": wordpiece.pad_token_id, "labels": -100, "token_type_ids": wordpiece.pad_token_type_id}
    for name in ("input_ids", "labels", "token_type_ids", "position_ids"):
        assert filled[name].shape == (1, 64)
        assert filled[name].dtype == plain[name].dtype
        assert np.array_equal(filled[name][:, :n], plain[name])
        tail = [fill[name]] * (64 - n) if name in fill else list(range(64 - n))
        assert filled[name][0, n:].tolist() == tail
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        assert filled[name].tolist() == [*plain[name].tolist(), 64]
        assert filled[name].dtype == plain[name].dtype
    assert filled["max_length_q"] == max(plain["max_length_q"], 64 - n)
    collators[1].pad_to_multiple_of = n  # nothing to fill up
    assert collators[1](rows)["input_ids"].shape == (1, n)


def test_pad_to_multiple_of_without_a_pad_token(wordpiece):
    wordpiece.pad_token = None
    rows = [[5, 6, 7], [8, 9, 10]]
    assert DataCollatorForMaskedLM(wordpiece, packing=True, pad_to_multiple_of=3)(rows)["input_ids"].shape == (1, 6)
    with pytest.raises(ValueError, match=r"^pad_to_multiple_of: expected a tokenizer with a pad token"):
        DataCollatorForMaskedLM(wordpiece, packing=True, pad_to_multiple_of=4)(rows)


def test_position_ids_start(wordpiece):
    rows = rows_of([3, 2])
    moved = DataCollatorForMaskedLM(wordpiece, packing=True, position_ids_start=2, pad_to_multiple_of=8)(rows)
    assert moved["position_ids"].tolist() == [[2, 3, 4, 2, 3, 2, 3, 4]]
    for bad, packing in ((2, False), (-1, True), (1.5, True)):
        with pytest.raises(ValueError, match=rf"^position_ids_start: expected an int .*, got {bad}"):
            DataCollatorForMaskedLM(wordpiece, packing=packing, position_ids_start=bad)


def test_positions_that_rows_bring_are_kept(wordpiece):
    rows = [{"input_ids": [5, 6, 7], "position_ids": [2, 4, 9]}, {"input_ids": [8], "position_ids": [3]}]
    assert DataCollatorForMaskedLM(wordpiece, packing=True)(rows)["position_ids"].tolist() == [[2, 4, 9, 3]]


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_loader(wordpiece, workers):
    """Through worker processes, and to a device, as the Trainer moves it."""
    rows = rows_of([5, 9, 3, 12])
    collator = DataCollatorForMaskedLM(wordpiece, packing=True, seed=1)
    collator.set_epoch(0)
    batches = list(DataLoader(rows, 2, collate_fn=collator, num_workers=workers))
    assert [batch["cu_seq_lens_q"].tolist() for batch in batches] == [[0, 5, 14], [0, 3, 15]]
    for batch, part in zip(batches, (rows[:2], rows[2:]), strict=True):
        assert torch.equal(batch["labels"], collator(part)["labels"])
        assert batch.to("cpu")["max_length_k"] == max(len(row["input_ids"]) for row in part)


# Models.


def rows_apart(module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, **kwargs):
    """Attention as flash attention's variable-length kernel defines it: within each row of a packed batch."""
    assert attention_mask is None
    bounds = [0, query.shape[2]]
    if cu_seq_lens_q is not None:  # not when sparsify tries the model on a plain row
        bounds = cu_seq_lens_q.tolist()
        assert kwargs["max_length_q"] == max(np.diff(bounds))
    pieces = [
        scaled_dot_product_attention(*(x[:, :, start:end] for x in (query, key, value)), scale=scaling)
        for start, end in pairwise(bounds)
    ]
    return torch.cat(pieces, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register("rows_apart", rows_apart)


class FewTokens:
    """The tokenizer of the models of ``fastmlm.testing``, as far as the collator asks: 37 ids, 0 to 2 special."""

    padding_side, pad_token_type_id, mask_token_id, model_input_names = "right", 0, V - 1, ["attention_mask"]

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id
        self.all_special_ids = [0, 1, 2, V - 1]

    def __len__(self) -> int:
        return V

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(V)}


@pytest.mark.parametrize("multiple", [None, 16])
@pytest.mark.parametrize("name", MASKED_LM_NAMES)
def test_a_model_has_the_same_loss(name, multiple):
    # ESM's token_dropout scales by a row's share of mask tokens, and takes the packed row for one row.
    overrides = {"token_dropout": False} if name == "Esm" else {}
    pad = make_config(name).pad_token_id
    rows = [{"input_ids": torch.randint(3, V - 1, (n,)).tolist()} for n in (7, 10, 1, 4)]
    start = 2 if name == "Roberta" else 0
    padded, packed = (
        DataCollatorForMaskedLM(FewTokens(pad), seed=4, mlm_probability=0.4, random_words="non_special", **kwargs)
        for kwargs in ({}, {"packing": True, "position_ids_start": start, "pad_to_multiple_of": multiple})
    )
    for collator in (padded, packed):
        collator.set_epoch(0)
    padded, packed = padded(rows), packed(rows)
    assert packed["input_ids"].shape == (1, 22 if multiple is None else 32)
    expected = dense_loss(make_model(name, attn_implementation="sdpa", **overrides), padded)
    apart = make_model(name, attn_implementation="rows_apart", **overrides)
    torch.testing.assert_close(dense_loss(apart, packed), expected, **CLOSE)
    torch.testing.assert_close(sparsify(apart)(**packed).loss.double(), expected, rtol=1e-6, atol=0)

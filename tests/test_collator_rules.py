"""``DataCollatorForMaskedLM`` and its rules: what is never selected, what never changes, the rates."""

import copy
import warnings

import numpy as np
import pytest
import torch
from batches import equal, many, originals, selected
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import BatchEncoding, DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from fastmlm import DataCollatorForMaskedLM


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("column", [False, True])
@pytest.mark.parametrize("family", ["wordpiece", "byte_level", "unigram", "slow_bert"])
def test_specials_typed_in_the_text_are_never_selected(tokenizers, family, column, whole):
    """The special_tokens_mask of a tokenizer knows only the specials it added itself."""
    tokenizer = tokenizers[family]
    words = ["the", tokenizer.unk_token, "value", tokenizer.mask_token, tokenizer.pad_token, "of"]
    row = dict(tokenizer(" ".join(words), return_special_tokens_mask=column))
    batch = DataCollatorForMaskedLM(tokenizer, mlm_probability=1, whole_word_mask=whole)([row])
    special = torch.isin(torch.tensor([row["input_ids"]]), torch.tensor(tokenizer.all_special_ids))
    assert special.sum() == 5
    assert torch.equal(selected(batch), ~special)


def test_a_special_tokens_mask_adds_to_the_ids(wordpiece):
    row = {"input_ids": [2, 50, 60, 3], "special_tokens_mask": [0, 1, 0, 0]}  # it does not name [CLS] and [SEP]
    batch = DataCollatorForMaskedLM(wordpiece, mlm_probability=1)([row])
    assert batch["labels"].tolist() == [[-100, -100, 60, -100]]
    assert "special_tokens_mask" not in batch


@pytest.mark.parametrize("return_tensors", ["pt", "np"])
@pytest.mark.parametrize("whole", [False, True])
def test_attention_mask_zeros_are_never_selected(wordpiece, whole, return_tensors):
    rows = [
        {"input_ids": list(range(50, 58)), "attention_mask": [0, 0, 1, 1, 0, 1, 1, 0]},
        {"input_ids": [60], "attention_mask": [1]},
    ]
    collator = DataCollatorForMaskedLM(
        wordpiece, mlm_probability=1, whole_word_mask=whole, return_tensors=return_tensors
    )
    batch = collator(rows)
    assert ((batch["labels"] != -100) == (batch["attention_mask"] != 0)).all()
    assert batch["input_ids"][1, 1:].tolist() == [0] * 7  # padding stays as it is


def test_padding_by_an_ordinary_token(byte_level):
    """Many set ``pad_token`` to a token that also stands in the text; only real places may be selected."""
    byte_level.pad_token = byte_level.eos_token
    collator = DataCollatorForMaskedLM(byte_level, mlm_probability=1, special_token_ids=[])
    batch = collator([{"input_ids": [7, 2, 8]}, {"input_ids": [9]}])
    assert selected(batch).tolist() == [[True, True, True], [True, False, False]]


@pytest.mark.parametrize("seed", [5, None])
def test_the_global_generators(wordpiece, make_rows, seed):
    rows = make_rows(wordpiece)
    collator = DataCollatorForMaskedLM(wordpiece, seed=seed, mlm_probability=0.5)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    collator(rows)
    collator(rows, return_tensors="np")
    assert torch.equal(torch.get_rng_state(), torch_state) == (seed is not None)
    assert (np.random.get_state()[1] == numpy_state).all()


def test_without_a_seed_the_global_seed_decides(wordpiece, make_rows):
    rows = make_rows(wordpiece)
    batches = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        batches.append(DataCollatorForMaskedLM(wordpiece, mlm_probability=0.5)(rows))
    assert equal(batches[0], batches[1])
    assert not equal(batches[0], batches[2])


@pytest.mark.parametrize("ids", [[[5]], [[]], [[2, 3]], [[2, 3], []], [{"input_ids": [7]}]])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("return_tensors", ["pt", "np"])
def test_short_rows_and_batches_of_one(wordpiece, ids, whole, return_tensors):
    collator = DataCollatorForMaskedLM(
        wordpiece, mlm_probability=1, whole_word_mask=whole, return_tensors=return_tensors
    )
    batch = collator(ids)
    rows = [row["input_ids"] if isinstance(row, dict) else row for row in ids]
    assert (batch["labels"] != -100).sum() == sum(token > 4 for row in rows for token in row)
    assert batch["input_ids"].shape == batch["labels"].shape == (len(ids), max(map(len, rows)))


def test_id_zero_is_an_ordinary_label(wordpiece):
    collator = DataCollatorForMaskedLM(wordpiece, mlm_probability=1, special_token_ids=[4])
    assert collator([[0, 7]])["labels"].tolist() == [[0, 7]]


@pytest.mark.parametrize("kind", ["lists", "arrays", "tensors", "BatchEncoding", "bare"])
@pytest.mark.parametrize(
    "kwargs", [{}, {"mlm": False}, {"whole_word_mask": True}, {"rng": "torch"}, {"return_tensors": "np"}]
)
@pytest.mark.parametrize("count", [1, None])
def test_rows_are_never_changed(wordpiece, make_rows, kind, kwargs, count):
    convert = {"arrays": np.array, "tensors": torch.tensor}.get(kind, list)
    arguments = {"return_special_tokens_mask": True, "return_offsets_mapping": "whole_word_mask" in kwargs}
    rows = [{k: convert(v) for k, v in row.items()} | {"id": "x", "n": 3} for row in make_rows(wordpiece, **arguments)]
    rows = rows[:count]
    if kind == "BatchEncoding":
        rows = [BatchEncoding(row) for row in rows]
    if kind == "bare":
        rows = [row["input_ids"] for row in rows]
    before = copy.deepcopy(rows)
    batch = DataCollatorForMaskedLM(wordpiece, mlm_probability=1, **kwargs)(rows)
    for column in batch.values():
        if not isinstance(column, list):
            column[...] = 77  # nor does a later write reach them
    assert len(rows) == len(before)
    for row, expected in zip(rows, before, strict=True):
        if kind == "bare":
            row, expected = {"ids": row}, {"ids": expected}
        assert list(row) == list(expected)
        assert all(np.array_equal(row[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kwargs", [{}, {"mlm": False}, {"mlm_probability": 0}, {"rng": "torch"}])
def test_ids_and_labels_are_two_tensors(wordpiece, kwargs):
    batch = DataCollatorForMaskedLM(wordpiece, **kwargs)([[5, 6, 7]])
    before = batch["labels"].clone()
    batch["input_ids"].fill_(9)
    assert torch.equal(batch["labels"], before)


@pytest.mark.parametrize("return_tensors", ["pt", "np"])
@pytest.mark.parametrize("pad", ["[PAD]", "[SEP]", None])
def test_mlm_false_is_hugging_faces(wordpiece, make_rows, pad, return_tensors):
    wordpiece.pad_token = pad
    rows = make_rows(wordpiece, 20, 16)
    if pad is None:
        rows = [row for row in rows if len(row["input_ids"]) == 16]
    kwargs = {"mlm": False, "return_tensors": return_tensors}
    theirs = DataCollatorForLanguageModeling(wordpiece, **kwargs)(copy.deepcopy(rows)) if pad else None
    ours = DataCollatorForMaskedLM(wordpiece, **kwargs)(rows)
    if pad is None:  # Hugging Face's raises for dicts without a pad token, whatever their lengths
        assert (ours["labels"] == ours["input_ids"]).all()
    else:
        assert list(ours) == list(theirs)
        assert all((ours[name] == theirs[name]).all() and ours[name].dtype == theirs[name].dtype for name in theirs)


# Rates and random words.


@pytest.mark.parametrize("rng", ["philox", "torch"])
def test_rates(wordpiece, rng):
    batch = DataCollatorForMaskedLM(wordpiece, seed=1, rng=rng)(many(wordpiece, 128, 512))
    chosen = selected(batch)
    ids, labels = batch["input_ids"][chosen], batch["labels"][chosen]
    n = len(ids)
    masked, kept = (ids == wordpiece.mask_token_id).sum() / n, (ids == labels).sum() / n
    assert abs(chosen.float().mean() - 0.15) < 5 * (0.15 * 0.85 / chosen.numel()) ** 0.5
    assert abs(masked - (0.8 + 0.1 / 800)) < 5 * (0.16 / n) ** 0.5
    assert abs(kept - (0.1 + 0.1 / 800)) < 5 * (0.09 / n) ** 0.5


@pytest.mark.parametrize("one", [1, 1.0, True, np.float32(1), torch.tensor(1)])
@pytest.mark.parametrize("rng", ["philox", "torch"])
def test_probabilities_of_any_kind_of_number(wordpiece, one, rng):
    rows = [list(range(5, 105))]
    collator = DataCollatorForMaskedLM(wordpiece, True, False, one, one, 0, seed=1, rng=rng)
    batch = collator(rows)
    assert batch["labels"].tolist() == rows
    assert (batch["input_ids"] == 4).all()
    assert not selected(DataCollatorForMaskedLM(wordpiece, True, False, 0, 0, one, seed=1, rng=rng)(rows)).any()


def test_random_words_are_all_of_the_vocabulary_by_default(wordpiece):
    collator = DataCollatorForMaskedLM(wordpiece, True, False, 1.0, 0.0, 1.0, seed=1)
    batch = collator(many(wordpiece, 64, 512))
    assert batch["input_ids"].unique().numel() == 800  # 32768 draws: each id is missed with probability e^-41
    assert abs((batch["input_ids"] == batch["labels"]).float().mean() - 1 / 800) < 0.001


def test_exclude_original(wordpiece):
    collator = DataCollatorForMaskedLM(wordpiece, True, False, 1.0, 0.0, 1.0, seed=1, exclude_original=True)
    batch = collator(many(wordpiece, 64, 512))
    assert not (batch["input_ids"] == batch["labels"]).any()
    assert batch["input_ids"].unique().numel() == 800


def test_non_special_random_words(wordpiece):
    rows = many(wordpiece, 64, 512)
    wordpiece.add_special_tokens({"additional_special_tokens": ["<extra>"]})
    collator = DataCollatorForMaskedLM(wordpiece, True, False, 1.0, 0.0, 1.0, seed=1, random_words="non_special")
    drawn = collator(rows)["input_ids"].unique()
    assert drawn.tolist() == list(range(5, 800))
    collator.special_token_ids = [10]  # never selected, nor drawn; those of the tokenizer stay out as well
    drawn = collator([[20] * 30000])["input_ids"].unique()
    assert drawn.tolist() == [*range(5, 10), *range(11, 800)]


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, set], ids=lambda kind: kind.__name__)
def test_only_amino_acids_are_drawn_for_proteins(amino_acids, make_rows, kind):
    twenty = amino_acids.convert_tokens_to_ids(list("LAGVSERTIDPKQNFYMHWC"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # with a list of one's own there is nothing to warn of
        collator = DataCollatorForMaskedLM(amino_acids, True, False, 1.0, 0.0, 1.0, seed=1, random_words=kind(twenty))
    rows = make_rows(amino_acids, 50)
    for _ in range(2):  # the settings are compared at every batch
        batch = collator(rows)
        assert set(batch["input_ids"][selected(batch)].tolist()) == set(twenty)
    assert not (selected(batch) & torch.isin(originals(batch), torch.tensor(amino_acids.all_special_ids))).any()


def test_random_words_of_a_k_mer_model(wordpiece_core):
    """DNABERT: ids 0-4 are specials, all others k-mers; none of 0-4 may be drawn."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=wordpiece_core, mask_token="[MASK]", pad_token="[PAD]")
    collator = DataCollatorForMaskedLM(tokenizer, True, False, 1.0, 0.0, 1.0, seed=1, random_words=range(5, 69))
    batch = collator([{"input_ids": list(range(5, 69)) * 20}] * 4)
    assert batch["input_ids"].unique().tolist() == list(range(5, 69))


def test_one_warning_where_many_tokens_are_special(amino_acids, wordpiece, make_rows):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        collator = DataCollatorForMaskedLM(amino_acids)
        collator(make_rows(amino_acids))
        collator.mlm_probability = 0.3
        collator(make_rows(amino_acids))
    (warning,) = caught
    assert "15% of the vocabulary" in str(warning.message)
    assert "non_special" in str(warning.message)
    assert warning.filename == __file__  # it points at the caller
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DataCollatorForMaskedLM(wordpiece)
        DataCollatorForMaskedLM(amino_acids, random_words="non_special")
        DataCollatorForMaskedLM(amino_acids, random_replace_prob=0)
        assert DataCollatorForMaskedLM(amino_acids, mlm=False).mlm is False


# Numpy output and data sets.


@pytest.mark.parametrize("family", ["wordpiece", "unigram", "amino_acids"])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("epoch", [None, 2])
@pytest.mark.filterwarnings("ignore:15% of the vocabulary:UserWarning")
def test_numpy_output_equals_tensors(tokenizers, make_rows, family, whole, epoch):
    rows = make_rows(tokenizers[family], return_special_tokens_mask=True)
    batches = {}
    for kind in ("pt", "np"):
        collator = DataCollatorForMaskedLM(
            tokenizers[family], whole_word_mask=whole, mlm_probability=0.5, seed=9, return_tensors=kind
        )
        if epoch is not None:
            collator.set_epoch(epoch)
        batches[kind] = collator(rows)
    assert type(batches["np"]) is type(batches["pt"]) is BatchEncoding
    assert list(batches["np"]) == list(batches["pt"])
    for name, column in batches["np"].items():
        assert isinstance(column, np.ndarray)
        assert torch.equal(torch.from_numpy(column), batches["pt"][name])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning", "ignore:.*use of fork:DeprecationWarning")
def test_data_sets_of_every_format(wordpiece, make_rows, workers):
    rows = [row | {"idx": i, "url": f"u{i}", "score": i / 2} for i, row in enumerate(make_rows(wordpiece, 10))]
    dataset = Dataset.from_list(rows)
    collator = DataCollatorForMaskedLM(wordpiece, seed=1, mlm_probability=0.5)
    collator.set_epoch(0)
    expected = [collator(rows[:4]), collator(rows[4:8]), collator(rows[8:])]
    assert list(expected[0]) == [*rows[0], "labels"]
    for kind in (None, "numpy", "torch"):
        got = list(DataLoader(dataset.with_format(kind), batch_size=4, num_workers=workers, collate_fn=collator))
        assert len(got) == 3
        for batch, wanted in zip(got, expected, strict=True):
            assert set(batch) == set(wanted)  # datasets orders columns as it likes
            assert batch["url"] == wanted["url"]
            for name in set(wanted) - {"url"}:
                assert batch[name].dtype == wanted[name].dtype, (kind, name)
                assert torch.equal(batch[name], wanted[name]), (kind, name)

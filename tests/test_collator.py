"""``DataCollatorForMaskedLM`` as a user of Hugging Face's collator meets it: arguments, errors, rules, rates."""

import copy
import dataclasses
import functools
import pickle

import numpy as np
import pytest
import torch
from batches import SPECIALS, equal, many, originals, selected
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from fastmlm import DataCollatorForMaskedLM

# Drop-in: what user code relies on.


def test_arguments_are_hugging_faces_in_their_order():
    theirs = dataclasses.fields(DataCollatorForLanguageModeling)
    ours = dataclasses.fields(DataCollatorForMaskedLM)
    describe = lambda field: (field.name, field.default)  # noqa: E731
    assert [describe(f) for f in ours[: len(theirs)]] == [describe(f) for f in theirs]
    assert all(field.kw_only for field in ours[len(theirs) :])


def test_positional_arguments_and_isinstance(wordpiece):
    collator = DataCollatorForMaskedLM(wordpiece, True, True, 0.3, 0.5, 0.25, 16, "np", 7)
    assert isinstance(collator, DataCollatorForLanguageModeling)
    values = [getattr(collator, field.name) for field in dataclasses.fields(DataCollatorForLanguageModeling)]
    assert values == [wordpiece, True, True, 0.3, 0.5, 0.25, 16, "np", 7]
    assert set(collator([[5, 6]])) == {"input_ids", "attention_mask", "labels"}


class OldStyle(DataCollatorForMaskedLM):
    """What users wrote for Hugging Face's class, with its arguments and no others."""

    def torch_mask_tokens(self, inputs, special_tokens_mask=None, offset_mapping=None):
        self.calls = [*getattr(self, "calls", []), (inputs.clone(), special_tokens_mask, offset_mapping)]
        return inputs + 1, inputs * 0 - 100

    def numpy_mask_tokens(self, inputs, special_tokens_mask=None, offset_mapping=None):
        return inputs + 2, inputs * 0 - 100


@pytest.mark.parametrize("rng", ["philox", "torch"])
@pytest.mark.filterwarnings("ignore:Random token replacement is not supported:UserWarning")
def test_an_overridden_mask_function_is_called(wordpiece, rng):
    rows = [{"input_ids": [7, 8], "special_tokens_mask": [0, 1], "offset_mapping": [(0, 1), (1, 2)]}, ] * 2  # fmt: skip
    collator = OldStyle(wordpiece, whole_word_mask=True, rng=rng)
    assert collator(rows)["input_ids"].tolist() == [[8, 9], [8, 9]]
    ((inputs, special, offsets),) = collator.calls
    assert (inputs.tolist(), special.tolist()) == ([[7, 8]] * 2, [[0, 1]] * 2)
    assert offsets.tolist() == [[[0, 1], [1, 2]]] * 2
    assert collator(rows, return_tensors="np")["input_ids"].tolist() == [[9, 10], [9, 10]]


def test_a_mask_function_put_on_the_object(wordpiece):
    collator = DataCollatorForMaskedLM(wordpiece)
    collator.torch_mask_tokens = functools.partial(
        lambda k, inputs, special_tokens_mask, offset_mapping: (inputs * k,) * 2, 3
    )
    assert collator([[5, 6]])["labels"].tolist() == [[15, 18]]


def test_an_override_that_calls_super(wordpiece, make_rows):
    class Counting(DataCollatorForMaskedLM):
        def torch_mask_tokens(self, inputs, special_tokens_mask=None, offset_mapping=None):
            masked, labels = super().torch_mask_tokens(inputs, special_tokens_mask, offset_mapping)
            self.count = int((labels != -100).sum())
            return masked, labels

    collator = Counting(wordpiece, mlm_probability=1.0)
    batch = collator(make_rows(wordpiece))
    assert (
        collator.count
        == int(selected(batch).sum())
        == int((~torch.isin(originals(batch), torch.tensor(SPECIALS))).sum())
    )


class AddsNothing(DataCollatorForMaskedLM):
    """Hugging Face's arguments, handed on."""

    def torch_mask_tokens(self, inputs, special_tokens_mask=None, offset_mapping=None):
        return super().torch_mask_tokens(inputs, special_tokens_mask, offset_mapping)


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_override_that_adds_nothing_changes_nothing(wordpiece, make_rows, side):
    """Row keys and positions go by the attention mask, of which such an override knows nothing."""
    wordpiece.padding_side = side
    rows = make_rows(wordpiece, 5)
    batches = []
    for kind in (DataCollatorForMaskedLM, AddsNothing):
        collator = kind(wordpiece, seed=1, mlm_probability=0.5)
        collator.set_epoch(0)
        batches.append(collator(rows))
    assert equal(*batches)


def test_direct_calls_leave_their_inputs_alone(wordpiece):
    collator = DataCollatorForMaskedLM(wordpiece, mlm_probability=1, mask_replace_prob=1, random_replace_prob=0)
    ids = torch.tensor([[2, 50, 60, 3], [2, 70, 3, 0]])
    before = ids.clone()
    masked, labels = collator.torch_mask_tokens(ids, torch.tensor([[1, 0, 1, 1], [1, 0, 1, 1]]))
    assert torch.equal(ids, before)
    assert masked.tolist() == [[2, 4, 60, 3], [2, 4, 3, 0]]
    assert labels.tolist() == [[-100, 50, -100, -100], [-100, 70, -100, -100]]
    masked.zero_()
    labels.zero_()
    assert torch.equal(ids, before)


def test_direct_calls_with_arrays(wordpiece):
    collator = DataCollatorForMaskedLM(wordpiece, mlm_probability=1, mask_replace_prob=1, random_replace_prob=0)
    frozen = np.array([[2, 50, 3]])
    frozen.flags.writeable = False  # np.load(mmap_mode="r") and Arrow give such arrays
    for ids in (frozen, np.array([[3, 50, 2]])[:, ::-1], np.array([[2, 50, 3]], dtype=np.int32)):
        masked, labels = collator.numpy_mask_tokens(ids)
        assert (masked.tolist(), labels.tolist(), ids.tolist()) == ([[2, 4, 3]], [[-100, 50, -100]], [[2, 50, 3]])
        assert type(masked) is type(labels) is np.ndarray


COPIES = {
    "pickle": lambda collator: pickle.loads(pickle.dumps(collator)),
    "deepcopy": copy.deepcopy,
    "replace": dataclasses.replace,
}


@pytest.mark.parametrize("rng", ["philox", "torch"])
@pytest.mark.parametrize("kind", COPIES)
def test_copies_give_the_same_masks(wordpiece, make_rows, kind, rng):
    collator = DataCollatorForMaskedLM(wordpiece, mlm_probability=0.5, seed=3, pad_to_multiple_of=8, rng=rng)
    duplicate = COPIES[kind](collator)
    assert isinstance(duplicate, DataCollatorForMaskedLM)
    rows = make_rows(wordpiece)
    for _ in range(2):
        assert equal(duplicate(rows), collator(rows))


@pytest.mark.parametrize("kind", ["pickle", "deepcopy"])
def test_used_collators_copy_with_their_state(wordpiece, make_rows, kind):
    rows = make_rows(wordpiece)
    collator = DataCollatorForMaskedLM(wordpiece, mlm_probability=0.5, seed=3)
    collator(rows)
    duplicate = COPIES[kind](collator)
    assert equal(duplicate(rows), collator(rows))
    collator.set_epoch(4)
    duplicate = COPIES[kind](collator)
    assert equal(duplicate(rows), collator(rows))
    duplicate.set_epoch(5)  # of its own
    assert not equal(duplicate(rows), collator(rows))


def test_replace_changes_what_it_names(wordpiece):
    collator = dataclasses.replace(DataCollatorForMaskedLM(wordpiece, seed=1), mlm_probability=0.0)
    assert not selected(collator([[5] * 50])).any()


def test_attributes_changed_later_take_effect(wordpiece):
    collator = DataCollatorForMaskedLM(wordpiece, seed=1)
    rows = [list(range(5, 105))]
    collator.mlm_probability = 1.0
    assert selected(collator(rows)).all()
    collator.mask_replace_prob, collator.random_replace_prob = 1.0, 0.0
    assert (collator(rows)["input_ids"] == wordpiece.mask_token_id).all()
    collator.mask_replace_prob, collator.random_replace_prob, collator.random_words = 0.0, 1.0, [9]
    assert (collator(rows)["input_ids"] == 9).all()
    collator.special_token_ids = [7]
    assert selected(collator(rows)).sum() == 99
    collator.pad_to_multiple_of = 64
    assert collator(rows)["input_ids"].shape == (1, 128)
    collator.return_tensors = "np"
    assert isinstance(collator(rows)["input_ids"], np.ndarray)
    collator.mlm = False
    assert (collator(rows)["labels"][0, :100] == rows[0]).all()


def test_a_seed_changed_later_takes_effect(wordpiece):
    """Hugging Face reads ``seed`` when the first batch comes, so users do set it after construction."""
    rows = [list(range(5, 105))]
    collator = DataCollatorForMaskedLM(wordpiece, mlm_probability=0.5)
    collator.seed = 5
    expected = DataCollatorForMaskedLM(wordpiece, mlm_probability=0.5, seed=5)
    assert equal(collator(rows), expected(rows))


def test_tokens_added_later(wordpiece):
    collator = DataCollatorForMaskedLM(wordpiece, mlm_probability=1, seed=0)
    size = len(wordpiece)
    with pytest.raises(ValueError, match="input_ids"):  # ids that the tokenizer does not know
        collator([[5, size]])
    wordpiece.add_tokens(["fresh"])
    wordpiece.add_special_tokens({"additional_special_tokens": ["<sep2>"]})
    batch = collator([[5, size, size + 1]])
    assert batch["labels"].tolist() == [[5, size, -100]]
    wordpiece.add_special_tokens({"additional_special_tokens": ["the"]})  # an old word turns special: no growth
    the = wordpiece.convert_tokens_to_ids("the")
    assert collator([[5, the]])["labels"].tolist() == [[5, -100]]


# Errors: the same classes as Hugging Face's.


def no_mask(tokenizer):
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, pad_token="[PAD]")


def no_pad(tokenizer):
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, mask_token="[MASK]")


def itself(tokenizer):
    return tokenizer


RAGGED, EVEN = [{"input_ids": [5, 6]}, {"input_ids": [5]}], [{"input_ids": [5, 6]}] * 2
ERRORS = {
    "no mask token": (no_mask, {}, EVEN),
    "no pad token, ragged": (no_pad, {}, RAGGED),
    "no pad token, ragged ids": (no_pad, {}, [[5, 6], [5]]),
    "no pad token, ragged, mlm=False": (no_pad, {"mlm": False}, RAGGED),
    "probability above 1": (itself, {"mlm_probability": 1.5}, EVEN),
    "probability below 0": (itself, {"mlm_probability": -0.1}, EVEN),
    "probability None": (itself, {"mlm_probability": None}, EVEN),
    "probability a string": (itself, {"mlm_probability": "often"}, EVEN),
    "mask share above 1": (itself, {"mask_replace_prob": 1.2, "random_replace_prob": 0}, EVEN),
    "mask share below 0": (itself, {"mask_replace_prob": -0.2}, EVEN),
    "random share above 1": (itself, {"mask_replace_prob": 0, "random_replace_prob": 1.1}, EVEN),
    "random share below 0": (itself, {"random_replace_prob": -0.1}, EVEN),
    "sum above 1": (itself, {"mask_replace_prob": 0.8, "random_replace_prob": 0.3}, EVEN),
    "sum above 1, mlm=False": (itself, {"mlm": False, "mask_replace_prob": 0.8, "random_replace_prob": 0.3}, EVEN),
    "whole words, mlm=False": (itself, {"mlm": False, "whole_word_mask": True}, EVEN),
    "unknown return_tensors": (itself, {"return_tensors": "tf"}, EVEN),
    "no input_ids": (itself, {}, [{"label": 1}]),
}  # fmt: skip


@pytest.mark.parametrize("rng", ["philox", "torch"])
@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_of_hugging_faces_classes(wordpiece, case, rng):
    make, kwargs, rows = ERRORS[case]
    tokenizer = make(wordpiece)
    with pytest.raises(Exception) as theirs:  # noqa: PT011 - whichever it is, ours must be one too
        DataCollatorForLanguageModeling(tokenizer, **kwargs)(rows)
    with pytest.raises(theirs.type):
        DataCollatorForMaskedLM(tokenizer, rng=rng, **kwargs)(rows)


@pytest.mark.parametrize("kwargs", [{"rng": "numpy"}, {"random_words": "some"}, {"random_words": []}, {"impl": "cuda"}])
def test_own_arguments_are_checked(wordpiece, kwargs):
    (name,) = kwargs
    with pytest.raises(ValueError, match=name.replace("random_words", "random_(words|token_ids)")):
        DataCollatorForMaskedLM(wordpiece, **kwargs)([[5]])


@pytest.mark.parametrize("rng", ["philox", "torch"])
def test_no_rows(wordpiece, rng):
    with pytest.raises(ValueError, match="at least one row"):
        DataCollatorForMaskedLM(wordpiece, rng=rng)([])


@pytest.mark.parametrize("bad", [-1, 800])
def test_ids_outside_the_vocabulary(wordpiece, bad):
    for whole in (False, True):
        with pytest.raises(ValueError, match=rf"input_ids.*\b800\b.*{bad}"):
            DataCollatorForMaskedLM(wordpiece, whole_word_mask=whole)([[5, bad]])


# What Hugging Face's collator gets wrong.


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_narrow_tensors(wordpiece, dtype):
    collator = DataCollatorForMaskedLM(wordpiece, mlm_probability=1)
    batch = collator([torch.tensor([5, 6], dtype=dtype), torch.tensor([7], dtype=dtype)])
    assert {column.dtype for column in batch.values()} == {torch.int64}
    assert batch["labels"].tolist() == [[5, 6], [7, -100]]


def test_columns_of_strings_pass_through(wordpiece):
    rows = [{"input_ids": [5, 6], "id": "a"}, {"input_ids": [7], "id": "b"}]
    assert DataCollatorForMaskedLM(wordpiece)(rows)["id"] == ["a", "b"]
    assert DataCollatorForMaskedLM(wordpiece, mlm=False, return_tensors="np")(rows)["id"] == ["a", "b"]


@pytest.mark.parametrize("mlm", [True, False])
@pytest.mark.parametrize("rows", [EVEN, [[5, 6], [7, 8]]], ids=["dicts", "ids"])
def test_equal_lengths_need_no_pad_token(wordpiece, rows, mlm):
    tokenizer = no_pad(wordpiece)
    assert DataCollatorForMaskedLM(tokenizer, mlm=mlm)(rows)["attention_mask"].tolist() == [[1, 1], [1, 1]]


def test_bare_ids_keep_an_attention_mask(wordpiece):
    wordpiece.padding_side = "left"
    assert DataCollatorForMaskedLM(wordpiece)([[5, 6, 7], [8]])["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


def test_numpy_with_no_token_kept(wordpiece):
    """0.2 / (1 - 0.8) is a little above 1, where numpy's binomial raises."""
    collator = DataCollatorForMaskedLM(
        wordpiece,
        mlm_probability=1,
        mask_replace_prob=0.8,
        random_replace_prob=0.2,
        return_tensors="np",
        seed=1,
    )
    batch = collator(many(wordpiece))
    masked = (batch["input_ids"] == wordpiece.mask_token_id).mean()
    kept = (batch["input_ids"] == batch["labels"]).mean()
    assert abs(masked - 0.8) < 0.025  # 8192 tokens: 5 standard deviations
    assert kept < 0.004  # a random word is the original once in 800


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"seed": "x"}, "seed: expected an int, got str"),
        ({"seed": 1.5}, "seed: expected an int, got float"),
        ({"seed": True}, "seed: expected an int, got bool"),
        ({"seed": 1 << 64}, "seed: expected an int in .*, got 18446744073709551616"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of: expected an int in .*, got 0"),
        ({"pad_to_multiple_of": -8}, "pad_to_multiple_of: expected an int in .*, got -8"),
        ({"pad_to_multiple_of": 2.5}, "pad_to_multiple_of: expected an int, got float"),
        ({"rng": "torch", "random_words": [7]}, r"random_words: expected 'all' with rng='torch', got \[7\]"),
        ({"rng": "torch", "exclude_original": True}, "exclude_original: expected False with rng='torch', got True"),
        ({"rng": "torch", "impl": "reference"}, "impl: expected None with rng='torch', got 'reference'"),
    ],
)
def test_arguments_out_of_range_are_named(wordpiece, kwargs, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}$"):
        DataCollatorForMaskedLM(wordpiece, **kwargs)


def test_a_tokenizer_is_expected():
    with pytest.raises(TypeError, match="tokenizer: expected one of transformers, got str"):
        DataCollatorForMaskedLM("bert")


def test_numpy_integers_are_seeds_and_epochs(wordpiece, make_rows):
    rows = make_rows(wordpiece, 3)
    batches = []
    for kind in (int, np.int64, np.uint8):
        collator = DataCollatorForMaskedLM(wordpiece, seed=kind(3))
        collator.set_epoch(kind(2))
        batches.append(collator(rows))
    assert equal(batches[0], batches[1])
    assert equal(batches[0], batches[2])
    with pytest.raises(TypeError, match="epoch: expected an int, got float"):
        collator.set_epoch(1.5)


def test_one_row_is_no_batch(wordpiece):
    with pytest.raises(TypeError, match="features: expected a sequence of rows, got one dict"):
        DataCollatorForMaskedLM(wordpiece).torch_call({"input_ids": [7, 8]})


def test_rows_in_a_tuple(wordpiece):
    collator = DataCollatorForMaskedLM(wordpiece, mlm_probability=0)
    assert collator(((7, 8), (9,)))["input_ids"].tolist() == [[7, 8], [9, 0]]

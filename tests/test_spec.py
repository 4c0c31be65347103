"""MaskingSpec: thresholds exact, every bad setting named, safe to hash, copy and send to workers."""

import copy
import dataclasses
import pickle
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from fastmlm import MaskingSpec
from fastmlm.spec import RANDOM, SPECIAL, threshold, thresholds

TWO32 = 1 << 32


def exact(p: float) -> int:
    """T(p): Python rounds a Fraction half to even, with no floating point on the way."""
    return round(Fraction(p) * TWO32)


def spec(**settings: Any) -> MaskingSpec:
    return MaskingSpec(**{"mask_token_id": 3, "vocab_size": 100} | settings)


# ---- Thresholds ----

probabilities = st.floats(0, 1) | st.floats(0, 2**-20)


@given(probabilities)
def test_threshold_of_python_numbers(p: float) -> None:
    assert threshold(p) == exact(p)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@given(p=probabilities)
def test_thresholds_of_tensors_use_the_value_in_their_own_dtype(dtype: torch.dtype, p: float) -> None:
    tensor = torch.tensor([p], dtype=torch.float64).to(dtype)
    got = thresholds(tensor)
    assert got.dtype == torch.int64
    assert got.tolist() == [exact(tensor.item())]


def test_thresholds_round_half_to_even() -> None:
    halves = [k * 2.0**-33 for k in (1, 3, 5, 7, 2**33 - 1, 2**33 - 3)]  # k/2 after scaling: ties, all of them
    expected = [0, 2, 2, 4, 2**32, 2**32 - 2]
    assert [threshold(p) for p in halves] == expected
    assert thresholds(torch.tensor(halves, dtype=torch.float64)).tolist() == expected
    assert thresholds(torch.tensor(halves[:4])).tolist() == expected[:4]  # exact in float32 too


def test_thresholds_differ_between_dtypes() -> None:
    """0.15 is another number in each dtype; casting to float32 on the way would hide it."""
    found = {int(thresholds(torch.tensor(0.15, dtype=t))) for t in (torch.bfloat16, torch.float16, torch.float32)}
    assert len(found | {threshold(0.15)}) == 4


@pytest.mark.parametrize(
    "one", [1, 1.0, True, np.float32(1), np.int64(1), Fraction(1), torch.tensor(1), torch.tensor(True)]
)
def test_numbers_of_every_kind_are_probabilities(one: Any) -> None:
    made = spec(mlm_probability=one, mask_replace_prob=one, random_replace_prob=0)
    assert (made.mlm_probability, made.mask_threshold) == (1.0, TWO32)
    assert type(made.mlm_probability) is float


def test_thresholds_of_the_ends() -> None:
    assert (threshold(0), threshold(1)) == (0, TWO32)
    for dtype in (torch.float16, torch.float64, torch.int64, torch.bool):
        assert thresholds(torch.tensor([0, 1]).to(dtype)).tolist() == [0, TWO32]
    # A GPU cannot raise: there values are clamped.
    assert thresholds(torch.tensor([-0.5, 1.5, float("nan"), float("inf")])).tolist() == [0, TWO32, 0, TWO32]


@given(st.floats(0, 1), st.floats(0, 1))
def test_action_thresholds(mask: float, random: float) -> None:
    if mask + random > 1 or 0 < random < 100 * 2.0**-28:
        return
    made = spec(mask_replace_prob=mask, random_replace_prob=random)
    assert made.mask_threshold == exact(mask)
    assert made.random_threshold == min(TWO32, exact(mask) + exact(random))


# ---- Errors ----

BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"mask_token_id": None}, TypeError, "mask_token_id: expected an int, got NoneType"),
    ({"mask_token_id": "3"}, TypeError, "mask_token_id: expected an int, got str"),
    ({"mask_token_id": 3.0}, TypeError, "mask_token_id: expected an int, got float"),
    ({"mask_token_id": True}, TypeError, "mask_token_id: expected an int, got bool"),
    ({"mask_token_id": -1}, ValueError, r"mask_token_id: expected an int in \[0, 100\), got -1"),
    ({"mask_token_id": 100}, ValueError, r"mask_token_id: expected an int in \[0, 100\), got 100"),
    ({"vocab_size": 0}, ValueError, "vocab_size: expected .*, got 0"),
    ({"vocab_size": 1 << 31}, ValueError, "vocab_size: expected .*, got 2147483648"),
    ({"vocab_size": 100.0}, TypeError, "vocab_size: expected an int, got float"),
    ({"special_token_ids": (0, 100)}, ValueError, r"special_token_ids\[1\]: expected .*\[0, 100\), got 100"),
    ({"special_token_ids": (-1,)}, ValueError, r"special_token_ids\[0\]: expected .*, got -1"),
    ({"special_token_ids": (0, None)}, TypeError, r"special_token_ids\[1\]: expected an int, got NoneType"),
    ({"special_token_ids": torch.tensor([0.5])}, TypeError, r"special_token_ids\[0\]: expected an int, got float"),
    ({"special_token_ids": 5}, TypeError, "special_token_ids: expected .*, got int"),
    ({"special_token_ids": None}, TypeError, "special_token_ids: expected .*, got NoneType"),
    ({"special_token_ids": torch.tensor(5)}, TypeError, "special_token_ids: expected .*, got"),
    ({"mlm_probability": -0.1}, ValueError, "mlm_probability: expected a number between 0 and 1, got -0.1"),
    ({"mlm_probability": 1.1}, ValueError, "mlm_probability: expected a number between 0 and 1, got 1.1"),
    ({"mlm_probability": float("nan")}, ValueError, "mlm_probability: .*got nan"),
    ({"mlm_probability": "0.15"}, TypeError, "mlm_probability: expected a number between 0 and 1, got str"),
    ({"mlm_probability": None}, TypeError, "mlm_probability: .*got NoneType"),
    ({"mlm_probability": torch.tensor([0.1, 0.2])}, TypeError, "mlm_probability: .*got Tensor"),
    ({"mlm_probability": Decimal("0.1")}, TypeError, "mlm_probability: .*got Decimal"),
    ({"mask_replace_prob": 15}, ValueError, "mask_replace_prob: expected a number between 0 and 1, got 15"),
    ({"random_replace_prob": -1}, ValueError, "random_replace_prob: expected a number between 0 and 1, got -1"),
    (
        {"mask_replace_prob": 0.8, "random_replace_prob": 0.3},
        ValueError,
        r"mask_replace_prob \+ random_replace_prob: .*0.3",
    ),
    ({"random_token_ids": ()}, ValueError, "random_token_ids: expected distinct ids, at least one"),
    ({"random_token_ids": (4, 5, 4)}, ValueError, r"random_token_ids: expected distinct ids, .*\(4, 5, 4\)"),
    ({"random_token_ids": (4, 100)}, ValueError, r"random_token_ids\[1\]: expected .*got 100"),
    ({"random_token_ids": ("a",)}, TypeError, r"random_token_ids\[0\]: expected an int, got str"),
    ({"random_token_ids": 7}, TypeError, "random_token_ids: expected .*, got int"),
    (
        {"random_replace_prob": 99 * 2.0**-28},
        ValueError,
        "random_replace_prob: expected 0 or at least .* 100 random ids",
    ),
    ({"ignore_index": None}, TypeError, "ignore_index: expected an int, got NoneType"),
    ({"ignore_index": 1 << 31}, ValueError, "ignore_index: expected .*, got 2147483648"),
    ({"exclude_original": "no"}, TypeError, "exclude_original: expected .*, got str"),
]


@pytest.mark.parametrize(("settings", "error", "message"), BAD)
def test_every_bad_setting_is_named(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        spec(**settings)


def test_the_smallest_rate_of_random_ids() -> None:
    """Below K * 2^-28 an id might never be drawn, and M_K would not fit in 32 bits."""
    at = spec(random_replace_prob=100 * 2.0**-28, mask_replace_prob=0)
    assert (100 << 32) // (at.random_threshold - at.mask_threshold) <= 1 << 28
    few = spec(random_replace_prob=2 * 2.0**-28, random_token_ids=(8, 9))  # K is the size of the table, not of V
    assert few.random_count == 2
    with pytest.raises(ValueError, match="random_replace_prob"):
        spec(random_replace_prob=1.9 * 2.0**-28, random_token_ids=(8, 9))


# ---- A value object ----


def test_defaults_are_berts() -> None:
    made = MaskingSpec(103, 30522)
    assert (made.mlm_probability, made.mask_replace_prob, made.random_replace_prob) == (0.15, 0.8, 0.1)
    assert (made.special_token_ids, made.random_token_ids) == ((), None)
    assert (made.exclude_original, made.ignore_index, made.random_count) == (False, -100, 30522)


def test_frozen() -> None:
    made = spec()
    for name in ("mlm_probability", "mask_threshold", "new"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, name, 0.5)


def test_equal_settings_are_equal_and_hash_alike() -> None:
    one = spec(special_token_ids=[2, 0, 2], random_token_ids=torch.tensor([9, 5]))
    two = spec(special_token_ids=(0, 2), random_token_ids=np.array([9, 5]), mlm_probability=np.float64(0.15))
    two.tables(torch.device("cpu"))  # what was built is no part of what it is
    assert one == two
    assert hash(one) == hash(two)
    assert len({one, two, spec(), spec(mlm_probability=0.2)}) == 3
    assert spec(random_token_ids=(5, 9)) != one  # the order of the table is part of the law


@pytest.mark.parametrize(
    "clone", [lambda x: pickle.loads(pickle.dumps(x)), copy.copy, copy.deepcopy, dataclasses.replace]
)
def test_copies(clone: Any) -> None:
    made = spec(special_token_ids=(0, 1), random_token_ids=(9, 5), mask_replace_prob=0.5)
    made.tables(torch.device("cpu"))
    other = clone(made)
    assert other == made
    assert (other.mask_threshold, other.random_threshold) == (made.mask_threshold, made.random_threshold)
    for ours, theirs in zip(made.tables(torch.device("cpu")), other.tables(torch.device("cpu")), strict=True):
        assert torch.equal(ours, theirs)


def test_pickles_do_not_carry_tables() -> None:
    made = MaskingSpec(3, 200_000)
    made.tables(torch.device("cpu"))
    assert len(pickle.dumps(made)) < 2000


def test_tables() -> None:
    flags, random_ids = spec(vocab_size=6, special_token_ids=(0, 5), random_token_ids=(5, 2)).tables(
        torch.device("cpu")
    )
    assert flags.dtype == torch.uint8
    assert flags.tolist() == [SPECIAL, 0, RANDOM, 0, 0, SPECIAL | RANDOM]
    assert random_ids is not None
    assert random_ids.dtype == torch.int64
    assert random_ids.tolist() == [5, 2]
    flags, random_ids = spec(vocab_size=4, special_token_ids=(1,)).tables(torch.device("cpu"))
    assert flags.tolist() == [RANDOM, SPECIAL | RANDOM, RANDOM, RANDOM]
    assert random_ids is None


# ---- From a tokenizer ----


def tokenizer(vocabulary: dict[str, int] | None = None, **tokens: str) -> PreTrainedTokenizerFast:
    vocabulary = vocabulary or {"[PAD]": 0, "[UNK]": 1, "[MASK]": 2, "a": 3, "b": 4}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(
        tokenizer_object=model, **{"unk_token": "[UNK]", "pad_token": "[PAD]", "mask_token": "[MASK]"} | tokens
    )


def test_from_tokenizer() -> None:
    made = MaskingSpec.from_tokenizer(tokenizer())
    assert made == MaskingSpec(2, 5, special_token_ids=(0, 1, 2))
    assert made.random_token_ids is None


def test_from_tokenizer_without_a_mask_token() -> None:
    with pytest.raises(ValueError, match=r"tokenizer: expected one with a mask token, got \w+ without"):
        MaskingSpec.from_tokenizer(tokenizer(mask_token=None))


def test_from_tokenizer_counts_added_tokens() -> None:
    grown = tokenizer()
    grown.add_tokens(["new", "newer"])
    grown.add_special_tokens({"cls_token": "[CLS]"})
    assert MaskingSpec.from_tokenizer(grown) == MaskingSpec(2, 8, special_token_ids=(0, 1, 2, 7))


def test_from_tokenizer_with_gaps_draws_only_ids_that_exist() -> None:
    made = MaskingSpec.from_tokenizer(tokenizer({"[PAD]": 0, "[UNK]": 1, "[MASK]": 5, "a": 9, "b": 12}))
    assert (made.mask_token_id, made.vocab_size) == (5, 13)
    assert made.random_token_ids == (0, 1, 5, 9, 12)


def test_from_tokenizer_takes_overrides() -> None:
    made = MaskingSpec.from_tokenizer(tokenizer(), mlm_probability=0.4, special_token_ids=(), random_token_ids=[3])
    assert (made.mlm_probability, made.special_token_ids, made.random_token_ids) == (0.4, (), (3,))
    with pytest.raises(TypeError, match="mlm_prob"):
        MaskingSpec.from_tokenizer(tokenizer(), mlm_prob=0.4)

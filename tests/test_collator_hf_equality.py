"""Whole batches equal to Hugging Face's collator under ``rng="torch"``: container, keys, order, dtypes, every value."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import BatchEncoding, DataCollatorForLanguageModeling

from fastmlm import DataCollatorForMaskedLM

# A machine with one core makes DataLoader advise against two workers; newer Pythons advise against forks.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]
FAMILIES = ["wordpiece", "byte_level", "unigram", "amino_acids", "slow_bert"]
SPLITS = [(0.8, 0.1), (0, 0), (1, 0), (0, 1), (0.8, 0.2), (0.5, 0.5), (0.3, 0.0), (0.0, 0.4)]


def assert_same(ours, theirs) -> None:
    assert type(ours) is type(theirs)
    assert list(ours) == list(theirs)
    for name, expected in theirs.items():
        assert type(ours[name]) is type(expected), name
        assert ours[name].dtype == expected.dtype, name
        assert ours[name].shape == expected.shape, name
        assert bool((ours[name] == expected).all()), name


def run(cls, tokenizer, batches, global_seed=11, **kwargs):
    """Successive batches of one collator, after seeding every global generator."""
    collator = cls(tokenizer, **kwargs)
    torch.manual_seed(global_seed)
    np.random.seed(global_seed)  # what Hugging Face's numpy path draws from
    return [collator(batch) for batch in batches]


def both(tokenizer, batches, **kwargs):
    theirs = run(DataCollatorForLanguageModeling, tokenizer, [[*batch] for batch in batches], **kwargs)
    ours = run(DataCollatorForMaskedLM, tokenizer, batches, rng="torch", **kwargs)
    for one, other in zip(ours, theirs, strict=True):
        assert_same(one, other)
    return ours


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("split", SPLITS)
def test_replacement_splits(wordpiece, make_rows, split, seed):
    rows = make_rows(wordpiece, 12)
    ours = both(
        wordpiece,
        [rows[:6], rows[6:], rows[:6]],
        mask_replace_prob=split[0],
        random_replace_prob=split[1],
        mlm_probability=0.5,
        seed=seed,
    )
    assert not torch.equal(ours[0]["labels"], ours[2]["labels"])  # the stream goes on from batch to batch


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("split", [split for split in SPLITS if split != (0.8, 0.2)])  # there Hugging Face crashes
def test_replacement_splits_in_numpy(wordpiece, make_rows, split, seed):
    rows = make_rows(wordpiece, 12)
    both(
        wordpiece,
        [rows[:6], rows[6:], rows[:6]],
        mask_replace_prob=split[0],
        random_replace_prob=split[1],
        mlm_probability=0.5,
        seed=seed,
        return_tensors="np",
    )


@pytest.mark.parametrize("return_tensors", ["pt", "np"])
@pytest.mark.parametrize("probability", [0, 0.0, 1, 1.0, 0.15, 1e-6])
def test_probabilities(byte_level, make_rows, probability, return_tensors):
    both(byte_level, [make_rows(byte_level)], mlm_probability=probability, seed=3, return_tensors=return_tensors)


@pytest.mark.parametrize("special_column", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_sides_and_special_rules(tokenizers, make_rows, family, side, special_column):
    tokenizer = tokenizers[family]
    tokenizer.padding_side = side
    rows = make_rows(tokenizer, 8, return_special_tokens_mask=special_column)
    rows[1]["input_ids"][3] = tokenizer.unk_token_id  # where the two rules for specials disagree
    rows[2]["input_ids"][2] = tokenizer.mask_token_id
    both(tokenizer, [rows[:5], rows[5:]], mlm_probability=0.6, seed=1)


@pytest.mark.parametrize("mlm", [True, False])
@pytest.mark.parametrize("multiple", [None, 1, 7, 8, 64])
@pytest.mark.parametrize("ragged", [True, False])
def test_padding_to_a_multiple(wordpiece, make_rows, multiple, ragged, mlm):
    rows = make_rows(wordpiece)
    if not ragged:
        rows = [{name: values[:9] for name, values in row.items()} for row in rows if len(row["input_ids"]) >= 9]
    both(wordpiece, [rows, rows[:1]], pad_to_multiple_of=multiple, mlm=mlm, seed=5)


KINDS = {
    "lists": lambda row: row,
    "tensors": lambda row: {name: torch.tensor(values) for name, values in row.items()},
    "arrays": lambda row: {name: np.array(values) for name, values in row.items()},
    "BatchEncoding": BatchEncoding,
    "BatchEncoding of tensors": lambda row: BatchEncoding({k: torch.tensor(v) for k, v in row.items()}),
    "only ids": lambda row: {"input_ids": row["input_ids"]},
    "ids last": lambda row: dict(reversed(row.items())),
}


@pytest.mark.parametrize("return_tensors", ["pt", "np"])
@pytest.mark.parametrize("mlm", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_rows(wordpiece, make_rows, kind, mlm, return_tensors):
    rows = [KINDS[kind](row) for row in make_rows(wordpiece, 7)]
    (batch, _) = both(wordpiece, [rows[:4], rows[4:]], mlm=mlm, return_tensors=return_tensors, seed=0)
    assert type(batch) is BatchEncoding


@pytest.mark.parametrize("return_tensors", ["pt", "np"])
@pytest.mark.parametrize("mlm", [True, False])
@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, np.array])
@pytest.mark.parametrize("family", ["byte_level", "unigram"])  # one pads right, the other left
def test_bare_ids(tokenizers, make_rows, family, kind, mlm, return_tensors):
    if return_tensors == "np" and kind is torch.tensor:
        kind = list  # Hugging Face's numpy path cannot pad tensors
    tokenizer = tokenizers[family]
    rows = [kind(row["input_ids"]) for row in make_rows(tokenizer)]
    kwargs = {"mlm": mlm, "return_tensors": return_tensors, "seed": 2, "pad_to_multiple_of": 8}
    (theirs,) = run(DataCollatorForLanguageModeling, tokenizer, [rows], **kwargs)
    (ours,) = run(DataCollatorForMaskedLM, tokenizer, [rows], rng="torch", **kwargs)
    attention_mask = ours.pop("attention_mask")  # ours alone has one
    assert type(ours) is dict
    assert_same(ours, theirs)
    assert attention_mask.sum(1).tolist() == [len(row) for row in rows]


@pytest.mark.parametrize("return_tensors", ["pt", "np"])
def test_extra_columns_of_numbers(wordpiece, make_rows, return_tensors):
    rows = make_rows(wordpiece)
    for i, row in enumerate(rows):
        row |= {"label": i, "score": i / 7, "flag": i % 2 == 0, "vector": [0.5, i, 2.0], "pair": [i, i + 1]}
    both(wordpiece, [rows], seed=4, return_tensors=return_tensors)


@pytest.mark.parametrize("return_tensors", ["pt", "np"])
def test_labels_in_the_rows_are_replaced(wordpiece, make_rows, return_tensors):
    rows = [{name: values[:8] for name, values in row.items()} for row in make_rows(wordpiece)]
    rows = [row | {"labels": row["input_ids"]} for row in rows]
    both(wordpiece, [rows], seed=4, return_tensors=return_tensors)


@pytest.mark.parametrize("special_column", [True, False])
def test_offsets_are_dropped_without_whole_words(wordpiece, make_rows, special_column):
    rows = make_rows(wordpiece, return_offsets_mapping=True, return_special_tokens_mask=special_column)
    rows = [{name: values[:9] for name, values in row.items()} for row in rows if len(row["input_ids"]) >= 9]
    (batch,) = both(wordpiece, [rows], seed=4)
    assert "offset_mapping" not in batch


@pytest.mark.filterwarnings("ignore:Random token replacement is not supported:UserWarning")  # Hugging Face's own
@pytest.mark.parametrize("seed", [None, 9])
@pytest.mark.parametrize("return_tensors", ["pt", "np"])
@pytest.mark.parametrize("family", ["wordpiece", "byte_level", "unigram"])
@pytest.mark.parametrize("special_column", [True, False])
def test_whole_words(tokenizers, make_rows, family, return_tensors, seed, special_column):
    tokenizer = tokenizers[family]
    arguments = {"return_offsets_mapping": True, "return_special_tokens_mask": special_column}
    rows = [row for row in make_rows(tokenizer, 20, 24, **arguments) if len(row["input_ids"]) == 24]
    kwargs = {"whole_word_mask": True, "mlm_probability": 0.4, "return_tensors": return_tensors, "seed": seed}
    ours = both(tokenizer, [rows[:4], rows[4:]], **kwargs)
    assert any((batch["labels"] != -100).any() for batch in ours)


@pytest.mark.parametrize("return_tensors", ["pt", "np"])
def test_dataloader_workers_give_the_same_bits(wordpiece, make_rows, return_tensors):
    rows = make_rows(wordpiece, 24)
    batches = {}
    for cls, extra in ((DataCollatorForLanguageModeling, {}), (DataCollatorForMaskedLM, {"rng": "torch"})):
        collator = cls(wordpiece, seed=13, return_tensors=return_tensors, **extra)
        # The generator of the parent must not be used up, or carried over, by the workers.
        first = collator(rows[:4])
        loader = DataLoader(rows, batch_size=4, num_workers=2, collate_fn=collator)
        batches[cls] = [first, *loader, collator(rows[:4])]
    for ours, theirs in zip(batches[DataCollatorForMaskedLM], batches[DataCollatorForLanguageModeling], strict=True):
        assert_same(ours, theirs)


def test_the_mask_functions_called_directly(wordpiece, make_rows):
    ids = torch.tensor([row["input_ids"][:8] for row in make_rows(wordpiece) if len(row["input_ids"]) >= 8])
    special = torch.zeros_like(ids)
    theirs, ours = DataCollatorForLanguageModeling(wordpiece), DataCollatorForMaskedLM(wordpiece, rng="torch")
    for arguments in ((), (special,), (None, None)):
        torch.manual_seed(5)
        expected = theirs.torch_mask_tokens(ids.clone(), *arguments)
        torch.manual_seed(5)
        got = ours.torch_mask_tokens(ids, *arguments)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_changed_seed_and_a_reset_generator(wordpiece, make_rows):
    rows = make_rows(wordpiece)
    results = []
    for cls, extra in ((DataCollatorForLanguageModeling, {}), (DataCollatorForMaskedLM, {"rng": "torch"})):
        collator = cls(wordpiece, seed=1, **extra)
        collator(rows)
        collator.seed = 2
        collator.create_rng()
        results.append([collator(rows), collator.get_generator(3).initial_seed()])
    assert_same(results[1][0], results[0][0])
    assert results[0][1] == results[1][1] == 3


@pytest.mark.parametrize("return_tensors", ["pt", "np"])
def test_call_argument_overrides_return_tensors(wordpiece, make_rows, return_tensors):
    rows, other = make_rows(wordpiece), {"pt": "np", "np": "pt"}[return_tensors]
    ours = DataCollatorForMaskedLM(wordpiece, seed=1, rng="torch", return_tensors=other)
    theirs = DataCollatorForLanguageModeling(wordpiece, seed=1, return_tensors=other)
    for kind in (other, return_tensors, other):  # the generator follows
        assert_same(ours(rows, return_tensors=kind), theirs(rows, return_tensors=kind))


def test_tokens_that_become_special_later(wordpiece, make_rows):
    """Hugging Face asks the tokenizer at every batch; a settings cache must not go stale."""
    rows = make_rows(wordpiece)
    theirs = DataCollatorForLanguageModeling(wordpiece, seed=1, mlm_probability=0.9)
    ours = DataCollatorForMaskedLM(wordpiece, seed=1, mlm_probability=0.9, rng="torch")
    assert_same(ours(rows), theirs(rows))
    wordpiece.add_tokens(["brandnew"])  # grows what random words are drawn from
    assert_same(ours(rows), theirs(rows))
    wordpiece.add_special_tokens({"additional_special_tokens": ["the"]})  # the vocabulary stays as large as it was
    assert_same(ours(rows), theirs(rows))

"""Whole words: read off the vocabulary, offsets or word_ids; selected as a whole, replaced token by token."""

import numpy as np
import pytest
import torch

from fastmlm import DataCollatorForMaskedLM
from fastmlm.strategies import words

MARKED = ["wordpiece", "byte_level", "unigram"]
SOURCES = ["vocabulary", "offset_mapping", "word_ids"]


def encode(tokenizer, texts, source) -> tuple[list[dict], list[list]]:
    """Rows with the columns of one source of words, and the tokenizer's own word_ids of each row."""
    rows, word_ids = [], []
    for text in texts:
        encoded = tokenizer(text, truncation=True, max_length=100, return_offsets_mapping=source == "offset_mapping")
        special = set(tokenizer.all_special_ids)  # an [UNK] is never selected, and parts the word it stands in
        pairs = zip(encoded["input_ids"], encoded.word_ids(), strict=True)
        word_ids.append([None if token in special else word for token, word in pairs])
        rows.append(dict(encoded) | ({"word_ids": encoded.word_ids()} if source == "word_ids" else {}))
    return rows, word_ids


def groups(values) -> list[list[int]]:
    """Positions grouped by runs of one value; None (special tokens) left out."""
    runs: dict = {}
    run = 0
    for position, value in enumerate(values):
        run += position > 0 and value != values[position - 1]
        if value is not None:
            runs.setdefault(run, []).append(position)
    return list(runs.values())


def draws(tokenizer, rows, times, **kwargs):
    """(times, B, S) bool: what many batches of the same rows select."""
    collator = DataCollatorForMaskedLM(tokenizer, whole_word_mask=True, mlm_probability=0.5, seed=5, **kwargs)
    return torch.stack([collator(rows)["labels"] != -100 for _ in range(times)])


def selected_together(drawn, row, length, shift) -> list[list[int]]:
    """The row's positions grouped by their fate over all draws; what is never selected left out."""
    columns = drawn[:, row, shift : shift + length].T
    fates = [None if not column.any() else tuple(column.tolist()) for column in columns]
    return groups(fates)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("family", MARKED)
def test_words_are_never_split(tokenizers, sentences, family, source, side):
    """Rows of very different lengths, padded on either side, which makes Hugging Face's crash."""
    tokenizer = tokenizers[family]
    tokenizer.padding_side = side
    rows, word_ids = encode(tokenizer, sentences[:8], source)
    drawn = draws(tokenizer, rows, 60)  # two words share a fate by chance with probability 2^-60
    for i, ids in enumerate(word_ids):
        together = selected_together(drawn, i, len(ids), drawn.shape[2] - len(ids) if side == "left" else 0)
        unit_of = {position: n for n, unit in enumerate(together) for position in unit}
        assert set(unit_of) == {position for position, word in enumerate(ids) if word is not None}
        for word in groups(ids):
            assert len({unit_of[position] for position in word}) == 1
        if len(ids) > 20:  # a whole sentence taken for one word would pass the test above
            assert len(together) > len(groups(ids)) / 3


@pytest.mark.parametrize(
    ("family", "source"),
    [("wordpiece", "vocabulary"), ("wordpiece", "offset_mapping"), *((f, "word_ids") for f in MARKED)],
)
def test_words_are_exactly_the_tokenizers(tokenizers, sentences, family, source):
    """Punctuation stands alone: "iterator," is two words, "don't" three."""
    tokenizer = tokenizers[family]
    rows, word_ids = encode(tokenizer, ["the iterator, don't stop (yet).", *sentences[:5]], source)
    shift = lambda ids: drawn.shape[2] - len(ids) if tokenizer.padding_side == "left" else 0  # noqa: E731
    drawn = draws(tokenizer, rows, 60)
    for i, ids in enumerate(word_ids):
        assert selected_together(drawn, i, len(ids), shift(ids)) == groups(ids)


@pytest.mark.parametrize("source", ["vocabulary", "offset_mapping"])
@pytest.mark.parametrize("family", MARKED)
def test_words_by_white_space(tokenizers, family, source):
    """However a tokenizer counts the space in its offsets, two words with a space between them are two."""
    tokenizer = tokenizers[family]
    rows, _ = encode(tokenizer, ["assignment statements evaluate the expression list"], source)
    drawn = draws(tokenizer, rows, 60)
    assert len(selected_together(drawn, 0, drawn.shape[2], 0)) == 6


def test_chinese_characters_are_words_of_their_own(wordpiece):
    """No spaces in between, so offsets alone would make the sentence one word."""
    wordpiece.add_tokens(list("使用语言模型"))
    for source in SOURCES:
        rows, _ = encode(wordpiece, ["使用语言模型"], source)
        drawn = draws(wordpiece, rows, 60)
        assert selected_together(drawn, 0, 8, 0) == [[i] for i in range(1, 7)]


def test_words_from_an_outside_segmenter(wordpiece):
    """Chinese whole words by jieba or LTP: word_ids from anywhere, here as an array."""
    wordpiece.add_tokens(list("使用语言模型"))
    ids = wordpiece("使用语言模型")["input_ids"]
    rows = [
        {"input_ids": ids, "word_ids": np.array([-1, 0, 0, 1, 1, 2, 2, -1])},
        {"input_ids": ids[:3], "word_ids": np.array([-1, 4, 4])},
    ]
    drawn = draws(wordpiece, rows, 60)
    assert selected_together(drawn, 0, 8, 0) == [[1, 2], [3, 4], [5, 6]]
    assert selected_together(drawn, 1, 3, 0) == [[1, 2]]
    assert "word_ids" not in DataCollatorForMaskedLM(wordpiece, whole_word_mask=True)(rows)


def test_characters_and_amino_acids_are_words_of_their_own(amino_acids, make_rows):
    rows = make_rows(amino_acids)
    drawn = draws(amino_acids, rows, 60, random_words="non_special")
    for i, row in enumerate(rows):
        n = len(row["input_ids"])
        assert selected_together(drawn, i, n, 0) == [[position] for position in range(1, n - 1)]


def test_slow_tokenizers_need_no_offsets(slow_bert, wordpiece, sentences):
    rows, word_ids = encode(wordpiece, sentences[:5], "vocabulary")
    drawn = draws(slow_bert, rows, 60)
    for i, ids in enumerate(word_ids):
        assert selected_together(drawn, i, len(ids), 0) == groups(ids)


def test_a_special_token_ends_a_word(wordpiece):
    """A continuation after [UNK], [SEP] or a hole starts a word: it cannot hang on what is never selected."""
    continuation = next(i for token, i in wordpiece.get_vocab().items() if token.startswith("##"))
    row = {"input_ids": [continuation, 50, continuation, 1, continuation, continuation, 3, continuation]}
    drawn = draws(wordpiece, [row], 60)
    assert selected_together(drawn, 0, 8, 0) == [[0], [1, 2], [4, 5], [7]]
    row["attention_mask"] = [1, 1, 0, 1, 1, 1, 1, 1]
    assert selected_together(draws(wordpiece, [row], 60), 0, 8, 0) == [[0], [1], [4, 5], [7]]


def test_a_column_that_says_nothing_new_changes_nothing(wordpiece):
    """Tokenizers leave [UNK] out of special_tokens_mask; words must end at it all the same."""
    continuation = next(i for token, i in wordpiece.get_vocab().items() if token.startswith("##"))
    row = {"input_ids": [2, *[50, continuation, 1, continuation, continuation] * 30, 3]}
    collator = DataCollatorForMaskedLM(wordpiece, whole_word_mask=True, mlm_probability=0.5, seed=1)
    collator.set_epoch(0)
    labels = collator([row])["labels"]
    for column in ([1, *[0] * 150, 1], [0] * 152):
        assert torch.equal(collator([row | {"special_tokens_mask": column}])["labels"], labels)


def test_words_across_row_keys_and_padding(wordpiece, sentences):
    """With an epoch told, whole-word masks do not depend on padding either."""
    rows, _ = encode(wordpiece, sentences[:6], "vocabulary")
    collator = DataCollatorForMaskedLM(wordpiece, whole_word_mask=True, mlm_probability=0.4, seed=1)
    collator.set_epoch(0)
    alone = [collator([row]) for row in rows]
    for side in ("left", "right"):
        wordpiece.padding_side = side
        batch = collator(rows)
        for i, single in enumerate(alone):
            real = batch["attention_mask"][i] == 1
            assert torch.equal(batch["labels"][i][real], single["labels"][0])
            assert torch.equal(batch["input_ids"][i][real], single["input_ids"][0])


def test_rates_of_whole_words(wordpiece):
    """Selected by word at the given rate; 80/10/10 by token inside it, where Hugging Face forces 100 % [MASK]."""
    head = next(i for token, i in wordpiece.get_vocab().items() if token == "the")
    tail = [i for token, i in wordpiece.get_vocab().items() if token.startswith("##")][:3]
    rows = [{"input_ids": [head, *tail] * 100} for _ in range(200)]
    batch = DataCollatorForMaskedLM(wordpiece, whole_word_mask=True, seed=2)(rows)
    chosen = batch["labels"] != -100
    by_word = chosen.view(-1, 4)
    assert torch.equal(by_word.all(1), by_word.any(1))
    assert abs(by_word[:, 0].float().mean() - 0.15) < 5 * (0.15 * 0.85 / 20000) ** 0.5
    ids, labels = batch["input_ids"][chosen], batch["labels"][chosen]
    masked, kept = ids == 4, ids == labels
    n = len(ids)
    assert abs(masked.float().mean() - (0.8 + 0.1 / 800)) < 5 * (0.16 / n) ** 0.5
    assert abs(kept.float().mean() - (0.1 + 0.1 / 800)) < 5 * (0.09 / n) ** 0.5
    words_masked = masked.view(-1, 4).all(1).float().mean()
    assert abs(words_masked - 0.8**4) < 5 * (0.41 * 0.59 * 4 / n) ** 0.5  # tokens of a word draw their fates alone


def test_no_warnings_and_no_change_of_the_split(slow_bert):
    collator = DataCollatorForMaskedLM(slow_bert, whole_word_mask=True)  # warnings are errors here
    assert (collator.mask_replace_prob, collator.random_replace_prob) == (0.8, 0.1)


def test_marks_follow_added_tokens(wordpiece):
    collator = DataCollatorForMaskedLM(wordpiece, whole_word_mask=True, mlm_probability=1.0)
    collator([[50, 60]])
    wordpiece.add_tokens(["fresh"])
    assert collator([[50, 800]])["labels"].tolist() == [[50, 800]]


def test_starts_from_each_source():
    word_ids = torch.tensor([[-1, 0, 0, 1, -1, -1, 1]])
    assert words.starts_from_word_ids(word_ids).tolist() == [[True, True, False, True, True, True, True]]
    offsets = torch.tensor([[[0, 0], [0, 3], [3, 5], [6, 8], [0, 0]]])
    starts = words.starts_from_offsets(offsets)
    assert starts[0, 2:].tolist() == [False, True, True]  # what follows [CLS] is for units() to say


def test_units_name_first_tokens_from_the_first_real_one():
    starts = torch.tensor([[True, False, True, False, False, True]] * 2)
    special = torch.tensor([[True, True, False, False, False, False], [False] * 6])
    real = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    assert words.units(starts, special, real)[0, 2:].tolist() == [0, 0, 0, 3]
    assert words.units(starts, special, real)[1].tolist() == [0, 0, 2, 2, 2, 5]
    assert words.units(starts, special, None)[0].tolist() == [0, 1, 2, 2, 2, 5]
    hole = torch.tensor([[False, False, True, False, False]])
    assert words.units(torch.zeros(1, 5, dtype=torch.bool), hole, None).tolist() == [[0, 0, 2, 3, 3]]
    assert words.units(starts[:, :0], special[:, :0], None).shape == (2, 0)


def test_line_breaks_part_words() -> None:
    """Byte-level BPE writes a line break as Ċ, and the word after it bears no mark of its own."""
    tokenizer = Vocabulary("a", "Ġb", "c", "Ċ", "next", "ĊĠ", "d")
    ids = torch.tensor([[0, 1, 2, 3, 4, 2, 5, 6]])  # a | b c | \n | next c | \n | d
    marks = words.marks_by_id(tokenizer)
    units = words.units(words.starts_from_marks(marks[ids]), torch.zeros_like(ids, dtype=torch.bool), None)
    assert units.tolist() == [[0, 1, 1, 3, 4, 4, 6, 7]]


def test_a_lone_space_marks_no_words() -> None:
    """A vocabulary of bases has the space as a token, but no token that begins with one: every base is a word."""
    assert (words.marks_by_id(Vocabulary("A", "C", "G", "T", "Ġ")) == words.STARTS).all()


class Vocabulary:
    def __init__(self, *tokens: str) -> None:
        self.tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}

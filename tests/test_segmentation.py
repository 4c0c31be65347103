"""Words from outside the vocabulary: segmenters of Chinese, and BERT-wwm's reference files."""

import json
from typing import Any

import pytest
import torch
from test_words import groups, selected_together

from fastmlm import DataCollatorForMaskedLM
from fastmlm.strategies import WholeWords, reference_words, segmented_words

TEXT = "使用语言模型来预测 下一个词。"
WORDS = ["使用", "语言", "模型", "来", "预测", "下一个", "词", "。"]


@pytest.fixture
def chinese(wordpiece) -> Any:
    """BERT's way with Chinese: every character is a token."""
    wordpiece.add_tokens(sorted(set(TEXT) - {" "}))
    return wordpiece


def fates(tokenizer: Any, row: dict[str, Any], times: int = 60) -> list[list[int]]:
    """Positions that are always selected together."""
    collator = DataCollatorForMaskedLM(tokenizer, strategy=WholeWords(), mlm_probability=0.5, seed=5)
    drawn = []
    for epoch in range(times):
        collator.set_epoch(epoch)
        drawn.append(collator([row])["labels"] != -100)
    return selected_together(torch.stack(drawn), 0, len(row["input_ids"]), 0)


@pytest.mark.parametrize("spaces", [False, True], ids=["without spaces", "with spaces"])
def test_a_segmenters_words(chinese, spaces) -> None:
    """Whether a segmenter gives the spaces between words, as jieba does, or not."""
    given = [*WORDS[:5], " ", *WORDS[5:]] if spaces else WORDS
    encoding = chinese(TEXT, return_offsets_mapping=True)
    words = segmented_words(TEXT, encoding["offset_mapping"], lambda text: given)
    ids = encoding["input_ids"]
    assert words[0] is words[-1] is None
    assert [len(word) for word in groups(words)] == list(map(len, WORDS))
    assert fates(chinese, {"input_ids": ids, "word_ids": words}) == groups(words)


def test_jieba(chinese) -> None:
    """The optional segmenter itself, on its own dictionary."""
    import jieba

    encoding = chinese(TEXT, return_offsets_mapping=True)
    words = segmented_words(TEXT, encoding["offset_mapping"], jieba.cut)
    found = [TEXT[start:stop] for start, stop in (encoding["offset_mapping"][i] for i in range(1, 7))]
    assert found == list("使用语言模型")
    assert groups(words)[:3] == [[1, 2], [3, 4], [5, 6]]
    assert fates(chinese, {"input_ids": encoding["input_ids"], "word_ids": words}) == groups(words)


def test_subwords_go_with_their_words(wordpiece) -> None:
    text = "evaluating expressions"
    encoding = wordpiece(text, return_offsets_mapping=True)
    words = segmented_words(text, encoding["offset_mapping"], str.split)
    assert words == encoding.word_ids()


def test_reference_files(chinese) -> None:
    """Each line of the file has the positions of the characters that continue a word."""
    line = "[2, 4, 6, 9, 11, 12]"
    ids = chinese(TEXT)["input_ids"]
    words = reference_words(ids, json.loads(line), chinese)
    assert [len(word) for word in groups(words)] == list(map(len, WORDS))
    assert fates(chinese, {"input_ids": ids, "word_ids": words}) == groups(words)
    english = chinese("evaluating expressions")
    assert reference_words(english["input_ids"], [], chinese) == english.word_ids()


@pytest.mark.parametrize("given", [["使用", "模型"], [*WORDS, "了"], WORDS[:-1], WORDS[1:]])
def test_words_that_are_not_the_text(chinese, given) -> None:
    offsets = chinese(TEXT, return_offsets_mapping=True)["offset_mapping"]
    with pytest.raises(ValueError, match="cut: expected words that make up the text, got"):
        segmented_words(TEXT, offsets, lambda text: given)


def test_a_reference_of_another_row(chinese) -> None:
    with pytest.raises(ValueError, match="reference: expected positions below the row's 3, got 3"):
        reference_words([2, 30, 3], [3], chinese)

"""Words from outside the vocabulary, as a ``word_ids`` column: from any segmenter, or from BERT-wwm's reference files.

Chinese has no spaces, and a tokenizer of characters knows no words::

    import jieba                     # pip install "fastmlm[zh]"; LTP, pkuseg and others go the same way

    def tokenize(row):
        encoding = tokenizer(row["text"], return_offsets_mapping=True)
        return {"input_ids": encoding["input_ids"],
                "word_ids": segmented_words(row["text"], encoding["offset_mapping"], jieba.cut)}

    collator = DataCollatorForMaskedLM(tokenizer, strategy=WholeWords())
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def segmented_words(
    text: str, offset_mapping: Sequence[tuple[int, int]], cut: Callable[[str], Iterable[str]]
) -> list[int | None]:
    """The number of the segmenter's word that each token begins in; None for tokens of no text ([CLS], [SEP]).

    Args:
        text: what was tokenized.
        offset_mapping: the tokenizer's character spans of the tokens.
        cut: the segmenter: the words of a text in their order, which together are the text, spaces left out or not.

    Raises:
        ValueError: a word is not where the text goes on.
    """
    word_of_character = [-1] * len(text)
    end = 0
    for number, word in enumerate(cut(text)):
        start = text.find(word, end)
        if start < 0 or text[end:start].strip():
            raise ValueError(
                f"cut: expected words that make up the text, got {word!r} where {text[end : end + 20]!r} is"
            )
        end = start + len(word)
        word_of_character[start:end] = [number] * len(word)
    if text[end:].strip():
        raise ValueError(f"cut: expected words that make up the text, got none where {text[end : end + 20]!r} is")
    return [word_of_character[start] if start < stop else None for start, stop in offset_mapping]


def reference_words(
    input_ids: Sequence[int], reference: Sequence[int], tokenizer: "PreTrainedTokenizerBase"
) -> list[int | None]:
    """Words of a row of BERT-wwm's reference files (``chinese_ref``), whose lines are JSON lists of positions.

    A token at one of the positions continues the word before it, as one that the vocabulary marks with "##" does.

    Args:
        input_ids: the row, special tokens included, from which the positions count.
        reference: the positions.
        tokenizer: of WordPiece.

    Raises:
        ValueError: a position is outside of the row.
    """
    if wrong := [position for position in reference if not 0 <= position < len(input_ids)]:
        raise ValueError(f"reference: expected positions below the row's {len(input_ids)}, got {wrong[0]}")
    special, continues = set(tokenizer.all_special_ids), set(reference)
    words: list[int | None] = []
    number = -1
    for position, token in enumerate(tokenizer.convert_ids_to_tokens(list(input_ids))):
        if input_ids[position] in special:
            words.append(None)
            continue
        if position not in continues and not token.startswith("##"):
            number += 1
        words.append(max(number, 0))
    return words

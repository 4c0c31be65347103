"""Whole words: from what a tokenizer or a data set knows of words to the ``units`` of ``mask_tokens``.

Whole-word masking (the BERT authors' 2019 release note; Cui et al., "Pre-training with whole word masking for Chinese
BERT", 2021) selects all tokens of a word or none. A unit is named by the position of its first token.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fastmlm.philox import first_real
from fastmlm.spec import SPECIAL, MaskingSpec
from fastmlm.strategies.base import Strategy, check_choice

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STARTS, ENDS = 1, 2  # marks by id: the token starts a word; the token after it does

_CONTINUATION = "##"  # WordPiece marks what continues a word
_SPACES = ("Ġ", "▁")  # byte-level BPE and SentencePiece mark what comes after a space
_BREAKS = frozenset("Ċĉč")  # byte-level BPE's line breaks and tabs, which part words as spaces do


@dataclass(frozen=True)
class WholeWords(Strategy):
    """``selected = (torch.rand(words) < p)[word_of_token]``: all tokens of a word or none.

    Words come from the best source there is: a ``word_ids`` column (the tokenizer's, or a segmenter's:
    :mod:`fastmlm.strategies.segmentation`), else an ``offset_mapping`` column and the vocabulary, else the vocabulary
    alone ("##", "Ġ", "▁"). Each word is selected with the collator's probability, so each token is.

    Args:
        replace: what the 80/10/10 are drawn for: each "token" of a selected word by itself, as BERT's code does, or the
            "word" as a whole.

    Law: ``selected(s) = selectable(s) and draw_0(unit(s)) < T(p)``, unit(s) the position of the first token of s's
    word; with ``replace="word"``, ``draw_1(unit(s))`` is the action and ``(draw_2(s) * K) >> 32`` the random id.

    Source: Devlin et al., BERT's release note of May 2019; Cui et al., "Pre-training with whole word masking for
    Chinese BERT" (2021), section 3.
    """

    whole_words = True
    replace: Literal["token", "word"] = "token"

    def __post_init__(self) -> None:
        check_choice("replace", self.replace, ("token", "word"))

    def selects(self, spec: MaskingSpec) -> dict[str, Any]:
        return {"replace_per_unit": self.replace == "word"}


def marks_by_id(tokenizer: "PreTrainedTokenizerBase") -> Tensor:
    """What each id of the vocabulary says of words: (largest id + 1,) uint8 of :data:`STARTS` and :data:`ENDS`.

    WordPiece: "##" continues a word, all else starts one. Byte-level BPE, SentencePiece: "Ġ" or "▁" starts a word, as
    do line breaks and what follows them; punctuation stays with the word it adjoins. Where no token bears a mark
    (amino acids, bases, characters), every token is a word. A ``word_ids`` column knows better: the tokenizer's own
    words, or a segmenter's where a script has no spaces.
    """
    vocabulary = tokenizer.get_vocab()
    marks = torch.full((max(vocabulary.values()) + 1,), STARTS, dtype=torch.uint8, device="cpu")
    continued = [i for token, i in vocabulary.items() if token.startswith(_CONTINUATION) and len(token) > 2]
    if len(continued) >= sum(token.startswith(_SPACES) and len(token) > 1 for token in vocabulary):
        marks[continued] = 0
        return marks
    for token, i in vocabulary.items():
        text = token.lstrip("".join(_SPACES))
        starts = token.startswith(_SPACES) or text[:1] in _BREAKS
        marks[i] = starts * STARTS + (text[-1:] in {*_BREAKS, "Ġ"}) * ENDS
    return marks


def starts_from_marks(marks: Tensor) -> Tensor:
    """Marks of tokens, (B, S) uint8: a word starts at a token that says so, and after one that ends a word."""
    starts = (marks & STARTS) != 0
    starts[:, 1:] |= (marks[:, :-1] & ENDS) != 0
    return starts


def starts_from_word_ids(word_ids: Tensor) -> Tensor:
    """``BatchEncoding.word_ids()`` as (B, S) integers, -1 for None: a word starts where the number changes."""
    starts = torch.ones_like(word_ids, dtype=torch.bool)
    starts[:, 1:] = (word_ids[:, 1:] != word_ids[:, :-1]) | (word_ids[:, 1:] < 0)
    return starts


def starts_from_offsets(offsets: Tensor) -> Tensor:
    """``offset_mapping``, (B, S, 2) character spans: a word starts where text was skipped, such as a space."""
    starts = torch.ones(offsets.shape[:2], dtype=torch.bool, device=offsets.device)
    starts[:, 1:] = offsets[:, 1:, 0] != offsets[:, :-1, 1]
    return starts


def units_of_batch(
    input_ids: Tensor,
    marks: Tensor,
    flags: Tensor,
    special_tokens_mask: Tensor | None,
    offset_mapping: Tensor | None,
    attention_mask: Tensor | None,
    word_ids: Tensor | None,
) -> Tensor:
    """:func:`units` from the best source there is: ``word_ids``, else ``offset_mapping`` and the vocabulary.

    Args:
        input_ids: (B, S) integers; ids outside the tables are taken for the nearest inside.
        marks: (V,) uint8, of :func:`marks_by_id`.
        flags: (V,) uint8, of ``MaskingSpec.tables``.
        special_tokens_mask, attention_mask: (B, S) integers or bool, or None.
        offset_mapping, word_ids: as :func:`starts_from_offsets` and :func:`starts_from_word_ids` take them; None: it is
            the other that is given.
    """
    special = (flags[input_ids.clamp(0, len(flags) - 1)] & SPECIAL) != 0
    if special_tokens_mask is not None:
        special |= special_tokens_mask != 0
    if attention_mask is not None:
        special |= attention_mask == 0
    if word_ids is not None:
        return units(starts_from_word_ids(word_ids), special, attention_mask)
    assert offset_mapping is not None
    starts = starts_from_offsets(offset_mapping)
    # Offsets may include the space before a word, and punctuation has none: marks, if there are any, know more.
    if bool((marks != STARTS).any()):
        starts |= starts_from_marks(marks[input_ids.clamp(0, len(marks) - 1)])
    return units(starts, special, attention_mask)


def units(starts: Tensor, special: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The position of the first token of each token's word, (B, S) int64, as ``mask_tokens`` takes it.

    Args:
        starts: (B, S) bool, whether a token starts a word.
        special: (B, S) bool, special tokens and padding: each a unit of its own, and the next token starts a word.
        attention_mask: (B, S), from which positions are counted, or None.
    """
    starts = starts | special
    starts[:, 1:] |= special[:, :-1]
    starts[:, :1] = True
    column = torch.arange(starts.shape[1], device=starts.device).expand(starts.shape)
    first = torch.where(starts, column, 0).cummax(1).values if starts.numel() else column
    if attention_mask is None or not starts.numel():
        return first
    return (first - first_real(attention_mask)[:, None]).clamp_(min=0)

"""The tokenizer: trained on the text, or loaded from a directory."""

from pathlib import Path
from typing import TYPE_CHECKING

from fastmlm.cli.errors import CliError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_SPECIALS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


def get_tokenizer(directory: str | None, documents: list[str], vocab_size: int) -> "PreTrainedTokenizerBase":
    """The tokenizer of ``directory``, or a WordPiece one trained on ``documents``."""
    return train_tokenizer(documents, vocab_size) if directory is None else load_tokenizer(directory)


def train_tokenizer(documents: list[str], vocab_size: int) -> "PreTrainedTokenizerBase":
    """A lower-casing WordPiece tokenizer with BERT's special tokens and at most ``vocab_size`` tokens.

    The trainer numbers the single characters inside words in the order of a hash table that differs from run to run,
    and breaks ties between merges by these numbers. Told them in order beforehand, it always gives the same vocabulary.
    """
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    specials = list(_SPECIALS.values())
    characters = _train_wordpiece(documents, vocab_size=1, first=specials)  # no room for merges
    inner = sorted(token for token in characters if token.startswith("##"))
    wordpiece = _wordpiece(_train_wordpiece(documents, vocab_size, first=specials + inner))
    sep, cls = (("[SEP]", specials.index("[SEP]")), ("[CLS]", specials.index("[CLS]")))
    wordpiece.post_processor = processors.BertProcessing(sep, cls)
    return PreTrainedTokenizerFast(tokenizer_object=wordpiece, **_SPECIALS)


def _train_wordpiece(documents: list[str], vocab_size: int, first: list[str]) -> dict[str, int]:
    from tokenizers import trainers

    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=first, show_progress=False)
    wordpiece = _wordpiece({})
    wordpiece.train_from_iterator(documents, trainer)
    return wordpiece.get_vocab()


def _wordpiece(vocab: dict[str, int]) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    wordpiece = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    wordpiece.normalizer = normalizers.BertNormalizer(lowercase=True)
    wordpiece.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    wordpiece.decoder = decoders.WordPiece()
    return wordpiece


def load_tokenizer(directory: str) -> "PreTrainedTokenizerBase":
    """The tokenizer in ``directory``, which must have a mask and a padding token."""
    from transformers import AutoTokenizer

    if not Path(directory).is_dir():
        raise CliError(f"argument --tokenizer: expected a directory, got {directory}, which is none")
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # parsers of files from elsewhere raise anything, bare Exception included
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CliError(f"argument --tokenizer: expected a tokenizer in {directory}, got: {reason[0]}") from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # a class known from config.json alone loads with no words
        raise CliError(f"argument --tokenizer: expected a tokenizer in {directory}, got no vocabulary there")
    for kind in ("mask", "pad"):
        if getattr(tokenizer, f"{kind}_token_id") is None:
            raise CliError(f"argument --tokenizer: expected a tokenizer with a {kind} token, got none in {directory}")
    return tokenizer

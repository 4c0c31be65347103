"""Shared by all tests: an offline environment and tiny tokenizers of every family, trained in the session."""

import os

import torch

if not torch.cuda.is_available():
    # Triton decides when a kernel is decorated, that is on import, whether it compiles or interprets it. Without a GPU
    # only the interpreter can run kernels, so this must stand before anything imports triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may need the network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive the forks of DataLoader workers

import math
import pydoc_data.topics
from typing import Any

import datasets
import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import EsmTokenizer, PreTrainedTokenizerFast

from fastmlm.cli.tokenizer import train_tokenizer

torch.set_num_threads(1)  # tests run in parallel processes, and sizes here are far too small for threads

AMINO_ACIDS = "LAGVSERTIDPKQNFYMHWCXBUZO"


@pytest.fixture(scope="session")
def sentences() -> list[str]:
    """English prose of very different lengths, from CPython's own documentation."""
    text = " ".join(pydoc_data.topics.topics[name] for name in ("assignment", "class", "for", "numbers", "with"))
    return [" ".join(sentence.split()) for sentence in text.split(". ") if sentence.strip()][:200]


def _wrap(tokenizer: Tokenizer, **kwargs) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **kwargs)


def _pair_template(tokenizer: Tokenizer, cls: str, sep: str) -> processors.TemplateProcessing:
    specials = [(token, tokenizer.token_to_id(token)) for token in (cls, sep)]
    return processors.TemplateProcessing(
        single=f"{cls} $A {sep}", pair=f"{cls} $A {sep} $B:1 {sep}:1", special_tokens=specials
    )


BERT_NAMES = {
    "pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]",
}  # fmt: skip
ROBERTA_SPECIALS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
ROBERTA_NAMES = {
    "bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>",
    "unk_token": "<unk>", "mask_token": "<mask>",
}  # fmt: skip


@pytest.fixture(scope="session")
def wordpiece_core(sentences) -> Tokenizer:
    tokenizer = train_tokenizer(sentences, 800).backend_tokenizer
    tokenizer.post_processor = _pair_template(tokenizer, "[CLS]", "[SEP]")
    return tokenizer


@pytest.fixture
def wordpiece(wordpiece_core) -> PreTrainedTokenizerFast:
    """BERT's kind: "##" continues a word, pads on the right, has token_type_ids. A fresh wrapper for each test."""
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return _wrap(Tokenizer.from_str(wordpiece_core.to_str()), **BERT_NAMES, model_input_names=names)


@pytest.fixture(scope="session")
def byte_level_core(sentences) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=ROBERTA_SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(sentences, trainer)
    tokenizer.post_processor = _pair_template(tokenizer, "<s>", "</s>")
    return tokenizer


@pytest.fixture
def byte_level(byte_level_core) -> PreTrainedTokenizerFast:
    """RoBERTa's kind: "Ġ" starts a word, the pad id is 1, no token_type_ids."""
    return _wrap(
        Tokenizer.from_str(byte_level_core.to_str()), **ROBERTA_NAMES, model_input_names=["input_ids", "attention_mask"]
    )


@pytest.fixture(scope="session")
def unigram_core(sentences) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=600, special_tokens=ROBERTA_SPECIALS, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(sentences, trainer)
    # The trainer sums in threads, so that its scores, thus its order, differ from run to run; the tokens do not.
    text = "▁" + "▁".join(sentences).replace(" ", "▁")
    others = sorted(set(tokenizer.get_vocab()) - set(ROBERTA_SPECIALS))
    vocabulary = [(token, 0.0) for token in ROBERTA_SPECIALS]
    vocabulary += [(token, math.log(max(text.count(token), 1) / len(text))) for token in others]
    tokenizer.model = models.Unigram(vocabulary, unk_id=ROBERTA_SPECIALS.index("<unk>"))
    tokenizer.post_processor = _pair_template(tokenizer, "<s>", "</s>")
    return tokenizer


@pytest.fixture
def unigram(unigram_core) -> PreTrainedTokenizerFast:
    """SentencePiece's kind: "▁" starts a word; pads on the left, to have one that does."""
    return _wrap(
        Tokenizer.from_str(unigram_core.to_str()),
        **ROBERTA_NAMES,
        model_input_names=["input_ids", "attention_mask"],
        padding_side="left",
    )


@pytest.fixture
def amino_acids(tmp_path) -> EsmTokenizer:
    """ESM-2's own slow (Python) tokenizer with its 33 tokens, 8 of which are not amino acids or punctuation."""
    tokens = ["<cls>", "<pad>", "<eos>", "<unk>", *AMINO_ACIDS, ".", "-", "<null_1>", "<mask>"]
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(tokens))
    return EsmTokenizer(str(path))


@pytest.fixture
def slow_bert(wordpiece_core, tmp_path) -> Any:
    """BERT's tokenizer in Python, on the vocabulary of ``wordpiece``."""
    vocabulary = wordpiece_core.get_vocab()
    path = tmp_path / "bert-vocab.txt"
    path.write_text("\n".join(sorted(vocabulary, key=vocabulary.get)), encoding="utf-8")
    # Transformers 5 renamed the Python tokenizer and gave its name to the fast one.
    return getattr(transformers, "BertTokenizerLegacy", transformers.BertTokenizer)(str(path))


@pytest.fixture
def tokenizers(wordpiece, byte_level, unigram, amino_acids, slow_bert) -> dict:
    """One of each family, by name."""
    return {
        "wordpiece": wordpiece, "byte_level": byte_level, "unigram": unigram, "amino_acids": amino_acids,
        "slow_bert": slow_bert,
    }  # fmt: skip


@pytest.fixture
def make_rows(sentences):
    """``make_rows(tokenizer, count, max_length, **arguments of the tokenizer)``: rows of unequal length, as dicts."""

    def make(tokenizer, count: int = 6, max_length: int = 48, **kwargs) -> list[dict]:
        texts = sentences
        if isinstance(tokenizer, EsmTokenizer):  # it knows amino acids only
            texts = ["".join(AMINO_ACIDS[(i * i + 7 * j) % 20] for j in range(5 + 9 * i % 37)) for i in range(50)]
        texts = [texts[i % len(texts)] for i in range(count)]
        return [dict(tokenizer(text, truncation=True, max_length=max_length, **kwargs)) for text in texts]

    return make


@pytest.fixture(scope="session")
def saved(tmp_path_factory, sentences, wordpiece_core):
    """File of a dataset as ``map`` leaves it, in chunks of 7 rows; texts are kept."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=wordpiece_core)
    path = tmp_path_factory.mktemp("rows") / "rows.arrow"
    dataset = datasets.Dataset.from_dict({"text": [text for text in sentences[:60] if text]})
    encode = lambda batch: tokenizer(batch["text"], return_token_type_ids=True, return_special_tokens_mask=True)  # noqa: E731
    dataset.map(encode, batched=True, batch_size=7, writer_batch_size=7, cache_file_name=str(path))
    return path


@pytest.fixture
def mapped(saved):
    dataset = datasets.Dataset.from_file(str(saved))
    assert len(dataset.cache_files) == 1, "memory-mapped"
    assert dataset.data.column("input_ids").num_chunks > 5
    return dataset

"""The model: a BERT of a named size, or whatever a config or checkpoint directory holds."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fastmlm import densify, sparsify
from fastmlm.cli.errors import CliError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# (hidden size, layers, heads): BERT-tiny and BERT-mini of Turc et al. (2019), and BERT-base.
SIZES = {"tiny": (128, 2, 2), "small": (256, 4, 4), "base": (768, 12, 12)}


def model_tokenizer(name: str) -> str | None:
    """The directory whose tokenizer goes with the model: a checkpoint brings its own, the rest none."""
    return name if name not in SIZES and _has_weights(Path(name)) else None


def build_model(name: str, tokenizer: "PreTrainedTokenizerBase", length: int, seed: int) -> "PreTrainedModel":
    """A model that fits the tokenizer and row length and takes a sparse head; fresh weights are drawn from ``seed``."""
    from transformers import AutoModelForMaskedLM, set_seed

    vocab_size = max(tokenizer.get_vocab().values()) + 1
    directory = Path(name)
    fresh = name in SIZES or not _has_weights(directory)
    config = _named_config(name, length) if name in SIZES else _read_config(directory)
    if fresh:
        config.vocab_size, config.pad_token_id = vocab_size, tokenizer.pad_token_id
    elif config.vocab_size < vocab_size:
        raise CliError(
            f"argument --model: expected an embedding for each of the tokenizer's {vocab_size} ids, "
            f"got {config.vocab_size} in {name}"
        )
    longest = min(getattr(config, "max_position_embeddings", length), tokenizer.model_max_length)
    if length > longest:
        raise CliError(f"argument --length: expected at most {longest}, which the model can take, got {length}")
    set_seed(seed)
    if fresh:
        model = AutoModelForMaskedLM.from_config(config)
    else:
        model = AutoModelForMaskedLM.from_pretrained(directory, config=config, local_files_only=True)
    try:
        with torch.no_grad():  # what a config says of its positions, RoBERTa's for one, is not what it takes
            model.eval()(torch.full((1, length), vocab_size - 1))
    except (IndexError, RuntimeError) as error:
        raise CliError(f"argument --length: expected no more positions than the model has, got {length}") from error
    try:
        return densify(sparsify(model.train()))
    except (TypeError, ValueError) as error:
        raise CliError(f"argument --model: expected a model that can be made sparse, got: {error}") from error


def _has_weights(directory: Path) -> bool:
    return any(directory.glob("*.safetensors")) or any(directory.glob("pytorch_model*.bin"))


def _named_config(name: str, length: int) -> "PretrainedConfig":
    from transformers import BertConfig

    hidden, layers, heads = SIZES[name]
    return BertConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        max_position_embeddings=max(512, length),
        initializer_range=initializer_range(hidden),
        # A short run sees too little to overfit: dropout would only slow it (Geiping & Goldstein, "Cramming", 2022).
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def initializer_range(hidden: int) -> float:
    """BERT's 0.02 at its width of 768, and more for narrower models, whose sums are of fewer terms."""
    return 0.02 * (768 / hidden) ** 0.5


def _read_config(directory: Path) -> "PretrainedConfig":
    from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoConfig

    if not directory.is_dir():
        raise CliError(
            f"argument --model: expected tiny, small, base or a directory, got {directory}, which is neither"
        )
    if not (directory / "config.json").is_file():
        raise CliError(f"argument --model: expected a config.json in {directory}, got none")
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CliError(f"argument --model: expected a readable {directory}/config.json, got: {error}") from error
    if type(config) not in MODEL_FOR_MASKED_LM_MAPPING:
        raise CliError(f"argument --model: expected a model that fills masks, got {config.model_type} in {directory}")
    return config

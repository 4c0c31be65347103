"""What each objective trains, with what collator and Trainer, and how its model is measured."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import (
    ElectraConfig,
    ElectraForMaskedLM,
    ElectraForPreTraining,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    XLNetConfig,
    XLNetLMHeadModel,
    set_seed,
)

from fastmlm import DataCollatorForMaskedLM, DataCollatorForPermutationLM, MaskedLMTrainer, ReplacedTokenDetection
from fastmlm.cli.compare.catalogue import parse_objective
from fastmlm.cli.errors import CliError
from fastmlm.cli.model import SIZES, build_model, initializer_range
from fastmlm.head import loss_only
from fastmlm.schedules import Cosine
from fastmlm.strategies import (
    Counts,
    Hybrid,
    MaskedDiffusion,
    NGrams,
    RandomRates,
    Spans,
    UniLM,
    WholeWords,
    inverse_frequency,
)

_IGNORED = -100


@dataclass(frozen=True)
class Start:
    """What all objectives begin with: the model's name and size, the tokenizer, how often each id is in the text."""

    model: str
    length: int
    steps: int
    tokenizer: PreTrainedTokenizerBase
    counts: Tensor


class Objective(ABC):
    """A way to train a model, which can fill in masks and gives features."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    @abstractmethod
    def build(self, start: Start, seed: int) -> Any:
        """The model, its first weights drawn from a seed."""

    @abstractmethod
    def collator(self, start: Start, seed: int) -> Any: ...

    def rows(self, rows: Dataset) -> Dataset:
        """What the model is trained on: rows with columns input_ids and attention_mask, and what else is needed."""
        return rows

    def trainer(self, model: Any, collator: Any, arguments: TrainingArguments, **others: Any) -> Trainer:
        callbacks = [collator.callback(), *others.pop("callbacks")]
        return _Counting(model, arguments, collator, callbacks=callbacks, **others)

    def filler(self, model: Any) -> Any:
        """The part of the model that fills in masks."""
        return model

    def encoder(self, model: Any) -> Any:
        """The part of the model whose last hidden states are its features."""
        return model.base_model

    def loss(self, model: Any, ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy of masked rows."""
        with loss_only():
            return self.filler(model)(input_ids=ids, attention_mask=attention_mask, labels=labels).loss


class CountsSelected:
    """Before a Trainer: how many tokens were selected in the batches it was shown."""

    selected = 0

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        self.selected += int((inputs["labels"] != _IGNORED).sum())
        return super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]


class _Counting(CountsSelected, Trainer):
    pass


class _CountingSparse(CountsSelected, MaskedLMTrainer):
    pass


class MaskedLM(Objective):
    """A masked language model of whatever kind; objectives differ in the arguments of their collator."""

    def __init__(self, rate: float, **arguments: Callable[[Start, float], Any]) -> None:
        super().__init__(rate)
        self._arguments = arguments

    def build(self, start: Start, seed: int) -> Any:
        return build_model(start.model, start.tokenizer, start.length, seed)

    def collator(self, start: Start, seed: int) -> DataCollatorForMaskedLM:
        others = {name: make(start, self.rate) for name, make in self._arguments.items()}
        return DataCollatorForMaskedLM(start.tokenizer, **{"mlm_probability": self.rate, "seed": seed, **others})

    def trainer(self, model: Any, collator: Any, arguments: TrainingArguments, **others: Any) -> Trainer:
        return _CountingSparse(model, arguments, collator, **others)


class HalfPrefix(MaskedLM):
    """Sequence to sequence, the first half of a row is the source."""

    def rows(self, rows: Dataset) -> Dataset:
        return rows.add_column("source", [len(row) // 2 for row in rows["input_ids"]])


class Electra(Objective):
    """Both models have embeddings of one size; the generator, of half the width, is the one that fills in masks."""

    def build(self, start: Start, seed: int) -> ReplacedTokenDetection:
        hidden, layers, heads = _size(start, "electra")
        config = {
            "vocab_size": len(start.tokenizer), "pad_token_id": start.tokenizer.pad_token_id,
            "embedding_size": hidden, "num_hidden_layers": layers, "max_position_embeddings": max(512, start.length),
            "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        }  # fmt: skip
        set_seed(seed)
        discriminator = ElectraForPreTraining(_electra(hidden, heads, config))
        generator = ElectraForMaskedLM(_electra(hidden // 2, heads // 2, config))
        return ReplacedTokenDetection(generator, discriminator, seed=seed)

    def collator(self, start: Start, seed: int) -> DataCollatorForMaskedLM:
        return DataCollatorForMaskedLM(start.tokenizer, mlm_probability=self.rate, seed=seed)

    def filler(self, model: Any) -> Any:
        return model.generator

    def encoder(self, model: Any) -> Any:
        return model.discriminator.base_model


def _electra(hidden: int, heads: int, config: dict[str, Any]) -> ElectraConfig:
    return ElectraConfig(
        hidden_size=hidden,
        initializer_range=initializer_range(hidden),
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        **config,
    )


class XLNet(Objective):
    """Trained to predict in any order; to fill in masks it predicts all at once, none of which sees another."""

    def build(self, start: Start, seed: int) -> XLNetLMHeadModel:
        hidden, layers, heads = _size(start, "xlnet")
        set_seed(seed)
        return XLNetLMHeadModel(
            XLNetConfig(
                vocab_size=len(start.tokenizer), d_model=hidden, n_layer=layers, n_head=heads, d_inner=4 * hidden,
                dropout=0.0, initializer_range=initializer_range(hidden), pad_token_id=start.tokenizer.pad_token_id,
            )
        )  # fmt: skip

    def collator(self, start: Start, seed: int) -> DataCollatorForPermutationLM:
        return DataCollatorForPermutationLM(start.tokenizer, seed=seed)

    def loss(self, model: Any, ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        selected = labels != _IGNORED
        most = max(int(selected.sum(1).max()), 1)
        places = selected.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]
        logits = model(
            input_ids=ids,
            attention_mask=attention_mask,
            perm_mask=selected[:, None, :].expand(-1, ids.shape[1], -1).float(),
            target_mapping=torch.nn.functional.one_hot(places, ids.shape[1]).float(),
        ).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.gather(1, places).flatten())


def _size(start: Start, name: str) -> tuple[int, int, int]:
    if start.model not in SIZES:
        raise CliError(f"argument --model: expected one of {', '.join(SIZES)} with {name}, got {start.model}")
    return SIZES[start.model]


def _lm(**arguments: Callable[[Start, float], Any]) -> Callable[[float], Objective]:
    return lambda rate: MaskedLM(rate, **arguments)


# By the names of the catalogue, which says what they are.
_BUILDERS: dict[str, Callable[[float], Objective]] = {
    "mlm": _lm(),
    "static": _lm(static=lambda start, rate: True),
    "static10": _lm(static_copies=lambda start, rate: 10),
    "decay": _lm(mlm_probability=lambda start, rate: Cosine(min(1.0, 2 * rate), rate / 2, steps=start.steps)),
    "words": _lm(strategy=lambda start, rate: WholeWords()),
    "spans": _lm(strategy=lambda start, rate: Spans()),
    "ngrams": _lm(strategy=lambda start, rate: NGrams()),
    "exact": _lm(strategy=lambda start, rate: Counts(rounded=True, at_least=1)),
    "rare": _lm(strategy=lambda start, rate: inverse_frequency(start.counts)),
    "rates": _lm(strategy=lambda start, rate: RandomRates()),
    "diffusion": _lm(strategy=lambda start, rate: MaskedDiffusion()),
    "unilm": lambda rate: HalfPrefix(rate, strategy=lambda start, rate: UniLM(prefix="source")),
    "hybrid": _lm(strategy=lambda start, rate: Hybrid()),
    "electra": Electra,
    "xlnet": XLNet,
}


def make_objective(text: str, rate: float) -> Objective:
    """The objective of a name such as ``mlm-40``, at a rate where it names none."""
    name, own = parse_objective(text)
    return _BUILDERS[name](rate if own is None else own)

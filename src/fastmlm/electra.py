"""Replaced-token detection: a small masked language model fills in tokens, and a model beside it is to find them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import ModelOutput

from fastmlm.head import hand_out_logits, loss_only, sparsify
from fastmlm.masking import advance_seed, row_keys
from fastmlm.philox import as_int64, first_real, fold
from fastmlm.sampling import ReplacedTokens, replace_tokens, sample_tokens
from fastmlm.spec import integer

_SHARED = ("position_embeddings", "token_type_embeddings")  # beside those of words
_EVALUATION = (1 << 64) - 1  # in place of a step


@dataclass
class ReplacedTokenDetectionOutput(ModelOutput):
    """``loss``: of both models. ``logits``, (B, S): the discriminator's, above 0 where it takes a token for replaced.

    ``rtd_labels``, (B, S): 1 where it was, 0 elsewhere, -100 at padding. ``mlm_loss`` and ``rtd_loss``: the parts of
    the loss, the second one before it is weighted. ``mlm_accuracy``: how often the generator's likeliest id was right,
    of the selected tokens; ``rtd_accuracy``: how often the discriminator was, of the real ones, of which
    ``replaced_share`` were replaced. Scalars without a gradient, but for ``loss``; means of nothing are 0.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    rtd_labels: Tensor | None = None
    mlm_loss: Tensor | None = None
    rtd_loss: Tensor | None = None
    mlm_accuracy: Tensor | None = None
    rtd_accuracy: Tensor | None = None
    replaced_share: Tensor | None = None


class ReplacedTokenDetection(nn.Module):
    """``mlm_loss(generator) + 50 * binary_cross_entropy(discriminator(sampled), sampled != original)``

    ELECTRA's pretraining (Clark et al. 2020), for a Trainer and batches of `fastmlm.DataCollatorForMaskedLM`::

        model = ReplacedTokenDetection(ElectraForMaskedLM(small), ElectraForPreTraining(config))
        Trainer(model, args, collator, dataset, callbacks=[collator.callback()]).train()
        model.save_pretrained("electra")  # electra/generator, electra/discriminator: plain checkpoints

    The generator is made sparse (`fastmlm.sparsify`): it projects the selected tokens alone, and both its loss and the
    samples are of those logits. Tokens are sampled by `fastmlm.sample_tokens`, in training with a key that advances
    with each call (`fastmlm.advance_seed`; it is part of the ``state_dict``, so that a resumed run goes on with the
    same samples), in evaluation with one that stays; rows go by what their text was before masking. No gradient passes
    through sampling. With every parameter in it once, the ``state_dict`` can be written by safetensors.

    Args:
        generator: a transformers ``*ForMaskedLM``; it is changed in place.
        discriminator: a transformers model that gives one logit a token, such as ``ElectraForPreTraining``.
        discriminator_weight: what the discriminator's loss is multiplied by.
        temperature: of the generator's softmax when it is sampled.
        share_embeddings: both models have the discriminator's word, position and token type embeddings, as far as they
            have such; their state dicts stay complete. The generator's decoder goes on being tied to its embedding.
        seed: from which the samples follow.
        impl: as in `fastmlm.sample_tokens`.

    Raises:
        TypeError: the generator cannot be made sparse.
        ValueError: embeddings that are to be shared differ in shape, or the generator has ids that the discriminator
            has not.
    """

    accepts_loss_kwargs = True  # what a Trainer reads: the loss is divided by num_items_in_batch

    def __init__(
        self,
        generator: Any,
        discriminator: Any,
        *,
        discriminator_weight: float = 50.0,
        temperature: float = 1.0,
        share_embeddings: bool = True,
        seed: int = 0,
        impl: str | None = None,
    ) -> None:
        super().__init__()
        ids = [model.get_input_embeddings().weight.shape[0] for model in (generator, discriminator)]
        if ids[0] > ids[1]:
            raise ValueError(f"discriminator: expected embeddings of all the generator's {ids[0]} ids, got {ids[1]}")
        if share_embeddings:
            _share_embeddings(generator, discriminator)
        self.generator = sparsify(generator)
        hand_out_logits(generator)
        self.discriminator = discriminator
        self.discriminator_weight, self.temperature, self.impl = discriminator_weight, temperature, impl
        self.seed = integer("seed", seed, 0, 1 << 64)
        self.register_buffer("key", torch.tensor([as_int64(self.seed)]))  # of the next step
        self.key: Tensor

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        num_tokens_in_batch: int | Tensor | None = None,
    ) -> ReplacedTokenDetectionOutput:
        """Both losses of a masked batch; each tensor (B, S).

        Args:
            input_ids: masked.
            attention_mask: 0 at padding, which the discriminator's loss leaves out.
            token_type_ids, position_ids: for both models.
            labels: the original ids of the selected tokens, -100 elsewhere.
            num_items_in_batch: how many tokens are selected in all micro-batches of an optimizer step, as a Trainer
                counts them, which divides the generator's loss: then micro-batches add up to one large batch. The
                discriminator's is the mean over the real tokens of this one, times its share of the selected tokens, so
                that the shares of all add up to 1; how many real tokens there are elsewhere, nobody has told it,
            num_tokens_in_batch: unless this does: then its sum of losses is divided by that, which is exact.

        Raises:
            ValueError: there are no labels.
        """
        if labels is None:
            raise ValueError("labels: expected the original ids of the selected tokens, got None")
        also = {"attention_mask": attention_mask, "token_type_ids": token_type_ids, "position_ids": position_ids}
        also = {name: column for name, column in also.items() if column is not None}
        rows = (labels.reshape(-1) != -100).nonzero().squeeze(1)
        with loss_only():  # for logits of the selected rows in evaluation, too
            made = self.generator(
                input_ids=input_ids, labels=labels, num_items_in_batch=num_items_in_batch, return_dict=True, **also
            )
        logits = made.logits.detach().flatten(0, 1)
        replaced = self._replace(logits, input_ids, labels, rows, attention_mask)
        found = self.discriminator(input_ids=replaced.input_ids, return_dict=True, **also).logits
        rtd_loss = _detection_loss(found, replaced.labels, len(rows), num_items_in_batch, num_tokens_in_batch)
        real, is_replaced = replaced.labels != -100, replaced.labels == 1
        right = logits.argmax(-1) == labels.reshape(-1).index_select(0, rows)
        return ReplacedTokenDetectionOutput(
            loss=made.loss + self.discriminator_weight * rtd_loss,
            logits=found,
            rtd_labels=replaced.labels,
            mlm_loss=made.loss.detach(),
            rtd_loss=rtd_loss.detach(),
            mlm_accuracy=right.sum() / max(len(rows), 1),
            rtd_accuracy=(((found.detach() > 0) == is_replaced) & real).sum() / real.sum().clamp(min=1),
            replaced_share=is_replaced.sum() / real.sum().clamp(min=1),
        )

    @torch.no_grad()
    def _replace(
        self, logits: Tensor, input_ids: Tensor, labels: Tensor, rows: Tensor, attention_mask: Tensor | None
    ) -> ReplacedTokens:
        """The batch with a sample of the generator's, (K, V), for each of the K selected tokens."""
        original = torch.where(labels != -100, labels, input_ids)
        row, column = rows // labels.shape[1], rows % labels.shape[1]
        positions = column if attention_mask is None else column - first_real(attention_mask)[row]
        sampled = sample_tokens(
            logits,
            seed=self.key if self.training else fold(self.seed, _EVALUATION),
            row_keys=row_keys(original, attention_mask)[row],
            positions=positions,
            temperature=self.temperature,
            impl=self.impl,
        )
        if self.training:
            advance_seed(self.key)
        return replace_tokens(input_ids, labels, sampled, rows=rows, attention_mask=attention_mask)

    def save_pretrained(self, path: str | Path, **arguments: Any) -> None:
        """Write both models as they are: ``path/generator`` and ``path/discriminator``, with what their own take."""
        self.generator.save_pretrained(Path(path) / "generator", **arguments)
        self.discriminator.save_pretrained(Path(path) / "discriminator", **arguments)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Of both models, each shared parameter once, by its first name."""
        found = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        for name, _ in self._repeated():
            found.pop(prefix + name, None)
        return found

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name, first in self._repeated():
            if prefix + first in state_dict:
                state_dict.setdefault(prefix + name, state_dict[prefix + first])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _repeated(self) -> Iterator[tuple[str, str]]:
        """Further names of parameters that have one already, and that one."""
        names: dict[int, str] = {}
        for name, parameter in self.named_parameters(remove_duplicate=False):
            first = names.setdefault(id(parameter), name)
            if first != name:
                yield name, first


def _share_embeddings(generator: Any, discriminator: Any) -> None:
    """Give the generator the discriminator's embeddings."""
    pairs = [(generator.get_input_embeddings(), discriminator.get_input_embeddings())]
    embeddings = [getattr(model.base_model, "embeddings", None) for model in (generator, discriminator)]
    pairs += [
        (getattr(embeddings[0], name), getattr(embeddings[1], name))
        for name in _SHARED
        if all(isinstance(getattr(each, name, None), nn.Embedding) for each in embeddings)
    ]
    for mine, other in pairs:
        if mine.weight.shape != other.weight.shape:
            raise ValueError(
                f"share_embeddings: expected embeddings of one shape, got {tuple(mine.weight.shape)} in the generator "
                f"and {tuple(other.weight.shape)} in the discriminator; give them one embedding_size, or False here"
            )
    for mine, other in pairs:
        mine.weight = other.weight
    generator.tie_weights()  # its decoder, to the embedding it has now


def _detection_loss(
    logits: Tensor, labels: Tensor, selected: int, items: int | Tensor | None, tokens: int | Tensor | None
) -> Tensor:
    """The discriminator's loss, at least in float32: of the tokens whose label is not -100."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    real = labels != -100
    losses = F.binary_cross_entropy_with_logits(logits, labels.clamp(min=0).to(logits.dtype), reduction="none")
    total = losses.masked_fill(~real, 0).sum()
    if tokens is not None:
        return total / torch.as_tensor(tokens, device=total.device).clamp(min=1)
    mean = total / real.sum().clamp(min=1)
    if items is None:
        return mean
    return mean * (selected / torch.as_tensor(items, device=total.device).to(total.dtype).reshape(()).clamp(min=1))

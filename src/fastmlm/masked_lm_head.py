"""A masked-language-modelling head for encoders of one's own, and the loss that it shares with sparse models."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastmlm import metrics
from fastmlm.loss import Settings, loss_and_ranks, masked_lm_loss
from fastmlm.selection import check_rows, check_weights, labels_at, take_rows

if TYPE_CHECKING:
    from typing import TypeGuard


class MaskedLMHead(nn.Module):
    """``F.cross_entropy(decoder(norm(activation(dense(x[labels != -100])))), labels[labels != -100])``

    The head of BERT (Devlin et al. 2019, and its ``cls.predictions``), on selected positions only when there are
    labels, with `fastmlm.linear_cross_entropy` as its loss, unless hooks or adapters (LoRA) came over the decoder:
    then through the logits of the selected positions. Parameters: ``dense``, ``norm`` and ``decoder``. With labels
    and without ``rows``, ``torch.compile`` breaks its graph here, and a GPU's host waits.

    Args:
        hidden_size: H, of the encoder's hidden states.
        vocab_size: V.
        embedding_size: width of the decoder's input, where that is not H (ALBERT, ELECTRA).
        activation: a function of a tensor, between ``dense`` and ``norm``.
        eps: of the layer norm.
        bias: whether the decoder has one.
        tied_to: the input embedding, (V, embedding_size), whose weight is to be the decoder's too.

    Raises:
        ValueError: the embedding has another shape.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        embedding_size: int | None = None,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        eps: float = 1e-12,
        bias: bool = True,
        tied_to: nn.Embedding | None = None,
    ) -> None:
        super().__init__()
        width = hidden_size if embedding_size is None else embedding_size
        self.dense = nn.Linear(hidden_size, width)
        self.activation = activation
        self.norm = nn.LayerNorm(width, eps=eps)
        self.decoder = nn.Linear(width, vocab_size, bias=bias)
        if tied_to is not None:
            if tied_to.weight.shape != self.decoder.weight.shape:
                raise ValueError(
                    f"tied_to: expected an embedding of shape {tuple(self.decoder.weight.shape)}, "
                    f"got {tuple(tied_to.weight.shape)}"
                )
            self.decoder.weight = tied_to.weight

    def forward(
        self,
        hidden_states: Tensor,
        labels: Tensor | None = None,
        *,
        num_items_in_batch: int | Tensor | None = None,
        loss_weights: Tensor | None = None,
        loss_tokens: Tensor | None = None,
        rows: Tensor | None = None,
        count: Tensor | None = None,
    ) -> Tensor:
        """The loss of the selected positions; or, without labels, the logits of all.

        Args:
            hidden_states: (..., H).
            labels: (...), int32 or int64; -100 where not selected.
            num_items_in_batch: the number of selected tokens of the whole optimizer step, by which the sum of losses is
                then divided, so that micro-batches add up to one large batch; else the loss is their mean.
            loss_weights: (...), what the loss of each token is multiplied by (masked diffusion: 1 / p).
            loss_tokens: (rows,), int64, how many tokens of each row could have been selected; in place of
                ``num_items_in_batch``, their sum is the divisor. See `fastmlm.sparsify`.
            rows, count: what `fastmlm.select_rows` gives, for a step of fixed shapes in which nothing waits for a GPU:
                for ``torch.compile(fullgraph=True)`` and CUDA graphs. The count is taken, and not looked at.

        Returns:
            A scalar, float32 (float64 for float64), 0 where nothing is selected; or (..., V).

        Raises:
            TypeError: a tensor is of a wrong type.
            ValueError: shapes do not fit, the weights require a gradient, there are two divisors, or a label is out of
                range (on the CPU).
        """
        if labels is None:
            return self.decoder(self._transform(hidden_states))
        if labels.shape != hidden_states.shape[:-1]:
            raise ValueError(f"labels: expected {tuple(hidden_states.shape[:-1])}, got {tuple(labels.shape)}")
        if labels.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"labels: expected int32 or int64, got {labels.dtype}")
        check_weights(labels, loss_weights, loss_tokens, num_items_in_batch)
        divisor = num_items_in_batch if loss_tokens is None else loss_tokens.sum()
        labels, x = labels.reshape(-1), hidden_states.reshape(-1, hidden_states.shape[-1])
        weights = None if loss_weights is None else loss_weights.reshape(-1)
        if rows is None:
            rows = labels.ne(-100).nonzero().squeeze(-1)
            x, targets = x.index_select(0, rows), labels.index_select(0, rows)
            weights = None if weights is None else weights.index_select(0, rows)
        else:
            check_rows(rows)
            x, targets = take_rows(x, rows), labels_at(labels, rows, -100)
            weights = None if weights is None else labels_at(weights, rows, 0)
        loss = projected_loss if is_plain_linear(self.decoder, 0) else _decoded_loss
        return loss(self._transform(x), self.decoder, targets, divisor, weights)

    def _transform(self, x: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(x)))


def projected_loss(
    x: Tensor,
    decoder: nn.Linear,
    labels: Tensor,
    num_items_in_batch: int | Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """`fastmlm.loss.masked_lm_loss` of ``decoder(x)``, (K, H), without logits; a running `MaskedAccuracy` counts it."""
    settings = Settings(reduction="mean" if num_items_in_batch is None else "sum")
    if num_items_in_batch is not None:
        # Into the weights, and not by dividing the loss: its gradients need no other pass that way.
        dtype = torch.promote_types(x.dtype, torch.float32)
        weights = torch.ones(len(labels), dtype=dtype, device=x.device) if weights is None else weights.to(dtype)
        if isinstance(num_items_in_batch, Tensor):
            weights = weights / num_items_in_batch.to(weights).reshape(()).clamp(min=1)
        else:
            weights = weights / max(num_items_in_batch, 1)
    accuracy = metrics.running()
    try:
        loss, ranks = loss_and_ranks(
            x, decoder.weight, labels, decoder.bias, weights, settings, with_ranks=accuracy is not None
        )
    except ValueError as error:  # of a label out of range, which has another name there
        raise ValueError(str(error).replace("target:", "labels:", 1)) from None
    if accuracy is not None:
        accuracy.add(ranks)
    return loss


def _decoded_loss(
    x: Tensor,
    decoder: nn.Module,
    labels: Tensor,
    num_items_in_batch: int | Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """The same, by whatever the decoder makes of (K, H)."""
    logits = decoder(x)
    accuracy = metrics.running()
    if accuracy is not None:
        accuracy.add_logits(logits, labels)
    return masked_lm_loss(logits, labels, num_items_in_batch=num_items_in_batch, weight_per_row=weights)


def is_plain_linear(module: nn.Module, pre_hooks: int) -> "TypeGuard[nn.Linear]":
    """Whether a module is nn.Linear and nothing is on it but so many forward pre-hooks, which are ours."""
    hooks = (module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
    return (
        type(module) is nn.Linear
        and not nn.modules.module._has_any_global_hook()
        and len(module._forward_pre_hooks) == pre_hooks
        and not any(hooks)
        and "forward" not in module.__dict__  # where accelerate puts its own
    )

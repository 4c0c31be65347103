"""The sparse head: only selected positions reach a model's vocabulary projection.

Four hooks, no code for any one model. Before the model's forward, ``labels`` are taken out of the call, so the model
computes no loss of its own. After its base model's forward, the hidden states lose every row that is not selected, and
the model's own head runs on what is left. Before its decoder's forward, if that is a plain linear layer with nothing
after it, the loss is computed from what goes in, without logits, and the decoder is given no rows. After the model's
forward, the loss is put where the model would have put it.

The hooks are plain functions, so copying or pickling a model copies nothing but their names, and what they share, the
running call, lives in a ContextVar: threads and nested calls do not see each other's.

`torch.compile` runs the hooks as they are and compiles what lies between them: finding the selected rows makes a tensor
as long as there are, and it cannot follow a ContextVar. Saying so loads `torch._dynamo` with this module. A call that
brings its rows along (`fastmlm.select_rows`) is compiled as a whole; what the hooks share is then a variable, set while
the call is traced, of which nothing is left in the compiled code.
"""

import dataclasses
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from fastmlm import head_call, head_check, metrics
from fastmlm.head_call import IGNORE_INDEX, Selection
from fastmlm.loss import masked_lm_loss
from fastmlm.masked_lm_head import is_plain_linear, projected_loss
from fastmlm.selection import check_is_masked, check_rows, check_weights

_Model = TypeVar("_Model", bound=nn.Module)

# Labels of pairs of sentences, whose loss pretraining models add to that of the tokens, and the logits they belong to.
_PAIR_LABELS = {"next_sentence_label": "seq_relationship_logits", "sentence_order_label": "sop_logits"}


_LOSS_ONLY: ContextVar[bool] = ContextVar("fastmlm_loss_only", default=False)


@contextmanager
def loss_only() -> Iterator[None]:
    """``with loss_only(): model(**inputs).loss``: sparse models make no other logits in evaluation either."""
    before = _LOSS_ONLY.set(True)
    try:
        yield
    finally:
        _LOSS_ONLY.reset(before)


@dataclasses.dataclass(frozen=True)
class _Applied:
    """What `sparsify` did to a model. In a copy or pickle of the model, the handles belong to the copy's hooks."""

    handles: tuple[RemovableHandle, ...]
    fused: bool  # whether the loss may be computed in place of the decoder
    arguments: tuple[str, ...]  # of forward, in order
    pair_labels: str | None  # the argument of that kind, if forward has one
    replaced: dict[str, Any]  # attributes of the instance that densify puts back


def _take_labels(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of the model: open a call, and keep the labels from the model's own loss."""
    return (_take_labels_now if "rows" in kwargs else _take_labels_eagerly)(model, args, kwargs)


def _keep_rows(base: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Forward hook of the base model: in a sparse call, only the selected hidden states go on to the head."""
    return (_keep_rows_now if _in_traced_call() else _keep_rows_eagerly)(base, args, output)


def _compute_loss(decoder: nn.Module, args: tuple[Any, ...]) -> Any:
    """Forward pre-hook of the decoder: in a sparse call, the loss in place of logits, which then are of no rows."""
    return (_compute_loss_now if _in_traced_call() else _compute_loss_eagerly)(decoder, args)


def _put_loss(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of the model, also after an exception (then without output): close the call and add the loss."""
    return (_put_loss_now if _in_traced_call() else _put_loss_eagerly)(model, args, kwargs, output)


def _in_traced_call() -> bool:
    return head_call.is_traced() and head_call.TRACED.call is not None


def _take_labels_now(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    applied = model._fastmlm_sparse
    kwargs = dict(kwargs)
    check_is_masked(kwargs)
    given = "rows" in kwargs
    rows, _ = kwargs.pop("rows", None), kwargs.pop("count", None)  # which both come of select_rows
    if given:
        check_rows(rows)
    weights, tokens = kwargs.pop("loss_weights", None), kwargs.pop("loss_tokens", None)
    position = applied.arguments.index("labels")
    if position < len(args):
        labels, args = args[position], (*args[:position], None, *args[position + 1 :])
    else:
        labels = kwargs.pop("labels", None)
    selection = None
    if labels is None and not (weights is None and tokens is None):  # as where a Trainer smooths them itself
        raise ValueError("loss_weights, loss_tokens: expected labels beside them, for a loss that the model computes")
    if labels is not None:
        divisor = kwargs.pop("num_items_in_batch", None)
        check_weights(labels, weights, tokens, divisor)
        divisor = divisor if tokens is None else tokens.sum()
        weights = weights if weights is None else weights.reshape(-1)
        labels = labels.reshape(-1)
        rows = rows if given else labels.ne(IGNORE_INDEX).nonzero().squeeze(-1)
        named = dict(zip(applied.arguments, args, strict=False)) | kwargs
        selection = Selection(labels, rows, given, weights, divisor, named.get(applied.pair_labels))
    loss_alone = not head_call.is_traced() and _LOSS_ONLY.get()  # a ContextVar cannot be traced
    head_call.enter(model, selection, selection is not None and (model.training or loss_alone))
    return args, kwargs


def _keep_rows_now(base: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    call = head_call.running()
    if call is None or call.selection is None or not call.sparse or call.model.base_model is not base:
        return None
    selected = call.selection.take(output[0])
    if isinstance(output, tuple):
        return (selected, *output[1:])
    return dataclasses.replace(output, **{next(iter(output)): selected})


def _compute_loss_now(decoder: nn.Module, args: tuple[Any, ...]) -> Any:
    call = head_call.running()
    if call is None or not call.sparse or not call.model._fastmlm_sparse.fused:  # type: ignore[union-attr]
        return None
    # Looked at in each call, since adapters and hooks may have come in between.
    if call.model.get_output_embeddings() is not decoder or not is_plain_linear(decoder, 1) or len(args) != 1:  # type: ignore[operator]
        return None
    assert call.selection is not None
    x = args[0]
    rows, labels = x.reshape(-1, x.shape[-1]), call.selection.labels_of_rows(x.device)
    weights = call.selection.weights_of_rows(x.device)
    call.losses.append(projected_loss(rows, decoder, labels, call.selection.divisor, weights))
    return (x[..., :0, :],)


def _put_loss_now(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    call = head_call.running()
    if call is None or call.model is not model:  # another hook failed before ours opened the call
        return None
    head_call.leave(call)
    if call.selection is None or output is None:
        return None
    if call.losses:
        loss = call.losses[0]
    else:
        logits = output[0] if call.sparse else call.selection.take(output[0])
        labels = call.selection.labels_of_rows(logits.device)
        weights, divisor = call.selection.weights_of_rows(logits.device), call.selection.divisor
        loss = masked_lm_loss(logits.flatten(0, -2), labels, num_items_in_batch=divisor, weight_per_row=weights)
        accuracy = metrics.running()
        if accuracy is not None:
            accuracy.add_logits(logits.flatten(0, -2), labels)
    pair_labels = call.selection.pair_labels
    if pair_labels is not None:
        # After the tokens' logits in every model that has them.
        name: Any = model._fastmlm_sparse.pair_labels  # type: ignore[union-attr]
        pairs = output[1] if isinstance(output, tuple) else output[_PAIR_LABELS[name]]
        loss = loss + F.cross_entropy(pairs.reshape(-1, pairs.shape[-1]).to(loss.dtype), pair_labels.reshape(-1))
    return (loss, *output) if isinstance(output, tuple) else dataclasses.replace(output, loss=loss)


# `torch.compile` runs these as they are.
_take_labels_eagerly = torch.compiler.disable(_take_labels_now)
_keep_rows_eagerly = torch.compiler.disable(_keep_rows_now)
_compute_loss_eagerly = torch.compiler.disable(_compute_loss_now)
_put_loss_eagerly = torch.compiler.disable(_put_loss_now)


def sparsify(model: _Model) -> _Model:
    """``loss = F.cross_entropy(head(base(...).last_hidden_state[labels != -100]), labels[labels != -100])``

    Makes a Hugging Face ``*ForMaskedLM`` run its head on selected positions only, in place; `densify` undoes it. The
    model is called as before and its loss and gradients stay the same up to rounding. Parameters, ``state_dict`` and
    ``save_pretrained`` are untouched; copies and pickles of the model are sparse too. Doing it twice changes nothing.
    Given a model inside ``torch.compile``, data parallelism or PEFT, it works on the one inside.

    Called with ``labels``, (B, S), int32 or int64, -100 where not selected:

    - in training mode, ``logits`` are of the K selected rows, (1, K, V); or of none, (1, 0, V), where the decoder is a
      plain linear layer with nothing after it: then the loss is `fastmlm.loss.linear_cross_entropy`, which holds none;
    - in evaluation mode, ``logits`` stay (B, S, V), except under `loss_only`;
    - ``loss`` is `masked_lm_loss`: the mean over the selected tokens, or their sum divided by ``num_items_in_batch``
      where that is given (most models drop it, and their gradients grow with the accumulation steps; so that the
      Trainer gives it, ``model.accepts_loss_kwargs`` is set). Float32 at least; 0, not NaN, where nothing is selected.
      A pretraining model adds the loss of its pairs of sentences where their label is given (without it, its own loss
      would be None); with two losses, the Trainer is left to divide by the accumulation steps.

    With ``rows`` and ``count`` of `fastmlm.select_rows` beside the labels, all tensors have fixed shapes, nothing waits
    for a GPU, and ``torch.compile(fullgraph=True)`` and CUDA graphs take the call (where `loss_only` has no effect and
    `MaskedAccuracy` does not count). Not for ``nn.DataParallel``, which would divide the rows among its replicas.

    With ``loss_weights``, floating numbers of the labels' shape, the loss of each position is multiplied by its weight;
    weights of positions that are not selected are not looked at. With ``loss_tokens``, integers, (B,), or one for each
    packed row, the sum is divided by theirs and not by the number of selected tokens, by which weighted losses are
    divided too without them. Both together are the loss of masked diffusion (MDLM, Sahoo et al. 2024; LLaDA, Nie et al.
    2025): with weights of 1 / p and the numbers of tokens that could have been selected, it is an unbiased estimate,
    which a division by the random number of those that were would not be. ``loss_tokens`` and ``num_items_in_batch`` at
    once are refused, for nobody could tell what was counted: `MaskedLMTrainer` counts ``loss_tokens`` and takes them
    out of the batch, and so do loops of one's own that accumulate.

    Called without ``labels``, the model does what it always did.

    Unless parameters are on the meta device or sharded, one tiny batch is run through the model with and without
    hooks, with its head perturbed, and the two losses compared. Parameters, modes and random state come out as before.

    Raises:
        TypeError: the model has no base model, no output embeddings or no ``labels``.
        ValueError: the model cannot run a plain batch of token ids, or its loss with a sparse head is another one.
    """
    inner = _unwrap(model)
    if inner is not model:
        sparsify(inner)
        return model
    if hasattr(model, "_fastmlm_sparse"):
        return model
    name = type(model).__name__
    base = getattr(model, "base_model", model)
    if base is model:
        raise TypeError(f"cannot sparsify {name}: it has no base model, whose hidden states a head projects")
    if getattr(model, "get_output_embeddings", lambda: None)() is None:
        raise TypeError(f"cannot sparsify {name}: get_output_embeddings() gives no projection to the vocabulary")
    if "labels" not in inspect.signature(type(model).forward).parameters:
        raise TypeError(f"cannot sparsify {name}: its forward takes no labels")
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise TypeError(f"cannot sparsify {name}: an encoder-decoder makes its decoder's input from the labels")
    if any(_is_partial(parameter) for parameter in model.parameters()):
        _apply(model, base, fused=False)  # nobody can tell whether anything comes after the decoder
        return model
    try:
        dense, sparse, same = _apply_and_compare(model, base)
    except Exception as error:
        densify(model)
        raise ValueError(f"cannot sparsify {name}: it fails on a plain batch of ids and labels ({error})") from error
    if not same:
        densify(model)
        raise ValueError(f"cannot sparsify {name}: its loss is {dense:.6g}, but {sparse:.6g} with a sparse head")
    return model


def densify(model: _Model) -> _Model:
    """``sparsify(model)`` undone, in place: the model is as it was before. A model that is not sparse is left alone."""
    inner = _unwrap(model)
    applied = getattr(inner, "_fastmlm_sparse", None)
    if applied is not None:
        for handle in applied.handles:
            handle.remove()
        del inner._fastmlm_sparse
        inner.__dict__.pop("accepts_loss_kwargs", None)
        inner.__dict__.update(applied.replaced)
    return model


def is_sparse(model: nn.Module) -> bool:
    """Whether `sparsify` was applied to a model, or to the one inside of what is around it."""
    return hasattr(_unwrap(model), "_fastmlm_sparse")


def hand_out_logits(model: nn.Module) -> None:
    """From now on a sparse model's sparse calls give the logits of the selected rows, (1, K, V), in training too.

    Its loss is then that of these logits. `densify` undoes this as well.
    """
    inner = _unwrap(model)
    inner._fastmlm_sparse = dataclasses.replace(inner._fastmlm_sparse, fused=False)


def _unwrap(model: Any) -> Any:
    """The model inside what torch.compile, data parallelism and PEFT put around it, where hooks find base and head."""
    peft = sys.modules.get("peft")
    while True:
        if isinstance(model, (DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif peft is not None and isinstance(model, peft.PeftModel):
            model = model.get_base_model()
        else:
            return model


def _pair_labels(model: nn.Module) -> str | None:
    """The argument that takes labels of pairs of sentences, if the model's forward has one."""
    return next((name for name in _PAIR_LABELS if name in inspect.signature(type(model).forward).parameters), None)


def _apply(model: Any, base: nn.Module, fused: bool) -> None:
    handles = (
        model.register_forward_pre_hook(_take_labels, with_kwargs=True),
        base.register_forward_hook(_keep_rows),
        model.get_output_embeddings().register_forward_pre_hook(_compute_loss),
        model.register_forward_hook(_put_loss, with_kwargs=True, always_call=True),
    )
    arguments = tuple(inspect.signature(type(model).forward).parameters)[1:]  # without self
    pair_labels = _pair_labels(model)
    replaced = {key: value for key, value in model.__dict__.items() if key == "accepts_loss_kwargs"}
    model._fastmlm_sparse = _Applied(handles, fused, arguments, pair_labels, replaced)
    # The number of tokens divides the loss of the tokens alone: with another loss beside it, the Trainer is to divide
    # the sum of both by the number of accumulation steps.
    model.accepts_loss_kwargs = pair_labels is None


def _apply_and_compare(model: Any, base: nn.Module) -> tuple[float, float, bool]:
    """The model's own loss of a tiny batch, its loss as a sparse model, and whether they are the same up to rounding.

    The loss is left to be computed in place of the decoder if that gives the same, else by the model's own decoder.
    """
    inputs = head_check.tiny_batch(model, IGNORE_INDEX, _pair_labels(model))
    untouched = head_check.gives_what_its_decoder_gives(model, base, inputs)
    hidden: list[Tensor] = []
    seen = base.register_forward_hook(lambda _module, _inputs, output: hidden.append(output[0].float()))
    try:
        with (
            head_check.perturbed_head(model, base),
            head_check.no_dropout(model),
            torch.no_grad(),
            metrics.nobody_counts(),
        ):
            dense, logits = model(**inputs)[:2]
            _apply(model, base, fused=untouched)
            fused = head_check.loss_or_none(model, inputs)
            if fused is None or not head_check.close(dense, fused, logits.dtype):
                model._fastmlm_sparse = dataclasses.replace(model._fastmlm_sparse, fused=False)
            sparse = model(**inputs)[0]
    finally:
        seen.remove()
    # The loss alone would not tell in half precision: without labels the base model must do what it does with them.
    if not torch.allclose(hidden[0], hidden[-1], rtol=1e-3, atol=1e-3 * float(hidden[0].abs().max())):
        raise ValueError("its hidden states depend on the labels")
    return float(dense), float(sparse), head_check.close(dense, sparse, logits.dtype)


def _is_partial(parameter: Tensor) -> bool:
    """Whether this process holds no or only some of its values: on meta, a DTensor, or partitioned by DeepSpeed."""
    return parameter.is_meta or hasattr(parameter, "device_mesh") or hasattr(parameter, "ds_id")

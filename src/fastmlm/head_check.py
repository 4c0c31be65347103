"""What `fastmlm.head` tries a model with when it is made sparse: a tiny batch, noise in its head, modes put back."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# How far the sparse loss may lie from the model's own, relative to it. Both see the same hidden states, so only the
# order of summation inside the head differs: a few roundings, for which 1e-4 is ample in float32, as TF32 too (some
# models compute their loss in float32 even where all else is float64). A model in half precision may also round its own
# loss, per row and per addition: 4 units in the last place. A row from a wrong position changes it by some percent.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def gives_what_its_decoder_gives(model: Any, base: nn.Module, inputs: dict[str, Tensor]) -> bool:
    """Whether the logits are the decoder's own output in training: dropout after it, say, shows nowhere else."""
    projected: list[Any] = []
    seen = model.get_output_embeddings().register_forward_hook(lambda _m, _i, output: projected.append(output))
    try:
        with _modes(model), torch.no_grad():
            model.train()
            base.eval()  # which may update statistics in training, and is no matter here
            logits = model(**inputs)[1]
    finally:
        seen.remove()
    return [x.data_ptr() for x in projected if isinstance(x, Tensor)] == [logits.data_ptr()]


def loss_or_none(model: Any, inputs: dict[str, Tensor]) -> Tensor | None:
    """The loss, unless the model cannot do without logits."""
    try:
        return model(**inputs)[0]
    except Exception:
        return None


def close(dense: Tensor, sparse: Tensor, dtype: torch.dtype) -> bool:
    """Whether two losses of a model that computes in a type are the same up to rounding; not where either is NaN."""
    return math.isclose(float(dense), float(sparse), rel_tol=_TOLERANCE[dtype])


def tiny_batch(model: Any, ignore_index: int, pair_labels: str | None) -> dict[str, Tensor]:
    """Two rows of eight ordinary ids, with 4 and 2 of them selected; a label of the pair of sentences, if asked for."""
    embedding = model.get_input_embeddings().weight
    projection = getattr(model.get_output_embeddings(), "weight", embedding)  # an adaptive softmax has several
    vocab_size = min(embedding.shape[0], projection.shape[0])
    special = [value for key, value in model.config.to_dict().items() if key.endswith("_token_id")]
    ordinary = torch.tensor([id_ for id_ in range(vocab_size) if id_ not in special] or range(vocab_size), device="cpu")
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = ordinary[torch.randint(len(ordinary), (2, 2, 8), generator=generator, device="cpu")]
    input_ids, labels = drawn.to(embedding.device)
    selected = torch.tensor([[0, 1, 1, 0, 0, 1, 0, 1], [0, 0, 0, 1, 0, 0, 1, 0]], device=labels.device).bool()
    inputs = {"input_ids": input_ids, "labels": labels.where(selected, ignore_index)}
    return inputs if pair_labels is None else inputs | {pair_labels: torch.tensor([0, 1], device=labels.device)}


@contextmanager
def perturbed_head(model: nn.Module, base: nn.Module) -> Iterator[None]:
    """Add noise to every parameter outside the base model: a bias or adapter of zeros could hide a mistake."""
    inside = {id(parameter) for parameter in base.parameters()}
    head = [p for p in model.parameters() if id(p) not in inside and p.is_floating_point()]
    originals = [parameter.detach().clone() for parameter in head]
    try:
        with torch.no_grad():
            for seed, parameter in enumerate(head):
                generator = torch.Generator(parameter.device).manual_seed(seed)
                parameter.add_(torch.empty_like(parameter).normal_(std=0.1, generator=generator))
        yield
    finally:
        with torch.no_grad():
            for parameter, original in zip(head, originals, strict=True):
                parameter.copy_(original)


@contextmanager
def no_dropout(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode, except the model itself, so that its head is sparse; random state restored."""
    with _modes(model):
        model.eval()
        model.training = True
        yield


@contextmanager
def _modes(model: nn.Module) -> Iterator[None]:
    """Modes and random state come out as they were."""
    modes = [(module, module.training) for module in model.modules()]
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for module, mode in modes:
            module.training = mode

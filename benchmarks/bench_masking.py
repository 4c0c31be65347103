"""``mask_tokens``, native and in PyTorch, against Hugging Face's ``torch_mask_tokens`` and against copying memory."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorForLanguageModeling

from fastmlm import MaskingSpec, mask_tokens
from fastmlm.kernels.cpu import _native

SHAPES = [(16, 128), (64, 512), (8, 8192)]
IMPLS = [*(f"cpp, {isa}" for isa in _native.isas()), "reference"]


@pytest.fixture
def impl(request: pytest.FixtureRequest) -> Iterator[str]:
    """``impl=`` by its name here, with the instruction set chosen."""
    name, _, isa = request.param.partition(", ")
    _native.select_isa(isa or None)
    yield name
    _native.select_isa(None)


def make_batch(ids: list[int], rows: int, length: int) -> Tensor:
    stream = torch.tensor(ids).repeat(-(-rows * length // len(ids)))
    return stream[: rows * length].view(rows, length)


@pytest.mark.parametrize("given", ["column", "ids"])
@pytest.mark.parametrize(
    ("rows", "length", "impl"),
    [(64, 512, impl) for impl in IMPLS] + [(*shape, impl) for shape in SHAPES[::2] for impl in (IMPLS[0], IMPLS[-1])],
    indirect=["impl"],
)
def bench_mask_tokens(
    compare: Callable[..., None],
    corpus_ids: Any,
    rows: int,
    length: int,
    given: str,
    impl: str,
    request: pytest.FixtureRequest,
) -> None:
    tokenizer, ids = corpus_ids
    batch = make_batch(ids, rows, length)
    special = torch.zeros_like(batch) if given == "column" else None
    theirs = DataCollatorForLanguageModeling(tokenizer)
    spec = MaskingSpec.from_tokenizer(tokenizer)
    compare(
        lambda: mask_tokens(batch, spec, seed=1, special_tokens_mask=special, impl=impl),
        # A fresh copy, since it masks its input in place; the copy is about 1 % of its time.
        lambda: theirs.torch_mask_tokens(batch.clone(), special_tokens_mask=special),
        case=f"{rows}×{length}, specials from {'a column' if special is not None else 'the ids'}",
        ours_name=f"mask_tokens, {request.node.callspec.params['impl']}",
        peer_name="HF torch_mask_tokens",
        rounds=20,
        calls=20,
    )


@pytest.mark.parametrize("reuse", [True, False])
def bench_mask_tokens_as_a_copy(compare: Callable[..., None], corpus_ids: Any, reuse: bool) -> None:
    """At 16 M tokens memory is what counts: the peer copies the ids twice, into tensors that are there already.

    Ours writes to such tensors too, or to new ones, whose pages the system has to clear before they are written.
    """
    tokenizer, ids = corpus_ids
    batch = make_batch(ids, 32768, 512)
    spec = MaskingSpec.from_tokenizer(tokenizer)
    first, second, output, labels = (torch.empty_like(batch) for _ in range(4))
    compare(
        lambda: mask_tokens(batch, spec, seed=1, out=(output, labels) if reuse else None),
        lambda: (first.copy_(batch), second.copy_(batch)),
        case="32768×512",
        ours_name=f"mask_tokens{', out=(ids, labels)' if reuse else ''}",
        peer_name="two Tensor.copy_",
        rounds=15,
        calls=1,
    )

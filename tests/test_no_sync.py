"""Nothing on the way of a GPU makes the host wait: run on meta tensors, which take its branches, under `NoSync`."""

from typing import Any

import pytest
import torch
from no_sync import NoSync

from fastmlm import MaskedLMHead, Overflow, select_rows, sparsify
from fastmlm.testing import make_batch, make_model


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: int(x[0]),
        lambda x: bool((x > 0).all()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: x.cpu(),
        lambda x: torch.equal(x, x),
        lambda x: x.unique(),
        lambda x: x.index_put_((x > 0,), x[:1]),
        lambda x: torch.repeat_interleave(x, x),
    ],
)
def test_the_mode_finds_what_waits(wait: Any) -> None:
    x = torch.arange(5, device="meta")
    with pytest.raises((AssertionError, NotImplementedError), match=r"waits|Cannot copy out of meta"), NoSync():
        wait(x)
    with NoSync() as mode:
        x * 2
    assert mode.operations == 1


def meta(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x.to("meta") for name, x in batch.items()}


@pytest.mark.parametrize("name", ["Bert", "Esm", "ModernBert"])
def test_a_step_of_a_sparse_model(name: str) -> None:
    """With rows; without them the mode finds that it waits."""
    model = sparsify(make_model(name)).to("meta")
    batch = meta(make_batch())
    del batch["attention_mask"]  # transformers itself waits to hear whether it has a zero
    overflow = Overflow()
    with NoSync() as mode:
        selected = select_rows(batch["labels"], 128)
        overflow.add(selected)
        model(**batch, **selected._asdict(), num_items_in_batch=selected.count).loss.backward()
    assert mode.operations > 100
    with pytest.raises(AssertionError, match="nonzero"), NoSync():
        model(**batch)


def test_a_step_of_a_head() -> None:
    head = MaskedLMHead(16, 40).to("meta")
    x = torch.empty(4, 8, 16, device="meta", requires_grad=True)
    labels = torch.empty(4, 8, dtype=torch.int64, device="meta")
    with NoSync():
        head(x, labels, weight_per_token=x.detach()[..., 0], **select_rows(labels, 128)._asdict()).backward()
    with pytest.raises(AssertionError, match="nonzero"), NoSync():
        head(x, labels)

"""Nothing on the way of a GPU makes the host wait: run on meta tensors, which take its branches, under `NoSync`."""

from typing import Any

import pytest
import torch
from no_sync import NoSync
from test_dispatch import KINDS, arguments

from fastmlm import MaskedLMHead, MaskingSpec, Overflow, mask_tokens, reference, select_rows, sparsify
from fastmlm.kernels.gpu import masking as triton_masking
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
        lambda x: torch.tensor([1], device="cpu"),
    ],
)
def test_the_mode_finds_what_waits(wait: Any) -> None:
    x = torch.arange(5, device="meta")
    with pytest.raises((AssertionError, NotImplementedError), match=r"waits|Cannot copy out of meta"), NoSync():
        wait(x)
    with NoSync() as mode:
        x * 2
    assert mode.operations == 1


def meta(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in batch.items()}


class Launches:
    """Stands for a kernel: counts how often it is launched."""

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(isinstance(size, int) for size in grid)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.count += 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("module", [triton_masking, reference])
def test_masking(module: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch, and one before it where an attention mask may say that rows are padded on the left."""
    call, launches = meta(arguments(kind)), Launches()
    monkeypatch.setattr(triton_masking, "_mask_rows", launches)
    monkeypatch.setattr(triton_masking, "_first_real", launches)
    with NoSync() as mode:
        module.mask_tokens(*call.values(), torch.empty_like(call["input_ids"]), torch.empty_like(call["input_ids"]))
    if module is triton_masking:
        assert launches.count == (1 if kind == "plain" else 2)  # one finds where rows start that have an attention mask
        assert set(mode.names) <= {"empty_like", "empty", "view", "detach"}  # room, and masks seen as bytes
    else:
        assert mode.operations > 50


def test_the_checks_of_the_public_function() -> None:
    ids = torch.empty(3, 70, dtype=torch.int32, device="meta")
    units, ends = torch.empty_like(ids), torch.empty(4, dtype=torch.int64, device="meta")
    spec, rates = MaskingSpec(3, 50), torch.empty(3, 70, device="meta")
    spec.tables(ids.device)  # which a spec copies to a device once
    with NoSync() as mode:
        mask_tokens(
            ids,
            spec,
            seed=torch.empty(1, dtype=torch.int64, device="meta"),
            mlm_probability=rates,
            attention_mask=ids,
            special_tokens_mask=ids,
            units=units,
            out=(ids, torch.empty_like(ids)),
        )
        mask_tokens(ids.view(-1), spec, seed=1, cu_seqlens=ends, units=units.view(-1), mlm_probability=rates[:, 0])
    assert mode.operations > 10


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
        head(x, labels, loss_weights=x.detach()[..., 0], **select_rows(labels, 128)._asdict()).backward()
    with pytest.raises(AssertionError, match="nonzero"), NoSync():
        head(x, labels)

"""masked_lm_loss against float64 cross-entropy written out by hand."""

import pytest
import torch
from torch import Tensor

from fastmlm.loss import masked_lm_loss

V = 11


def example(rows: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    logits = 3 * torch.randn(rows, V, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), torch.randint(V, (rows,), generator=generator)


def row_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """-log softmax at the label, from the definition, so that the test shares no code with what it tests."""
    return logits.exp().sum(-1).log() - logits[torch.arange(len(labels)), labels]


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(loss, of)[0]


@pytest.mark.parametrize("ignored", [[], [0], [1, 2, 6]])
def test_mean_over_selected_rows(ignored: list[int]) -> None:
    logits, labels = example()
    kept = [row for row in range(7) if row not in ignored]
    expected = row_losses(logits[kept], labels[kept]).mean()
    labels[ignored] = -100
    loss = masked_lm_loss(logits, labels)
    # 1e-12: both sides are float64 and differ in how they sum V numbers of size 10.
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient(loss, logits), gradient(expected, logits), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("items", [20, torch.tensor(20), torch.tensor([20]), torch.tensor(20, dtype=torch.int32)])
def test_num_items_in_batch_is_the_divisor(items: int | Tensor) -> None:
    logits, labels = example()
    labels[3] = -100
    loss = masked_lm_loss(logits, labels, num_items_in_batch=items)
    expected = row_losses(logits, labels.clamp(min=0))[labels != -100].sum() / 20
    assert loss.shape == ()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("rows", [0, 5])
@pytest.mark.parametrize("items", [None, 9, 0, torch.tensor(0)])
def test_nothing_selected_is_zero_and_differentiable(rows: int, items: int | Tensor | None) -> None:
    # Both ways to have nothing: no rows at all, and rows that are all ignored. A Trainer whose whole step has nothing
    # selected gives 0 items, and 0 / 0 would be NaN.
    logits, labels = example(rows)
    loss = masked_lm_loss(logits, labels.fill_(-100), num_items_in_batch=items)
    assert loss.item() == 0
    assert torch.equal(gradient(loss, logits), torch.zeros(rows, V, dtype=torch.float64))


def test_label_zero_is_an_ordinary_label() -> None:
    logits, labels = example(4)
    labels.zero_()
    torch.testing.assert_close(masked_lm_loss(logits, labels), row_losses(logits, labels).mean(), rtol=1e-12, atol=0)


def test_another_ignore_index() -> None:
    logits, labels = example()
    labels[:] = torch.tensor([5, 1, 5, 2, 3, 5, 0])
    expected = row_losses(logits, labels)[[1, 3, 4, 6]].mean()
    torch.testing.assert_close(masked_lm_loss(logits, labels, ignore_index=5), expected, rtol=1e-12, atol=0)


def test_int32_labels_equal_int64_labels() -> None:
    logits, labels = example()
    assert torch.equal(masked_lm_loss(logits, labels.int()), masked_lm_loss(logits, labels))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_logits_are_summed_in_float32(dtype: torch.dtype) -> None:
    # 8000 rows of about 10 nats: the sum overflows float16 (65504) and stands still in bfloat16 long before the end.
    logits = torch.zeros(8000, V, dtype=dtype)
    logits[:, 0] = 10
    labels = torch.ones(8000, dtype=torch.int64)
    loss = masked_lm_loss(logits, labels)
    assert loss.dtype == torch.float32
    # These logits are exact in every dtype. 1e-5 covers 8000 float32 additions (measured: 1e-7).
    assert loss.item() == pytest.approx(row_losses(logits.double(), labels).mean().item(), rel=1e-5)


def test_result_stays_float32_whatever_counts_the_items() -> None:
    logits, labels = example()
    assert (
        masked_lm_loss(logits.float(), labels, num_items_in_batch=torch.tensor([7.0]).double()).dtype == torch.float32
    )


def test_reads_nothing_on_the_host() -> None:
    # Meta tensors have no values: `.item()`, `if tensor` or a boolean index raises on them.
    logits, labels = (x.to("meta") for x in example())
    assert masked_lm_loss(logits, labels).is_meta
    assert masked_lm_loss(logits, labels, num_items_in_batch=torch.tensor(3, device="meta")).is_meta


@pytest.mark.parametrize(
    ("logits", "labels", "error", "words"),
    [
        (torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64), ValueError, r"\(3, 4\) and labels \(2,\)"),
        (torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64), ValueError, r"\(2, 3, 4\)"),
        (torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), TypeError, "logits must be floating"),
        (torch.zeros(3, 4), torch.zeros(3), TypeError, "labels must be int32 or int64, got torch.float32"),
    ],
)
def test_refuses_what_does_not_fit(logits: Tensor, labels: Tensor, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        masked_lm_loss(logits, labels)

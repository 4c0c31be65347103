"""Selected rows in a buffer of fixed size, and what takes them: sparse models and heads of one's own."""

import copy
import math
from typing import Any

import pytest
import torch
from scipy import stats
from test_masked_lm_head import H as HEAD_H, V as HEAD_V, case
from torch import Tensor

from fastmlm import (
    MaskedAccuracy,
    MaskedLMHead,
    Overflow,
    row_capacity,
    select_rows,
    sparsify,
)
from fastmlm.head import loss_only
from fastmlm.selection import labels_at, take_rows
from fastmlm.testing import CLOSE, dense_loss, gradients, make_batch, make_model


def with_rows(batch: dict[str, Tensor], capacity: int = 128) -> dict[str, Tensor]:
    return batch | select_rows(batch["labels"], capacity)._asdict()


def first(labels: Tensor, capacity: int) -> Tensor:
    """The labels without those that no slot is left for."""
    return labels.where((labels.flatten() != -100).cumsum(0).view_as(labels) <= capacity, -100)


# ---- The buffer ----


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 65), (1, 507), (2, 3, 5)])
@pytest.mark.parametrize("rate", [0.0, 0.15, 1.0])
def test_rows_are_those_that_nonzero_finds(shape: tuple[int, ...], rate: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(50, shape, generator=generator)  # 0 is an ordinary label
    labels = labels.where(torch.rand(shape, generator=generator) < rate, -100).to(dtype)
    found = (labels.flatten() != -100).nonzero()[:, 0]
    for capacity in (1, max(len(found), 1), len(found) + 1, 600):
        rows, count = select_rows(labels, capacity)
        assert rows.shape == (capacity,)
        assert rows.dtype == torch.int64
        assert count == len(found)
        kept = min(capacity, len(found))
        assert torch.equal(rows[:kept], found[:kept])
        assert (rows[kept:] == labels.numel()).all()
        assert torch.equal(labels_at(labels.flatten(), rows, -100)[:kept], labels.flatten()[found[:kept]])
        assert (labels_at(labels.flatten(), rows, -100)[kept:] == -100).all()


def test_another_ignore_index() -> None:
    rows, count = select_rows(torch.tensor([[-1, -100, 3], [0, -1, -1]]), 4, ignore_index=-1)
    assert rows.tolist() == [1, 2, 3, 6]
    assert count == 3


def test_unused_slots_are_no_ops() -> None:
    """Not even a NaN gets out of them; each row that was taken gets its gradient once."""
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([1, 4, 5, 5])
    taken = take_rows(x, rows)
    assert torch.equal(taken[:2], x[[1, 4]])
    gradient = torch.randn(4, 3, dtype=torch.float64)
    gradient[2:] = torch.nan
    (found,) = torch.autograd.grad(taken, x, gradient)
    assert torch.equal(found[[1, 4]], gradient[:2])
    assert torch.equal(found[[0, 2, 3]], torch.zeros(3, 3, dtype=torch.float64))
    weights = torch.tensor([[1.0], [2.0], [0.0], [0.0]], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda y: take_rows(y, rows) * weights, x)
    assert torch.autograd.gradgradcheck(lambda y: take_rows(y, rows) * weights, x)


def test_nothing_to_take() -> None:
    assert take_rows(torch.empty(0, 3), torch.zeros(4, dtype=torch.int64)).shape == (4, 3)


# ---- Its size ----


@pytest.mark.parametrize("p", [0.01, 0.15, 0.3, 0.5])
@pytest.mark.parametrize("tokens", [512, 8192, 32768, 1 << 20])
def test_a_capacity_is_enough(tokens: int, p: float) -> None:
    capacity = row_capacity(tokens, p)
    assert capacity % 128 == 0
    assert capacity == math.ceil((tokens * p + 6 * math.sqrt(tokens * p * (1 - p))) / 128) * 128
    # Of a binomial law, whose tail is heavier than the normal one's where p is small: once in 10^6 steps at the most.
    assert stats.binom.sf(capacity, tokens, p) < 1e-6


@pytest.mark.parametrize("size", [2, 7])
def test_a_capacity_is_enough_for_units(size: int) -> None:
    tokens, p = 8190, 0.15
    assert tokens % size == 0
    capacity = row_capacity(tokens, p, unit_size=size)
    assert stats.binom.sf(capacity / size, tokens // size, p) < 1e-6
    # That the size is taken into account: less would not have been enough.
    assert stats.binom.sf(row_capacity(tokens, p) / size, tokens // size, p) > 1e-6 or size == 2


def test_a_capacity_of_any_rate_is_all() -> None:
    assert row_capacity(1000, None) == 1024
    assert row_capacity(1024, 1.0) == 1024
    assert row_capacity(1, 0.15) == row_capacity(0, 0.15) == row_capacity(1000, 0) == 128


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: row_capacity(-1, 0.1), ValueError, "tokens: expected a number of tokens, got -1"),
        (lambda: row_capacity(10, 1.5), ValueError, "mlm_probability: expected a number between 0 and 1, got 1.5"),
        (lambda: row_capacity(10, math.nan), ValueError, "mlm_probability: expected .* got nan"),
        (lambda: row_capacity(10, 0.1, unit_size=0.5), ValueError, "unit_size: expected at least 1, got 0.5"),
        (lambda: select_rows(torch.ones(3), 4), TypeError, "labels: expected an int32 or int64 tensor, got torch.fl"),
        (lambda: select_rows([1, 2], 4), TypeError, "labels: expected an int32 or int64 tensor, got <class 'list'>"),
        (lambda: select_rows(torch.ones(3).long(), 0), ValueError, "capacity: expected at least 1, got 0"),
        (lambda: select_rows(torch.ones(3).long(), 0.15), TypeError, "capacity: expected an int, got 0.15"),
        (lambda: select_rows(torch.ones(3).long(), True), TypeError, "capacity: expected an int, got True"),
    ],
)
def test_bad_arguments(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("rows", [None, [1, 2], torch.ones(3), torch.ones(1, 3).long(), torch.ones(3).int()])
def test_bad_rows(rows: Any) -> None:
    model, batch = sparsify(make_model()), make_batch()
    with pytest.raises(TypeError, match="rows: expected an int64 tensor of one dimension"):
        model(**batch, rows=rows, count=torch.tensor(3))
    model(**batch).loss.backward()  # nothing of the call that failed is left


def test_overflow_is_told() -> None:
    overflow = Overflow()
    overflow.warn()
    labels = torch.arange(10)
    for capacity in (7, 10, 11, 9):
        overflow.add(select_rows(labels, capacity))
    with pytest.warns(UserWarning, match="4 selected positions did not count in the loss"):
        overflow.warn()
    overflow.warn()  # told once


# ---- What takes it ----


@pytest.mark.parametrize("divisor", [None, 17, torch.tensor(17)])
@pytest.mark.parametrize("capacity", [128, 6, 1])
@pytest.mark.parametrize("name", ["Bert", "Esm", "ModernBert"])
def test_a_sparse_model_takes_rows(name: str, capacity: int, divisor: Any) -> None:
    dense, batch = make_model(name), make_batch(counts=(5, 0, 1, 3))
    sparse = sparsify(copy.deepcopy(dense))
    labels = first(batch["labels"], capacity)
    expected = dense_loss(dense, batch | {"labels": labels})
    if divisor is not None:
        expected = expected * (labels != -100).sum() / 17
    out = sparse(**with_rows(batch, capacity), num_items_in_batch=divisor)
    torch.testing.assert_close(out.loss, expected, **CLOSE)
    torch.testing.assert_close(gradients(sparse, out.loss), gradients(dense, expected), **CLOSE)


@pytest.mark.parametrize("name", ["Bert", "Esm"])
def test_nothing_selected(name: str) -> None:
    sparse = sparsify(make_model(name))
    loss = sparse(**with_rows(make_batch(counts=(0, 0)))).loss
    assert loss == 0
    assert not any(g.any() for g in gradients(sparse, loss).values())


@pytest.mark.parametrize("name", ["Bert", "Esm"])
def test_evaluation_takes_rows(name: str) -> None:
    dense, batch = make_model(name).eval(), make_batch(counts=(5, 0, 1, 3))
    sparse = sparsify(copy.deepcopy(dense))
    expected = dense_loss(dense, batch)
    out = sparse(**with_rows(batch))
    torch.testing.assert_close(out.loss, expected, **CLOSE)
    assert out.logits.shape[:2] == batch["labels"].shape
    with loss_only():
        torch.testing.assert_close(sparse(**with_rows(batch)).loss, expected, **CLOSE)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["Bert", "Esm"])
def test_accuracy_counts_rows(name: str, training: bool) -> None:
    sparse, batch = sparsify(make_model(name)).train(training), make_batch(counts=(5, 0, 1, 3))
    with MaskedAccuracy((1, 10)) as expected:
        sparse(**batch)
    with MaskedAccuracy((1, 10)) as found:
        sparse(**with_rows(batch))
    assert found.counts is not None
    assert expected.counts is not None
    assert found.counts.tolist() == expected.counts.tolist()
    assert found.counts[0] == 9


def test_rows_without_labels() -> None:
    sparse, batch = sparsify(make_model()), with_rows(make_batch())
    del batch["labels"]
    assert sparse(**batch).loss is None


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("divisor", [None, 17])
@pytest.mark.parametrize("capacity", [64, 4])
def test_a_head_of_ones_own_takes_rows(capacity: int, divisor: int | None, plain: bool) -> None:
    head = MaskedLMHead(HEAD_H, HEAD_V).double()
    if not plain:
        head.decoder.register_forward_hook(lambda module, args, output: output * 2)
    x, labels = case()
    weights = torch.rand(labels.shape, dtype=torch.float64)
    weights[-1, -1] = torch.nan if labels[-1, -1] == -100 else 1.0  # what an unused slot would find
    assert weights[-1, -1].isnan()
    expected = head(x, first(labels, capacity), loss_weights=weights, num_items_in_batch=divisor)
    wanted = torch.autograd.grad(expected, [x, *head.parameters()])
    selected = select_rows(labels, capacity)._asdict()
    loss = head(x, labels, loss_weights=weights, num_items_in_batch=divisor, **selected)
    torch.testing.assert_close(loss, expected, **CLOSE)
    torch.testing.assert_close(torch.autograd.grad(loss, [x, *head.parameters()]), wanted, **CLOSE)

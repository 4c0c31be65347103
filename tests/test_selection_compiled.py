"""Calls of sparse models that bring their rows along, compiled as a whole, and what the hooks then share."""

import copy
import threading
from typing import Any

import pytest
import torch
from test_masked_lm_head import H as HEAD_H, V as HEAD_V, case
from test_selection import with_rows
from torch import Tensor

from fastmlm import MaskedLMHead, MaskingSpec, advance_seed, mask_tokens, row_capacity, select_rows, sparsify
from fastmlm.head import loss_only
from fastmlm.head_call import _CALL, TRACED
from fastmlm.testing import CLOSE, H, V, dense_loss, gradients, make_batch, make_model

# Dynamo's own: it makes an object of a Function, and asks tensors for gradients that they do not keep.
of_dynamo = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning", "ignore:The .grad attribute"
)


@of_dynamo
@pytest.mark.parametrize("whole", [True, False], ids=["the step", "the model"])
@pytest.mark.parametrize("name", ["Bert", "Esm", "ModernBert"])
def test_fullgraph(name: str, whole: bool) -> None:
    """One graph, no compilation for other batches, nothing left behind."""
    dense = make_model(name)
    sparse = sparsify(copy.deepcopy(dense))

    def step(**batch: Tensor) -> Tensor:
        return sparse(**with_rows(batch)).loss

    compiled: Any = torch.compile(step if whole else sparse, fullgraph=True, backend="aot_eager")
    call = compiled if whole else lambda **batch: compiled(**with_rows(batch)).loss
    try:
        call(**make_batch(counts=(5, 0, 1, 3)))
        with torch.compiler.set_stance("fail_on_recompile"):
            for seed, counts in enumerate([(5, 0, 1, 3), (0, 0, 0, 0), (1, 7, 2, 6)]):
                batch = make_batch(seed, counts)
                loss = call(**batch)
                assert TRACED.call is None
                found = gradients(sparse, loss)
                expected = dense_loss(dense, batch) if any(counts) else sparse(**batch).loss
                torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-7)  # ESM has a float32 step of its own
                wanted = gradients(dense if any(counts) else sparse, expected)
                torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
    finally:
        torch.compiler.reset()


@of_dynamo
def test_fullgraph_from_ids_to_loss() -> None:
    """Masks by a seed on the device, which advances; rows; the model: the README's step, in one graph."""
    sparse, spec = sparsify(make_model()), MaskingSpec(3, V, (0, 1, 2), mlm_probability=0.4)

    def step(ids: Tensor, seed: Tensor) -> Tensor:
        masked = mask_tokens(ids, spec, seed=seed)
        advance_seed(seed)
        selected = select_rows(masked.labels, row_capacity(ids.numel(), spec.mlm_probability))
        return sparse(input_ids=masked.input_ids, labels=masked.labels, **selected._asdict()).loss

    compiled: Any = torch.compile(step, fullgraph=True, backend="aot_eager")
    seeds, losses = (torch.tensor([5]), torch.tensor([5])), []
    try:
        for i in range(3):
            ids = torch.randint(4, V, (4, 10), generator=torch.Generator().manual_seed(i))
            expected, loss = (function(ids, seed) for function, seed in zip((step, compiled), seeds, strict=True))
            torch.testing.assert_close(loss, expected, **CLOSE)
            torch.testing.assert_close(gradients(sparse, loss), gradients(sparse, expected), **CLOSE)
            assert torch.equal(*seeds)
            losses.append(loss.item())
    finally:
        torch.compiler.reset()
    assert len(set(losses)) == 3


@of_dynamo
def test_fullgraph_of_a_head() -> None:
    head = MaskedLMHead(HEAD_H, HEAD_V).double()
    compiled: Any = torch.compile(head, fullgraph=True, backend="aot_eager")
    x, labels = case()
    try:
        loss = compiled(x, labels, **select_rows(labels, 64)._asdict())
        torch.testing.assert_close(loss, head(x, labels), **CLOSE)
    finally:
        torch.compiler.reset()


@of_dynamo
def test_a_graph_that_breaks_inside() -> None:
    """What was traced before the break is found by the hooks after it, compiled or not."""
    dense, batch = make_model(), make_batch(counts=(5, 0, 1, 3))
    sparse = sparsify(copy.deepcopy(dense))
    # After the rows were kept and before the loss is computed.
    sparse.cls.predictions.transform.register_forward_hook(_break)
    compiled: Any = torch.compile(sparse, backend="aot_eager")
    try:
        torch.testing.assert_close(compiled(**with_rows(batch)).loss, dense_loss(dense, batch), **CLOSE)
        assert TRACED.call is None
        torch.testing.assert_close(sparse(**batch).loss, dense_loss(dense, batch), **CLOSE)
    finally:
        torch.compiler.reset()


def _break(module: Any, args: Any, output: Any) -> None:
    torch._dynamo.graph_break()


@of_dynamo
def test_what_follows_a_break_may_run_as_it_is() -> None:
    """The rest of the call eagerly: the hooks find what was traced."""
    dense, batch = make_model(), make_batch(counts=(5, 0, 1, 3))
    sparse = sparsify(copy.deepcopy(dense))
    head = sparse.cls
    sparse.cls = torch.compiler.disable(head, recursive=True)
    compiled: Any = torch.compile(sparse, backend="eager")
    try:
        out = compiled(**with_rows(batch))
        torch.testing.assert_close(out.loss, dense_loss(dense, batch), **CLOSE)
        assert out.logits.shape == (1, 0, V)  # the decoder's hook knew of the call
        assert TRACED.call is None
    finally:
        torch.compiler.reset()


@of_dynamo
def test_a_model_inside_of_a_model() -> None:
    """A compiled call within another: each has its own rows, and the outer one goes on where it was."""
    dense, batch, other = make_model(), make_batch(counts=(5, 0, 1, 3)), make_batch(1, counts=(2, 4, 1, 1))
    inner, outer = sparsify(copy.deepcopy(dense)), sparsify(copy.deepcopy(dense))
    losses: list[Tensor] = []

    def run_inner(module: Any, args: Any, output: Any) -> None:
        losses.append(inner(**with_rows(other)).loss)

    outer.bert.embeddings.register_forward_hook(run_inner)

    def step(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        losses.clear()
        loss = outer(**with_rows(batch)).loss
        return loss, losses[0]

    compiled: Any = torch.compile(step, fullgraph=True, backend="eager")
    try:
        for found, expected in zip(compiled(batch), (batch, other), strict=True):
            torch.testing.assert_close(found, dense_loss(dense, expected), **CLOSE)
    finally:
        torch.compiler.reset()


@of_dynamo
def test_evaluation_compiled() -> None:
    """With rows, as a whole, also where the loss alone is asked for; without, in few compilations."""
    dense, batch = make_model().eval(), make_batch(counts=(5, 0, 1, 3))
    sparse = sparsify(copy.deepcopy(dense))
    try:
        compiled: Any = torch.compile(sparse, fullgraph=True, backend="eager")
        with loss_only():
            torch.testing.assert_close(compiled(**with_rows(batch)).loss, dense_loss(dense, batch), **CLOSE)
        torch.compiler.reset()
        compiled = torch.compile(sparse, backend="eager")
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            for training in (True, False, True):
                compiled.train(training)
                for seed in range(3):
                    compiled(**make_batch(seed))
                compiled(**{name: column for name, column in batch.items() if name != "labels"})
                with torch.no_grad():
                    compiled(**batch)
    finally:
        torch.compiler.reset()


# ---- What hooks share ----


def test_another_thread_compiles() -> None:
    """``torch.compiler.is_compiling`` is then true in this thread too, from one moment to the next."""
    dense, batch = make_model(), make_batch()
    sparse = sparsify(copy.deepcopy(dense))
    handle = sparse.cls.register_forward_hook(lambda *_: setattr(torch.compiler, "_is_compiling_flag", True))
    try:
        for inputs in (batch, with_rows(batch)):
            torch.testing.assert_close(sparse(**inputs).loss, dense_loss(dense, batch), **CLOSE)
            torch.compiler._is_compiling_flag = False
            assert _CALL.get() is TRACED.call is None
    finally:
        torch.compiler._is_compiling_flag = False
        handle.remove()
    assert sparse.base_model(batch["input_ids"])[0].shape == (*batch["input_ids"].shape, H)


def test_threads_have_calls_of_their_own() -> None:
    """One in the middle of a call with rows, another one before, in and after its own."""
    dense, batch, other = make_model(), make_batch(), make_batch(5, counts=(1, 5, 3))
    sparse = sparsify(copy.deepcopy(dense))
    found: list[Tensor] = []

    def run(module: Any, args: Any, output: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=lambda: found.append(sparse(**other).loss))
            thread.start()
            thread.join()

    handle = sparse.cls.predictions.transform.register_forward_hook(run)
    loss = sparse(**with_rows(batch)).loss
    handle.remove()
    torch.testing.assert_close(loss, dense_loss(dense, batch), **CLOSE)
    torch.testing.assert_close(found[0], dense_loss(dense, other), **CLOSE)


def test_a_batch_that_nobody_masked() -> None:
    with pytest.raises(ValueError, match="labels: expected a masked batch, got one as a collator"):
        sparsify(make_model())(**make_batch(), fastmlm_keys=torch.zeros(3, 2))

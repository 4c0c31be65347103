"""Selection: what it refuses, what it keeps, and mask_tokens with one as PyTorch sees it: compiled, without waits."""

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from no_sync import NoSync
from oracle import PLAIN
from test_dispatch import SPEC, arguments, outputs
from test_no_sync import Launches, meta

from fastmlm import MaskingSpec, Selection, available_impls, mask_tokens, reference
from fastmlm.kernels.gpu import masking as triton_masking

IDS = torch.tensor([[2, 3, 4], [5, 6, 7]])
MARKS, RATES = torch.ones(10, dtype=torch.uint8), torch.full((10,), 0.5)

# fmt: off
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"word_marks": [0, 1]}, TypeError, r"word_marks: expected a \(vocab_size,\) uint8 tensor, got list"),
    ({"word_marks": MARKS.long()}, TypeError, r"word_marks: expected .*got torch.int64 tensor of shape \(10,\)"),
    ({"word_marks": MARKS[None]}, TypeError, r"word_marks: .*\(1, 10\)"),
    ({"word_marks": MARKS[:0]}, TypeError, r"word_marks: .*\(0,\)"),
    ({"word_marks": MARKS * 4}, ValueError, "word_marks: expected values from 0 to 3, got values from 4 to 4"),
    ({"span_lengths": 3}, TypeError, "span_lengths: expected probabilities, got int"),
    ({"span_lengths": "0.5"}, TypeError, "span_lengths: expected probabilities, got str"),
    ({"span_lengths": (0.5, "0.5")}, TypeError, r"span_lengths\[1\]: expected a number between 0 and 1, got str"),
    ({"span_lengths": (1.5, -0.5)}, ValueError, r"span_lengths\[0\]: expected a number between 0 and 1, got 1.5"),
    ({"span_lengths": (0.5, 0.4)}, ValueError, "span_lengths: expected probabilities that sum to 1, got a sum of 0.9"),
    ({"span_lengths": (1, *[0] * 64)}, ValueError, "span_lengths: expected at most 64 probabilities, got 65"),
    ({"replace_per_unit": 1}, TypeError, "replace_per_unit: expected a bool, got int"),
    ({"rates_by_id": [0.5]}, TypeError, r"rates_by_id: expected a \(vocab_size,\) tensor of floating point, got list"),
    ({"rates_by_id": MARKS}, TypeError, "rates_by_id: .*got torch.uint8"),
    ({"rates_by_id": RATES * 3}, ValueError, "rates_by_id: expected values from 0 to 1, got values from 1.5 to 1.5"),
    ({"rates_by_id": RATES * float("nan")}, ValueError, "rates_by_id: expected values from 0 to 1"),
    ({"exact": None}, TypeError, "exact: expected a bool, got NoneType"),
    ({"at_least": -1}, ValueError, r"at_least: expected an int in \[0, 2147483647\), got -1"),
    ({"at_least": 1.0}, TypeError, "at_least: expected an int, got float"),
    ({"at_most": 1 << 31}, ValueError, r"at_most: expected an int in \[0, 2147483647\), got 2147483648"),
    ({"at_least": 3, "at_most": 2}, ValueError, r"at_most: expected an int in \[3, 2147483647\), got 2"),
    ({"at_most": True}, TypeError, "at_most: expected an int, got bool"),
    ({"rates_by_id": RATES, "exact": True}, ValueError, "rates_by_id: expected None with exact, at_least or at_most"),
    ({"rates_by_id": RATES, "at_most": 5}, ValueError, "rates_by_id: expected None with exact"),
]
BAD_CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"selection": "words"}, TypeError, "selection: expected a Selection, got str"),
    ({"selection": Selection(word_marks=MARKS[:9])}, ValueError, r"selection\.word_marks: .*spec's 10 ids, got 9"),
    ({"selection": Selection(rates_by_id=RATES[:9])}, ValueError, r"selection\.rates_by_id: .*10 ids, got 9"),
    ({"selection": Selection(word_marks=MARKS), "units": IDS * 0}, ValueError, "units: expected None .*word_marks"),
    ({"selection": Selection(rates_by_id=RATES), "mlm_probability": torch.ones(2)}, ValueError,
     "mlm_probability: expected no tensor with .*rates_by_id"),
    ({"selection": Selection(exact=True), "mlm_probability": torch.ones(2, 3)}, ValueError,
     "mlm_probability: expected one number or one a row with .*exact"),
    ({"selection": Selection(at_least=1), "mlm_probability": torch.ones(2, 3)}, ValueError, "mlm_probability: "),
    # Two packed rows of a token each: (2,) is one a token.
    ({"selection": Selection(at_most=1), "input_ids": IDS[0, :2], "cu_seqlens": torch.tensor([0, 1, 2]),
      "mlm_probability": torch.ones(2)}, ValueError, "mlm_probability: expected one number or one a row"),
]
# fmt: on


@pytest.mark.parametrize(("settings", "error", "message"), BAD)
def test_every_bad_setting_is_named(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Selection(**settings)


@pytest.mark.parametrize(("call", "error", "message"), BAD_CALLS)
def test_every_bad_argument_is_named(call: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        mask_tokens(**{"input_ids": IDS, "spec": MaskingSpec(1, 10), "seed": 0, "impl": "reference"} | call)


@pytest.mark.parametrize("impl", available_impls())
def test_a_rate_a_row_of_rows_of_one_token(impl: str) -> None:
    """(B, 1) is one a token too, which is the same."""
    spec, rates = MaskingSpec(1, 10), torch.tensor([[1.0], [0.0], [1.0]])
    ids = IDS.view(6, 1)[:3]
    masked = mask_tokens(ids, spec, seed=0, mlm_probability=rates, selection=Selection(exact=True), impl=impl)
    assert (masked.labels != -100).flatten().tolist() == [True, False, True]


def test_numbers_of_other_kinds() -> None:
    made = Selection(span_lengths=torch.tensor([0.5, 0.5]), at_least=np.int64(2), at_most=np.int32(2))
    assert (made.span_lengths, made.at_least, made.at_most) == ((0.5, 0.5), 2, 2)
    assert made.span_limits == (1 << 31,)
    assert Selection(span_lengths=[1]).span_limits == ()
    # A sum that is almost 1 is taken for 1, and zeros at the end stay zeros.
    assert Selection(span_lengths=np.array([0.25, 0.25, 0.0]) * 2.000001).span_limits == (1 << 31, 1 << 32)


def test_it_is_frozen_and_holds_its_own_tensors() -> None:
    marks = MARKS.clone()
    made = Selection(word_marks=marks)
    marks.zero_()
    assert made.word_marks is not None
    assert made.word_marks.sum() == 10
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.exact = True  # type: ignore[misc]


@pytest.mark.parametrize("clone", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy, dataclasses.replace])
def test_copies(clone: Any) -> None:
    made, spec = Selection(word_marks=MARKS % 3, span_lengths=(0.5, 0.5), replace_per_unit=True), MaskingSpec(1, 10)
    ids = torch.arange(60) % 10
    expected = mask_tokens(ids, spec, seed=1, selection=made, impl="reference")
    got = mask_tokens(ids, spec, seed=1, selection=clone(made), impl="reference")
    assert torch.equal(got.labels, expected.labels)
    assert torch.equal(got.input_ids, expected.input_ids)


def test_tables_are_made_once_for_a_spec() -> None:
    cpu, one, other = torch.device("cpu"), MaskingSpec(1, 10), MaskingSpec(1, 10, (0, 2))
    made = Selection(word_marks=torch.arange(10, dtype=torch.uint8) % 4, span_lengths=(0.5, 0.5))
    first = made.tables(one, cpu)
    assert made.tables(one, cpu) is first
    assert first[1].tolist() == [2 + 4 * (i % 4) for i in range(10)]
    assert made.tables(other, cpu)[1].tolist() == [2 + 4 * (i % 4) + (i in (0, 2)) for i in range(10)]
    assert made.tables(one, cpu)[1].tolist() == first[1].tolist()
    assert one.tables(cpu)[0].tolist() == [2] * 10, "the spec's own table is not written"
    assert Selection(exact=True).tables(one, cpu)[1] is one.tables(cpu)[0]


# ---- As PyTorch sees it ----

MARKED = torch.arange(50, dtype=torch.uint8) % 3
KINDS = {
    "words": Selection(word_marks=MARKED, replace_per_unit=True),
    "spans": Selection(span_lengths=(0.5, 0.5)),
    "words, spans, exact": Selection(word_marks=MARKED, span_lengths=(0.5, 0.5), exact=True, at_least=1),
    "counts": Selection(at_least=5, at_most=20),
    "rates": Selection(rates_by_id=torch.linspace(0, 1, 50)),
}


def op_arguments(name: str, rows: str) -> dict[str, Any]:
    how, call = KINDS[name], arguments(rows)
    _, flags, limits, rates = how.tables(SPEC, torch.device("cpu"))
    call |= {"flags": flags, "words": how.word_marks is not None, "span_limits": limits, "id_thresholds": rates}
    call |= {"per_unit": how.replace_per_unit, "exact": how.exact, "at_least": how.at_least}
    call["at_most"] = PLAIN["at_most"] if how.at_most is None else how.at_most
    return call


@pytest.mark.parametrize("rows", ["rows", "packed"])
@pytest.mark.parametrize("name", KINDS)
def test_nothing_waits(name: str, rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, launches = meta(op_arguments(name, rows)), Launches()
    monkeypatch.setattr(triton_masking, "_mask_rows", launches)
    monkeypatch.setattr(triton_masking, "_first_real", launches)
    for module in (triton_masking, reference):
        with NoSync() as mode:
            module.mask_tokens(*call.values(), *(torch.empty_like(call["input_ids"]) for _ in range(2)))
        assert mode.operations > 5
    assert launches.count == 2


@pytest.mark.parametrize("name", KINDS)
def test_the_public_function_does_not_wait(name: str) -> None:
    ids, spec = torch.empty(3, 70, dtype=torch.int64, device="meta"), SPEC
    KINDS[name].tables(spec, ids.device)  # which is copied to a device once
    with NoSync() as mode:
        mask_tokens(ids, spec, seed=1, selection=KINDS[name])
    assert mode.names == ["fastmlm::mask_tokens"]


@pytest.mark.parametrize("name", ["words", "words, spans, exact", "rates"])
def test_opcheck(name: str) -> None:
    given = (*op_arguments(name, "packed").values(), "reference")
    torch.library.opcheck(torch.ops.fastmlm.mask_tokens.default, given)
    torch.library.opcheck(torch.ops.fastmlm.mask_tokens.out, given, outputs(given[0]))


@pytest.mark.parametrize("name", KINDS)
def test_compiled(name: str) -> None:
    """Whole, with the tables yet to be made and with them made, and once for all later seeds."""
    torch._dynamo.reset()
    spec, how = dataclasses.replace(SPEC), copy.deepcopy(KINDS[name])
    ids = arguments("plain")["input_ids"]
    frames = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(
        lambda ids, seed: mask_tokens(ids, spec, seed=seed, selection=how, impl="reference"),
        backend=frames,
        fullgraph=True,
    )
    for seed in range(1, 5):
        expected = mask_tokens(ids, SPEC, seed=seed, selection=KINDS[name], impl="reference")
        got = compiled(ids, torch.tensor([seed]))
        assert torch.equal(got.labels, expected.labels)
        assert torch.equal(got.input_ids, expected.input_ids)
    assert frames.frame_count <= 2

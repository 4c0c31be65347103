"""mask_tokens with a selection: every implementation against the law in plain Python, on cases of many kinds."""

from typing import Any

import pytest
import torch
from oracle_selection import Case, case
from torch import Tensor

from fastmlm import available_impls, mask_tokens, masking

CASES = {"reference": 400, "cpp": 400, "triton": 16}  # the interpreter is slow


def agrees(one: Case, impl: str, **others: Any) -> None:
    call = one.call | others
    before = {name: value.clone() for name, value in call.items() if isinstance(value, Tensor)}
    masked = mask_tokens(**call, impl=impl)
    for got, want in zip(masked, (one.out, one.labels), strict=True):
        assert got.shape == call["input_ids"].shape
        assert got.flatten().tolist() == want
    for name, value in before.items():
        assert torch.equal(call[name], value), f"{name} was written"


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("impl", available_impls())
def test_is_the_law(impl: str, part: int) -> None:
    for number in range(part, CASES[impl], 4):
        try:
            agrees(case(number), impl)
        except BaseException as error:
            error.add_note(f"case({number}): {case(number).call}")
            raise


@pytest.mark.slow
def test_triton_is_the_law_at_length() -> None:
    for number in range(300):
        agrees(case(number), "triton")


def test_cases_are_of_all_kinds() -> None:
    """That what a case is meant to reach is reached, and not by few."""
    found: dict[str, int] = {}
    for number in range(300):
        one = case(number)
        how, call = one.call["selection"], one.call
        words = how.word_marks is not None or "units" in call
        selected = any(label != call["spec"].ignore_index for label in one.labels)
        for kind, here in {
            "words of marks": how.word_marks is not None,
            "units": "units" in call,
            "spans": bool(how.span_lengths) and not words,
            "spans of words": bool(how.span_lengths) and words,
            "an action a unit": how.replace_per_unit,
            "rates by id": how.rates_by_id is not None,
            "exact": how.exact and not words and not how.span_lengths,
            "exact, with units": how.exact and (words or bool(how.span_lengths)),
            "at least": how.at_least > 0,
            "at most": how.at_most is not None,
            "packed": "cu_seqlens" in call,
            "packed, counts": "cu_seqlens" in call and how.counts,
        }.items():
            found[kind] = found.get(kind, 0) + (here and selected)
    assert min(found.values()) >= 10, found


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_ids_out_of_the_vocabulary(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU nothing refuses them: never selected, but for words and rates they are the nearest ids inside."""
    monkeypatch.setattr(masking, "_readable", lambda tensor: False)
    reached = 0
    for number in range(200 if impl == "reference" else 12):
        one = case(number)
        ids, size = one.call["input_ids"], one.call["spec"].vocab_size
        if ids.dtype == torch.uint8:
            continue
        foreign = torch.rand(ids.shape, generator=torch.Generator().manual_seed(number)).to(ids.device)
        ids.copy_(torch.where(foreign < 0.1, -1 - ids, torch.where(foreign < 0.2, size + ids, ids)))
        agrees(one.expect(), impl)
        reached += "selection" in one.call and one.call["selection"].word_marks is not None
    assert reached > 1

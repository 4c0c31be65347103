"""The matrix: whatever the workers, batches, padding, ranks, resumes and implementations, a row has the same masks."""

from typing import Any

import pytest
import torch
from accelerate import skip_first_batches
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from fastmlm import DataCollatorForMaskedLM

pytestmark = [
    # A machine with one core advises against several workers; newer Pythons advise against forks.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]

FORMS: dict[str, dict[str, Any]] = {
    "left": {}, "right": {}, "packed": {"packing": True}, "multiple of 8": {"pad_to_multiple_of": 8},
}  # fmt: skip
Rows = dict[int, tuple[tuple[int, ...], tuple[int, ...]]]


@pytest.fixture
def rows(wordpiece, make_rows) -> list[dict[str, Any]]:
    """Twice the same 20 rows, and then some."""
    texts = [row["input_ids"] for row in make_rows(wordpiece, 20, 40)]
    return [{"input_ids": ids, "idx": i} for i, ids in enumerate([*texts, *texts, *texts[:3]])]


def by_row(batch: dict[str, Any]) -> Rows:
    """The ids and labels of each row of a batch without padding."""
    pairs: list[tuple[Tensor, Tensor]]
    if "cu_seq_lens_q" in batch:
        sizes = batch["cu_seq_lens_q"].diff().tolist()
        pairs = list(zip(*(batch[name][0].split(sizes) for name in ("input_ids", "labels")), strict=True))
    else:
        real = batch["attention_mask"] == 1
        columns = (batch["input_ids"], batch["labels"])
        pairs = [(columns[0][i][real[i]], columns[1][i][real[i]]) for i in range(len(real))]
    return {
        idx: (tuple(ids.tolist()), tuple(labels.tolist()))
        for idx, (ids, labels) in zip(batch["idx"].tolist(), pairs, strict=True)
    }


def epoch_of(collator: Any, rows: list[Any], epoch: int, workers: int, size: int, ranks: int, skipped: int) -> Rows:
    """A pass of all ranks, from a batch on: the rows that were seen."""
    found: Rows = {}
    collator.set_epoch(epoch)
    for rank in range(ranks):
        sampler: Any = DistributedSampler(rows, ranks, rank, seed=3)
        sampler.set_epoch(epoch)
        loader = DataLoader(rows, size, sampler=sampler, num_workers=workers, collate_fn=collator)
        for batch in skip_first_batches(loader, skipped) if skipped else loader:
            found |= by_row(batch)
    return found


@pytest.mark.parametrize("impl", ["reference", "cpp", "triton"])
@pytest.mark.parametrize("form", FORMS)
def test_the_same_masks_everywhere(wordpiece, rows, form, impl) -> None:
    expected: list[Rows] = []
    alone = DataCollatorForMaskedLM(wordpiece, seed=11, mlm_probability=0.3, impl="reference")
    for epoch in (0, 1):
        alone.set_epoch(epoch)
        expected.append({idx: found for row in rows for idx, found in by_row(alone([row])).items()})
    for idx, (ids, labels) in expected[0].items():
        other = expected[1][idx]
        assert len(ids) < 20 or labels != other[1]  # epochs differ
        if idx >= 20:
            assert (ids, labels) == expected[0][idx - 20]  # equal rows do not

    wordpiece.padding_side = "left" if form == "left" else "right"
    few = impl == "triton"  # whose interpreter takes 5 ms for a row
    for workers in (0, 3) if few else (0, 1, 3):
        collator = DataCollatorForMaskedLM(wordpiece, seed=11, mlm_probability=0.3, impl=impl, **FORMS[form])
        for size in (7,) if few else (4, 7, 16):
            for ranks in (1, 2):
                for epoch, skipped in ((1, 0), (0, 1)):
                    found = epoch_of(collator, rows, epoch, workers, size, ranks, skipped)
                    assert found == {idx: expected[epoch][idx] for idx in found}
                    assert len(found) >= (len(rows) if not skipped else len(rows) - size * ranks)


def test_what_the_matrix_compares() -> None:
    one = {"input_ids": torch.tensor([[5, 6, 0]]), "labels": torch.tensor([[-100, 7, -100]])}
    padded = by_row(one | {"attention_mask": torch.tensor([[1, 1, 0]]), "idx": torch.tensor([3])})
    bounds = torch.tensor([0, 2, 3])
    assert padded == {3: ((5, 6), (-100, 7))}
    assert by_row(one | {"cu_seq_lens_q": bounds, "idx": torch.tensor([3, 4])}) == padded | {4: ((0,), (-100,))}

"""From a memory-mapped ``datasets`` table to masked batches: a whole DataLoader, what it fetches and what it collates.

50 000 rows in record batches of 1000, as ``save_to_disk`` writes them and of the types that ``map`` gives a tokenizer's
output; batches of 64 random rows. The pages of the file are in memory before the first measurement, for both sides.
A pass is 20 batches, from asking the loader for an iterator to its end; workers live on from pass to pass.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler
from transformers import DataCollatorForLanguageModeling

from fastmlm import DataCollatorForMaskedLM
from fastmlm.feeding import zero_copy

ROWS, BATCH, BATCHES = 50_000, 64, 20
# What is done to the dataset, by the name that the results give it.
SETUPS: dict[str, Callable[[datasets.Dataset], datasets.Dataset]] = {
    "zero_copy(rows)": zero_copy,
    "zero_copy(rows), input_ids alone": lambda rows: zero_copy(rows.select_columns("input_ids")),
    "zero_copy(rows.shuffle())": lambda rows: zero_copy(rows.shuffle(seed=0, keep_in_memory=True)),
    "rows": lambda rows: rows,
    "rows.with_format('numpy')": lambda rows: rows.with_format("numpy"),
    "rows.with_format('torch')": lambda rows: rows.with_format("torch"),
}


@pytest.fixture(scope="module", params=["64…512", "512"])
def rows(request: Any, corpus_ids: Any, tmp_path_factory: Any) -> datasets.Dataset:
    """The dataset, on disk and loaded again; with its rows' lengths in its description."""
    _, ids = corpus_ids
    low, _, high = request.param.partition("…")
    lengths = np.random.default_rng(0).integers(int(low), int(high or low) + 1, ROWS)
    ends = pa.array(np.cumsum([0, *lengths]), pa.int32())
    total = int(lengths.sum())
    columns = {
        "input_ids": np.resize(np.array(ids, np.int32), total),
        "token_type_ids": np.zeros(total, np.int8),
        "attention_mask": np.ones(total, np.int8),
    }
    table = pa.table({name: pa.ListArray.from_arrays(ends, pa.array(values)) for name, values in columns.items()})
    path: Path = tmp_path_factory.mktemp("rows")
    datasets.disable_progress_bars()
    datasets.Dataset(table).save_to_disk(path)
    loaded = datasets.load_from_disk(path)
    for batch in loaded.data.to_batches():
        for column in batch.columns:
            column.values.to_numpy().max()
    loaded.info.description = request.param
    return loaded


def one_pass(dataset: datasets.Dataset, collator: Any, workers: int) -> Callable[[], object]:
    """Runs a pass over a loader of random rows."""
    sampler = RandomSampler(
        dataset, replacement=True, num_samples=BATCH * BATCHES, generator=torch.Generator().manual_seed(0)
    )
    loader = DataLoader(
        dataset,
        batch_size=BATCH,
        sampler=sampler,
        collate_fn=collator,
        num_workers=workers,
        persistent_workers=workers > 0,
        multiprocessing_context="fork" if workers else None,
    )

    def run() -> None:
        for _ in loader:
            pass

    return run


@pytest.mark.parametrize(
    ("setup", "workers"),
    [(setup, 0) for setup in SETUPS] + [("zero_copy(rows)", 1), ("zero_copy(rows)", 2), ("rows", 1), ("rows", 2)],
)
def bench_loader(
    compare: Callable[..., None], corpus_ids: Any, rows: datasets.Dataset, setup: str, workers: int
) -> None:
    tokenizer, _ = corpus_ids
    compare(
        one_pass(SETUPS[setup](rows), DataCollatorForMaskedLM(tokenizer), workers),
        one_pass(rows, DataCollatorForLanguageModeling(tokenizer), workers),
        case=f"DataLoader, {workers} workers, {BATCHES} batches of {BATCH}×{rows.info.description}",
        ours_name=setup,
        peer_name="HF collator, rows as loaded",
        rounds=7,
        calls=1,
    )


@pytest.mark.parametrize("peer", ["rows", "rows.with_format('numpy')", "rows.with_format('torch')"])
def bench_fetch(compare: Callable[..., None], rows: datasets.Dataset, peer: str) -> None:
    """Without a collator."""
    batches = iter_keys()
    ours, theirs = zero_copy(rows), SETUPS[peer](rows)
    compare(
        lambda: list(ours.__getitems__(next(batches))),  # dicts, which our collator does not ask for
        lambda: theirs.__getitems__(next(batches)),
        case=f"fetching {BATCH}×{rows.info.description}, no collator",
        ours_name="zero_copy(rows)",
        peer_name=peer,
        rounds=15,
        calls=20,
    )


def iter_keys() -> Iterator[list[int]]:
    """Batches of random row numbers."""
    random = np.random.default_rng(1)
    while True:
        yield random.integers(0, ROWS, BATCH).tolist()

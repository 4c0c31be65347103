"""How everything here is measured: in turns with the peer it is compared to, on real text, medians of ratios."""

from collections.abc import Callable
from itertools import pairwise
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import pytest
import torch

from fastmlm.cli.corpus import read_documents
from fastmlm.cli.tokenizer import train_tokenizer


@pytest.fixture
def compare(benchmark: Any) -> Callable[..., None]:
    """Time ours and the peer by turns; both medians and the ratio of each pair go into the results.

    A turn is several calls in a row, as a loader's worker makes them, and counts with the median of its calls. The
    first one after the other side's turn finds cold caches; report.py says how much longer it takes.
    """

    def run(
        ours: Callable[[], object],
        peer: Callable[[], object],
        *,
        case: str,
        ours_name: str,
        peer_name: str,
        rounds: int,
        calls: int,
        threads: int = 1,
    ) -> None:
        ours_turns: list[list[float]] = []
        peer_turns: list[list[float]] = []

        def turn(function: Callable[[], object], turns: list[list[float]]) -> None:
            times = [perf_counter()]
            for _ in range(calls):
                function()
                times.append(perf_counter())
            turns.append([end - start for start, end in pairwise(times)])

        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            benchmark.pedantic(
                turn, (ours, ours_turns), setup=lambda: turn(peer, peer_turns), rounds=rounds, warmup_rounds=2
            )
        finally:
            torch.set_num_threads(before)
        ours_seconds, peer_seconds = ([median(times) for times in t[-rounds:]] for t in (ours_turns, peer_turns))
        ratios = [theirs / mine for theirs, mine in zip(peer_seconds, ours_seconds, strict=True)]
        low, _, high = quantiles(ratios, n=4)
        benchmark.extra_info.update(
            case=case,
            ours=ours_name,
            peer=peer_name,
            threads=threads,
            rounds=rounds,
            calls=calls,
            ours_ms=round(median(ours_seconds) * 1e3, 3),
            peer_ms=round(median(peer_seconds) * 1e3, 3),
            first_ms=round(median(times[0] for times in ours_turns[-rounds:]) * 1e3, 3),
            ratio=round(median(ratios), 2),
            ratio_quartiles=[round(low, 2), round(high, 2)],
        )

    return run


@pytest.fixture(scope="session")
def corpus_ids() -> tuple[Any, list[int]]:
    """A WordPiece tokenizer of 8192 ids trained on the embedded corpus, and the corpus as one stream of its ids."""
    texts = read_documents([])
    tokenizer = train_tokenizer(texts, 8192)
    ids = [i for text in texts for i in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
    return tokenizer, ids

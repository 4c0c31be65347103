"""How the cost grows, with tokens from 1 k to 16 M and with the vocabulary from 33 to 256 k, and how far the floor is.

Writes ``results/scaling.json``, ``results/scaling.svg`` and ``results/scaling.md``. The floor of a case is the time to
move the bytes it must read and write, at the speed at which ``Tensor.copy_`` moves as many, plus 0.8 ns for each Python
int.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import matplotlib
import numpy as np
import torch
from transformers import BertTokenizerFast

from fastmlm import DataCollatorForMaskedLM, MaskingSpec, mask_tokens
from fastmlm.cli.corpus import read_documents
from fastmlm.cli.tokenizer import train_tokenizer

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "fastmlm"  # the same ids in every run
from matplotlib import pyplot  # noqa: E402

RESULTS = Path(__file__).parent / "results"
LENGTH = 512
TOKENS = [1 << k for k in range(10, 25, 2)]
VOCABULARIES = [33, 256, 2048, 8192, 32768, 65536, 131072, 262144]
INT_NS = 0.8


def seconds(function: Callable[[], object]) -> float:
    """The median of several calls, after some that count for nothing."""
    start = perf_counter()
    function()
    once = perf_counter() - start
    calls = int(min(max(0.3 / once, 5), 200))
    times = []
    for _ in range(calls + 2):
        start = perf_counter()
        function()
        times.append(perf_counter() - start)
    return median(times[2:])


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def moving(size: int) -> float:
    """Seconds to read ``size`` / 2 bytes and to write as many."""
    source, target = (
        torch.zeros(max(size // 2, 1), dtype=torch.uint8),
        torch.zeros(max(size // 2, 1), dtype=torch.uint8),
    )
    return seconds(lambda: target.copy_(source))


def mask_case(tokens: int, vocabulary: int) -> float:
    """Nanoseconds a token of ``mask_tokens`` into tensors that are there, ids spread over the vocabulary."""
    rows = max(tokens // LENGTH, 1)
    ids = torch.randint(0, vocabulary, (rows, tokens // rows), generator=torch.Generator().manual_seed(0))
    out = (torch.empty_like(ids), torch.empty_like(ids))
    spec = MaskingSpec(mask_token_id=4, vocab_size=vocabulary, special_token_ids=(0, 1, 2, 3, 4))
    return seconds(lambda: mask_tokens(ids, spec, seed=1, out=out)) / ids.numel() * 1e9


def collate_case(tokenizer: BertTokenizerFast, tokens: int, kind: str) -> float:
    """Nanoseconds a token of the collator, from rows of ids and attention mask."""
    rows = max(tokens // LENGTH, 1)
    ids = np.random.default_rng(0).integers(5, len(tokenizer), (rows, tokens // rows))
    batch: list[dict[str, Any]] = [{"input_ids": row, "attention_mask": np.ones_like(row)} for row in ids]
    if kind == "lists":
        batch = [{name: column.tolist() for name, column in row.items()} for row in batch]
    collator = DataCollatorForMaskedLM(tokenizer)
    return seconds(lambda: collator(batch)) / ids.size * 1e9


def floors(points: dict[str, Any], tokenizer: BertTokenizerFast) -> list[dict[str, Any]]:
    """What 64×512 and 16 M tokens take, and what they must take."""
    small, large = 64 * LENGTH, TOKENS[-1]
    cases = [
        ("mask_tokens, 64×512", mask_case(small, 8192), small, 24, 0),
        ("mask_tokens, 16 M tokens", points["mask_tokens"][-1], large, 24, 0),
        # Two columns of 8 bytes are read, and written as three.
        ("collator, 64×512, arrays", collate_case(tokenizer, small, "arrays"), small, 40, 0),
        # A pointer is read for each int, and the int.
        ("collator, 64×512, lists", collate_case(tokenizer, small, "lists"), small, 40, 2),
    ]
    table = []
    for name, measured, tokens, size, ints in cases:
        floor = moving(size * tokens) / tokens * 1e9 + ints * INT_NS
        table.append({"case": name, "ns_per_token": measured, "floor_ns_per_token": floor, "times": measured / floor})
    return table


def plot(points: dict[str, Any]) -> None:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for name in ("mask_tokens", "collator, arrays", "collator, lists"):
        series = points[name]
        left.plot(TOKENS[: len(series)], series, marker="o", label=name)
    left.set(xscale="log", xlabel="tokens in a batch (rows of 512)", ylabel="ns a token", title="Tokens")
    right.plot(VOCABULARIES, points["vocabulary"], marker="o", label="mask_tokens, 64×512")
    right.set(xscale="log", xlabel="ids in the vocabulary", title="Vocabulary")
    for axes in (left, right):
        axes.set_ylim(bottom=0, top=30)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(RESULTS / "scaling.svg", metadata={"Date": None})


def main() -> None:
    tokenizer = train_tokenizer(read_documents([]), 8192)
    with one_thread():
        points: dict[str, Any] = {
            "mask_tokens": [mask_case(tokens, 8192) for tokens in TOKENS],
            "collator, arrays": [collate_case(tokenizer, tokens, "arrays") for tokens in TOKENS],
            "collator, lists": [collate_case(tokenizer, tokens, "lists") for tokens in TOKENS if tokens <= 1 << 22],
            "vocabulary": [mask_case(64 * LENGTH, vocabulary) for vocabulary in VOCABULARIES],
        }
        table = floors(points, tokenizer)
    RESULTS.mkdir(exist_ok=True)
    record = {"tokens": TOKENS, "vocabularies": VOCABULARIES, "ns_per_token": points, "floors": table}
    (RESULTS / "scaling.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    lines = ["| case, one thread | ns a token | floor, ns | times the floor |", "|---|---:|---:|---:|"]
    lines += [
        f"| {r['case']} | {r['ns_per_token']:.2f} | {r['floor_ns_per_token']:.2f} | {r['times']:.1f} |" for r in table
    ]
    (RESULTS / "scaling.md").write_text("\n".join(lines) + "\n")
    plot(points)
    print("\n".join(lines))
    print(json.dumps(points, indent=1))


if __name__ == "__main__":
    main()

"""``linear_cross_entropy`` on gathered rows, forward and backward, against PyTorch's own and eager PyTorch.

Writes ``results/loss.json``, ``results/loss.md``, ``results/loss_errors.md`` and ``results/loss.svg``. All contenders
take turns; the peak memory of each is that above its inputs, of its first call in a process where freed memory returns
to the system.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import matplotlib
import torch
import torch.nn.functional as F
from report import RESULTS, quote
from torch import Tensor
from torch.nn import LinearCrossEntropyOptions

from fastmlm import linear_cross_entropy
from fastmlm.cli.measure import PeakMemory, return_freed_memory
from fastmlm.kernels.cpu import linear_cross_entropy as native

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "fastmlm"  # the same ids in every run
from matplotlib import pyplot  # noqa: E402

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# Selected rows K of so many tokens, H and V.
SHAPES = {
    "BERT-base, 16×256": (614, 768, 30522),
    "BERT-base, 64×512": (4915, 768, 30522),
    "ModernBERT-base, 16×256": (614, 768, 50368),
    "mmBERT-base, 4×256": (154, 768, 256_000),
    "XLM-R base, 4×256": (154, 768, 250_002),
    "ESM-2 650M, 16×256": (614, 1280, 33),
}
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CHUNKS = (128, 256, 512)  # rows at a time that PyTorch's own is tried with, beside all of them and its own choices
OURS, EAGER, DEFAULT = "linear_cross_entropy", "F.cross_entropy(F.linear(...))", "F.linear_cross_entropy"

COUNTS = [256, 1024, 4096, 16384, 65536]  # K of the plot, at H = 256 and V = 32768
VOCABULARIES = [33, 256, 2048, 8192, 32768, 131072, 262144]  # and V, at K = 1024
WIDTH, VOCABULARY, COUNT = 256, 32768, 1024
MOST_LOGITS = 1 << 29  # that eager holds three times over


def chunked(options: LinearCrossEntropyOptions) -> Loss:
    return lambda x, weight, target, bias: F.linear_cross_entropy(x, weight, target, linear_bias=bias, options=options)


def contenders(count: int, dtype: torch.dtype) -> dict[str, Loss]:
    """By name: ours, eager, PyTorch's own as it is, with its own chunks, and with chunks of so many rows."""
    found: dict[str, Loss] = {
        OURS: lambda x, weight, target, bias: linear_cross_entropy(x, weight, target, linear_bias=bias),
        EAGER: lambda x, weight, target, bias: F.cross_entropy(F.linear(x, weight, bias).float(), target),
        DEFAULT: lambda x, weight, target, bias: F.linear_cross_entropy(x, weight, target, linear_bias=bias),
        "its own chunks": chunked(LinearCrossEntropyOptions()),
    }
    sizes = [rows for rows in CHUNKS if rows < count]
    return found | {f"chunks of {rows}": chunked(best_options(rows, dtype)) for rows in [*sizes, count]}


def best_options(rows: int, dtype: torch.dtype) -> LinearCrossEntropyOptions:
    """The fastest policy of each type, by trial; left to itself it takes three times as long in bfloat16."""
    policy = "compact" if dtype == torch.float32 else "accurate"
    return LinearCrossEntropyOptions(batch_chunk_size=rows, acc_policy=policy)


def inputs(count: int, width: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, width, generator=generator).to(dtype).requires_grad_()
    weight = (0.02 * torch.randn(vocabulary, width, generator=generator)).to(dtype).requires_grad_()
    target = torch.randint(vocabulary, (count,), generator=generator)
    return x, weight, target, torch.zeros(vocabulary, dtype=dtype, requires_grad=True)


def gradients(loss: Loss, given: tuple[Tensor, Tensor, Tensor, Tensor]) -> list[Tensor]:
    x, weight, _, bias = given
    value = loss(*given)
    return [value.detach(), *torch.autograd.grad(value, (x, weight, bias))]


def times(losses: dict[str, Loss], given: tuple[Tensor, Tensor, Tensor, Tensor]) -> dict[str, list[float]]:
    """Milliseconds of each contender by turns, after one that warms up; who takes three times as long leaves then."""
    found: dict[str, list[float]] = {name: [] for name in losses}
    rounds = None
    while rounds is None or len(found[OURS]) < rounds + 1:
        for name, loss in losses.items():
            if len(found[name]) == 1 and found[name][0] > 3 * found[OURS][0]:
                continue
            start = perf_counter()
            gradients(loss, given)
            found[name].append(1e3 * (perf_counter() - start))
        rounds = 3 if found[OURS][0] > 2500 else 5 if found[OURS][0] > 50 else 100
    return {name: series[1:] or series for name, series in found.items()}


def peaks(*numbers: str) -> dict[str, float]:
    """MB that each contender takes at most beyond its inputs: in a process that measures nothing else."""
    command = [sys.executable, __file__, "peaks", *numbers]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure_peaks(count: int, width: int, vocabulary: int, dtype: str, names: str) -> dict[str, float]:
    return_freed_memory()
    small = inputs(8, width, 16, TYPES[dtype])
    given = inputs(count, width, vocabulary, TYPES[dtype])
    found = {}
    for name, loss in contenders(count, TYPES[dtype]).items():
        if names and name not in names.split("|"):
            continue
        gradients(loss, small)  # whatever is loaded at the first call
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        memory = PeakMemory()
        gradients(loss, given)
        found[name] = memory.read()["growth_mb"] * 2**20 / 1e6
    return found


def floor(count: int, width: int, vocabulary: int, dtype: torch.dtype) -> float:
    """MB of the two gradients and a chunk of logits."""
    weight = torch.empty(vocabulary, width, dtype=dtype)
    chunk = min(native._CHUNKS.rows(count, weight), count)
    return weight.itemsize * (count * width + chunk * vocabulary + vocabulary * width) / 1e6


def compare(shape: str, kind: str) -> dict[str, Any]:
    count, width, vocabulary = SHAPES[shape]
    given = inputs(count, width, vocabulary, TYPES[kind])
    milliseconds = times(contenders(count, TYPES[kind]), given)
    near = [name for name, series in milliseconds.items() if len(series) > 1]  # the others take minutes in all
    memory = peaks(str(count), str(width), str(vocabulary), kind, "|".join(near))
    entries = {}
    for name, series in milliseconds.items():
        ratios = [theirs / ours for theirs, ours in zip(series, milliseconds[OURS], strict=False)]
        low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        entries[name] = {
            "ms": round(median(series), 2), "ratio": round(median(ratios), 3),
            "ratio_quartiles": [round(low, 3), round(high, 3)],
            "mb": round(memory[name], 1) if name in memory else None,
        }  # fmt: skip
    return {
        "shape": shape, "rows": count, "width": width, "vocabulary": vocabulary, "dtype": kind,
        "floor_mb": round(floor(count, width, vocabulary, TYPES[kind]), 3), "contenders": entries,
    }  # fmt: skip


def table(results: list[dict[str, Any]]) -> str:
    def cell(entry: dict[str, Any], name: str = "") -> str:
        low, high = entry["ratio_quartiles"]
        return f"{name}**{entry['ratio']:.2f}** ({low:.2f}–{high:.2f}), {entry['mb']:.0f} MB"

    lines = [
        "| shape | K, H, V | type | `linear_cross_entropy` | × floor | eager | `F.linear_cross_entropy` "
        "| fastest with chunks | leanest within 1.2 × |",
        "|---|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for r in results:
        entries = r["contenders"]
        ours = entries[OURS]
        fastest = min((name for name in entries if "chunks" in name), key=lambda name: entries[name]["ratio"])
        near = [name for name in entries if entries[name]["ratio"] <= 1.2]
        leanest = min(near, key=lambda name: entries[name]["mb"])
        lines.append(
            f"| {r['shape']} | {r['rows']}, {r['width']}, {r['vocabulary']} | {r['dtype']} "
            f"| {ours['ms']:.1f} ms, {ours['mb']:.0f} MB | {ours['mb'] / r['floor_mb']:.2f} "
            f"| {cell(entries[EAGER])} | {cell(entries[DEFAULT])} | {cell(entries[fastest], fastest + ': ')} "
            f"| {'ours' if leanest == OURS else cell(entries[leanest], leanest + ': ')} |"
        )
    return "\n".join(lines) + "\n"


def errors() -> str:
    """Against float64, relative, of the loss and the gradients of input, weight and bias, by number of chunks."""
    lines = ["| type | | chunks | loss | input | weight | bias |", "|---|---|---:|---:|---:|---:|---:|"]
    count, width, vocabulary = 4096, 256, 8192
    rows_of = native._Chunks.rows
    for kind, dtype in TYPES.items():
        given = inputs(count, width, vocabulary, dtype)
        x, weight, target, bias = given
        exact = gradients(
            lambda *g: F.cross_entropy(F.linear(g[0], g[1], g[3]), g[2]),
            (x.detach().double().requires_grad_(), weight.detach().double().requires_grad_(), target,
             bias.detach().double().requires_grad_()),
        )  # fmt: skip

        def line(name: str, loss: Loss, chunks: int, kind: str = kind, given: Any = given, exact: Any = exact) -> str:
            found = [
                float((mine.double() - true).norm() / true.norm())
                for mine, true in zip(gradients(loss, given), exact, strict=True)
            ]
            return f"| {kind} | {name} | {chunks} | " + " | ".join(f"{error:.1e}" for error in found) + " |"

        named = contenders(count, dtype)
        lines += [line("eager", named[EAGER], 1), line(f"`{DEFAULT}`", named[DEFAULT], 1)]
        for chunks in (1, 8, 32, 128):
            size = count // chunks
            lines.append(line(f"`{DEFAULT}`", chunked(best_options(size, dtype)), chunks))
            native._Chunks.rows = lambda self, count, weight, size=size: size  # type: ignore[method-assign]
            lines.append(line(f"`{OURS}`", named[OURS], chunks))
        native._Chunks.rows = rows_of  # type: ignore[method-assign]
    return "\n".join(lines) + "\n"


def scale(points: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Milliseconds and MB of ours, eager and PyTorch's own chunks in float32 at (K, V)."""
    found = []
    for count, vocabulary in points:
        names = [OURS, "its own chunks"]
        if count * vocabulary <= MOST_LOGITS:
            names.append(EAGER)
        given = inputs(count, WIDTH, vocabulary, torch.float32)
        losses = {name: loss for name, loss in contenders(count, torch.float32).items() if name in names}
        found.append({
            "rows": count, "vocabulary": vocabulary,
            "ms": {name: median(series) for name, series in times(losses, given).items()},
            "mb": peaks(str(count), str(WIDTH), str(vocabulary), "float32", "|".join(names)),
        })  # fmt: skip
    return found


def plot(by_rows: list[dict[str, Any]], by_vocabulary: list[dict[str, Any]]) -> None:
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7), sharex="col", layout="constrained")
    labels = {OURS: "fastmlm", EAGER: EAGER, "its own chunks": f"{DEFAULT}, its own chunks"}
    for column, (points, key) in enumerate([(by_rows, "rows"), (by_vocabulary, "vocabulary")]):
        for row, unit in enumerate(("ms", "mb")):
            for name, label in labels.items():
                series = [(p[key], p[unit][name]) for p in points if name in p[unit]]
                axes[row][column].plot(*zip(*series, strict=True), marker="o", label=label)
            axes[row][column].set(xscale="log", yscale="log", ylabel=("ms" if unit == "ms" else "peak memory, MB"))
            axes[row][column].grid(alpha=0.3)
    axes[0][0].set(title=f"H={WIDTH}, V={VOCABULARY}, float32")
    axes[0][1].set(title=f"K={COUNT}, H={WIDTH}, float32")
    axes[1][0].set(xlabel="selected rows K")
    axes[1][1].set(xlabel="vocabulary V")
    axes[0][0].legend()
    figure.savefig(RESULTS / "loss.svg", metadata={"Date": None})


def main() -> None:
    results = [compare(shape, kind) for shape in SHAPES for kind in TYPES]
    by_rows = scale([(count, VOCABULARY) for count in COUNTS])
    by_vocabulary = scale([(COUNT, vocabulary) for vocabulary in VOCABULARIES])
    record = {"shapes": results, "by_rows": by_rows, "by_vocabulary": by_vocabulary}
    (RESULTS / "loss.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    plot(by_rows, by_vocabulary)
    quote("loss", table(results))
    quote("loss_errors", errors())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        *numbers, kind, names = sys.argv[2:]
        print(json.dumps(measure_peaks(*map(int, numbers), kind, names)))
    else:
        main()

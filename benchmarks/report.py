"""From the JSON of pytest-benchmark to ``results/benchmarks.json``, a Markdown table, and the README that quotes it."""

import json
import platform
import re
import sys
from importlib.metadata import version
from pathlib import Path
from statistics import quantiles
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "triton")
_DETAIL = (
    "fetching",
    "DataLoader, 1",
    "DataLoader, 2",
    "16×128, specials",
    "8×8192, specials",
    "strategy: ",  # which have a table of their own
)  # left out of the README


def summarise(raw: dict[str, Any]) -> dict[str, Any]:
    """What is worth keeping of a run: where, with what, and the pairs."""
    cpu = raw["machine_info"].get("cpu", {})
    return {
        "machine": f"{cpu.get('brand_raw', platform.processor())}, {cpu.get('count', '?')} cores, no GPU used",
        "python": platform.python_version(),
        "versions": {package: version(package) for package in PACKAGES},
        "commit": raw["commit_info"].get("id", "")[:12] + ("+changes" if raw["commit_info"].get("dirty") else ""),
        "date": raw["datetime"][:10],
        "results": [entry["extra_info"] for entry in raw["benchmarks"]],
    }


def table(summary: dict[str, Any], detail: bool) -> str:
    """The results in Markdown: all of them, or what the README quotes."""
    versions = ", ".join(f"{name} {number}" for name, number in summary["versions"].items())
    lines = [
        f"{summary['machine']}; Python {summary['python']}, {versions}; commit {summary['commit']}, {summary['date']}.",
        "Each pair was timed by turns of up to 20 calls; medians of the turns' medians, and the median ratio of turns, "
        f"with its quartiles. {first_calls(summary)}",
        "",
        "| case | peer | peer, ms | fastmlm | fastmlm, ms | times as fast |",
        "|---|---|---:|---|---:|---:|",
    ]
    for r in summary["results"]:
        if not detail and r["case"].startswith(_DETAIL):
            continue
        low, high = r["ratio_quartiles"]
        threads = "1 thread" if r["threads"] == 1 else f"{r['threads']} threads"
        lines.append(
            f"| {r['case']} ({threads}) | {r['peer']} | {r['peer_ms']:.2f} "
            f"| `{r['ours']}` | {r['ours_ms']:.2f} | **{r['ratio']:.2f}** ({low:.2f}–{high:.2f}) |"
        )
    return "\n".join(lines) + "\n"


def strategies(summary: dict[str, Any]) -> str:
    """What strategies cost, as multiples of the time that token by token takes."""
    costs: dict[str, dict[str, str]] = {}
    for r in summary["results"]:
        if r["case"].startswith("strategy: "):
            high, low = r["ratio_quartiles"]
            cost = f"{1 / r['ratio']:.2f} ({1 / low:.2f}–{1 / high:.2f})"
            costs.setdefault(r["ours"], {})[r["case"].split(", ")[1]] = cost
    lines = [
        f"{summary['machine']}; commit {summary['commit']}, {summary['date']}. Batches of 64×512, 1 thread: the time "
        "beside that of selecting token by token, median and quartiles of the ratios of turns.",
        "",
        "| strategy | `mask_tokens` | the collator, from lists |",
        "|---|---:|---:|",
        *(f"| `{name}` | {cost['mask_tokens']} | {cost['collator']} |" for name, cost in costs.items()),
    ]
    return "\n".join(lines) + "\n"


def first_calls(summary: dict[str, Any]) -> str:
    """How much longer the first call of a turn takes, which finds the caches full of the peer's data."""
    longer = [
        r["first_ms"] / r["ours_ms"] for r in summary["results"] if r["calls"] > 1 and "DataLoader" not in r["case"]
    ]
    low, middle, high = quantiles(longer, n=4)
    return (
        f"The first call of ours in a turn, with cold caches, takes {middle:.1f} times as long ({low:.1f}–{high:.1f})."
    )


def quote(name: str, text: str) -> None:
    """Write a file of the results, and put it into the README where that quotes it."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)
    readme = HERE.parent / "README.md"
    start, end = f"<!-- benchmarks/results/{name}.md -->\n", f"<!-- end of {name} -->"
    whole = readme.read_text()
    assert start in whole, f"README.md has no place for {name}"
    place = re.escape(start) + ".*?" + re.escape(end)
    readme.write_text(re.sub(place, lambda _: start + text + end, whole, flags=re.S))


def main() -> None:
    summary = summarise(json.loads(Path(sys.argv[1]).read_text()))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "benchmarks.json").write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    (RESULTS / "benchmarks.md").write_text(table(summary, detail=True))
    quote("readme", table(summary, detail=False))
    quote("strategies", strategies(summary))
    print(table(summary, detail=True))


if __name__ == "__main__":
    main()

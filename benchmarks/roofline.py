"""What a GPU would be bound by: the masking kernel compiled ahead of time, its instructions and bytes counted.

No GPU is needed. Writes ``results/roofline.json`` and ``results/roofline.md``, which the README quotes;
``tests/test_codegen.py`` holds the counts to their limits. The interpreter must be off.
"""

import json
import sys
from dataclasses import dataclass
from typing import Any

from codegen import TARGETS, compile_for, counts
from report import RESULTS, quote

from fastmlm.kernels.gpu.masking import BLOCK, _first_real, _mask_rows, tile_shape

NUMBERS64 = {"seed", "threshold", "mask_threshold", "random_threshold", "multiplier", "multiplier_in_table"}
BASE = ["input_ids", "output_ids", "labels", "row_keys", "flags"]
MASK = ["attention_mask", "starts"]
ALL = [*BASE, *MASK, "units", "special_tokens_mask", "thresholds", "random_ids", "device_seed"]


@dataclass(frozen=True)
class Case:
    """A way of calling the kernel: which pointers are given, the type of ids, the length of rows."""

    present: list[str]
    ids: str = "i64"
    length: int = 1024
    rest: bool = False  # rates of tokens, and never the original
    per_unit: bool = False  # one action for a unit

    @property
    def itemsize(self) -> int:
        return int(self.ids[1:]) // 8

    def shape(self, warp: int) -> tuple[int, int, int]:
        """Blocks, lanes a thread takes together and warps of a program, as the launcher has them on aligned tensors."""
        neighbours = 16 // self.itemsize
        wide = not {"starts", "cu_seqlens"} & set(self.present) and self.length % neighbours == 0
        return tile_shape(self.length, neighbours if wide else 1, warp)


CASES = {
    "plain": Case(BASE),
    "int32": Case(BASE, ids="i32"),
    "odd": Case(BASE, length=1021),
    "odd int32": Case(BASE, ids="i32", length=1021),
    "short": Case(BASE, length=64),
    "attention mask": Case([*BASE, *MASK]),
    "all": Case(ALL, length=3072, rest=True),
    "packed": Case([*BASE, "cu_seqlens"]),
    "packed, all": Case([*ALL, "cu_seqlens"], length=3072, rest=True),
    "action of a unit": Case(ALL, length=3072, rest=True, per_unit=True),
}


@dataclass(frozen=True)
class Device:
    """Lane instructions a second at the boost clock, and bytes a second of its memory, by the maker's data sheets."""

    target: str
    instructions: float
    bytes: float


DEVICES = {
    "A100 80 GB": Device("sm_80", 108 * 4 * 32 * 1.41e9, 2.04e12),
    "H100 SXM": Device("sm_90", 132 * 4 * 32 * 1.98e9, 3.35e12),
    "H200": Device("sm_90", 132 * 4 * 32 * 1.98e9, 4.8e12),
    "MI300X": Device("gfx942", 304 * 4 * 16 * 2.1e9, 5.3e12),
}
REACHED = 0.9  # of a memory's rate, which copies reach


def build(target: str, case: Case) -> Any:
    blocks, lanes, warps = case.shape(TARGETS[target].warp_size)
    constants = {"TILES": -(-case.length // (blocks * BLOCK)), "BLOCKS": blocks, "WIDTH": lanes}
    constants |= {"PER_TOKEN": case.rest, "PER_UNIT": case.per_unit, "EXCLUDE": case.rest}
    pointers = dict.fromkeys(["device_seed", "row_keys", "thresholds", "random_ids", "units"], "*i64")
    pointers |= dict.fromkeys(["input_ids", "output_ids", "labels"], "*" + case.ids)
    pointers |= {
        "attention_mask": "*i64",
        "special_tokens_mask": "*i8",
        "flags": "*u8",
        "cu_seqlens": "*i32",
        "starts": "*i32",
    }
    absent = dict.fromkeys(pointers.keys() - set(case.present))
    signature = {name: pointers[name] for name in case.present}
    for name in _mask_rows.arg_names:
        if name not in pointers and name not in constants:
            signature[name] = "i64" if name in NUMBERS64 else "i32"
    return compile_for(target, _mask_rows, signature, constants | absent, case.present, warps)


def count(target: str, case: Case) -> dict[str, Any]:
    """What a thread of a program runs, in all and for each of its tokens, loops counted once."""
    found = counts(target, build(target, case))
    warp = TARGETS[target].warp_size
    blocks, _, warps = case.shape(warp)
    tokens = blocks * BLOCK / (warps * warp)
    return found | {"tokens": tokens, "instructions_per_token": found["instructions"] / tokens}


def count_first_real(target: str, packed: bool) -> dict[str, Any]:
    """What runs before, where rows have an attention mask."""
    signature = {"attention_mask": "*i64", "starts": "*i32", "length": "i32", "tokens": "i32"}
    signature |= {"cu_seqlens": "*i32"} if packed else {}
    constants = {"BLOCK": 512} | ({} if packed else {"cu_seqlens": None})
    return counts(target, compile_for(target, _first_real, signature, constants, ["attention_mask"], warps=1))


def bytes_per_token(case: Case) -> int:
    """An id is read, an id and a label are written; what all options add is read beside them."""
    masks = 8 * ("attention_mask" in case.present)
    return 3 * case.itemsize + masks + (1 + 8 + 8 if case.rest else 0)


def table(cases: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| GPU | case | registers | instructions a token | bytes a token | memory allows, G tokens/s "
        "| instructions allow | memory is the limit by | 4 M tokens, at least |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, device in DEVICES.items():
        for case in ("plain", "int32", "attention mask", "packed", "all"):
            found = cases[case][device.target]
            by_memory = REACHED * device.bytes / bytes_per_token(CASES[case]) / 1e9
            by_instructions = device.instructions / found["instructions_per_token"] / 1e9
            lines.append(
                f"| {name} | {case} | {found['registers']} | {found['instructions_per_token']:.0f} "
                f"| {bytes_per_token(CASES[case])} | {by_memory:.0f} | {by_instructions:.0f} "
                f"| {by_instructions / by_memory:.1f}× | {(1 << 22) / min(by_memory, by_instructions) / 1e3:.0f} µs |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    cases = {name: {target: count(target, case) for target in TARGETS} for name, case in CASES.items()}
    if "--json" in sys.argv:
        for name, packed in (("first real", False), ("first real, packed", True)):
            cases[name] = {target: count_first_real(target, packed) for target in TARGETS}
        print(json.dumps(cases))
        return
    (RESULTS / "roofline.json").write_text(json.dumps(cases, indent=1) + "\n")
    quote("roofline", table(cases))


if __name__ == "__main__":
    main()

"""codegen: the loss' kernel as GPUs would run it, compiled where there is none: nothing spilled, all accesses wide."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
NVIDIA = ["sm_80", "sm_90", "sm_100"]
TARGETS = [*NVIDIA, "gfx942"]
# Of the vocabulary of BERT, rows of which would not be aligned to anything by themselves.
VOCABULARY = 30522
TYPES = {"bf16": 2, "fp32": 4}
CASES: dict[str, dict[str, Any]] = {f"plain, {kind}": {"kind": kind} for kind in TYPES}
CASES |= {f"all, {kind}": {"kind": kind, "smoothing": 0.1, "present": ["bias", "ranks"]} for kind in TYPES}
CASES |= {
    "accuracy": {"with_grad": False, "present": ["bias", "ranks"]},
    "few ids": {"vocabulary": 33},
    "not aligned": {"aligned": False},
}


def measure() -> dict[str, dict[str, dict[str, Any]]]:
    """By target and case. The interpreter must be off: for a process of its own."""
    sys.path.insert(0, str(BENCHMARKS))
    from codegen import compile_for, counts, sass

    from fastmlm.kernels.gpu.linear_cross_entropy import _cross_entropy, shape_of_program

    def compiled(
        target: str, kind: str = "bf16", smoothing: float = 0.0, with_grad: bool = True, present: Any = ("bias",),
        vocabulary: int = VOCABULARY, aligned: bool = True,
    ) -> Any:  # fmt: skip
        options = shape_of_program(vocabulary, TYPES[kind])
        constants = {name: options.pop(name) for name in ("BLOCK", "VECTOR")}
        constants |= {"SMOOTHING": smoothing, "WITH_GRAD": with_grad}
        signature = {"logits": "*" + kind, "targets": "*i64", "scales": "*fp32", "losses": "*fp32"}
        signature |= {name: "*i64" if name == "ranks" else "*" + kind for name in present}
        pointers = list(signature)
        constants |= dict.fromkeys({"bias", "ranks"} - set(present))
        signature |= dict.fromkeys(("width", "vocab_size", "ignore_index"), "i32")
        multiples = [*pointers, "width"] if aligned else pointers
        warps = options.pop("num_warps")
        return compile_for(target, _cross_entropy, signature, constants, multiples, warps, **options)

    def look(target: str, made: Any) -> dict[str, Any]:
        code = made.asm["amdgcn"] if target == "gfx942" else sass(made)
        accesses = re.findall(r"\b(?:LDG|STG)\S*|\b(?:global|buffer)_(?:load|store)_\w+", code)
        return counts(target, made) | {"accesses": accesses, "rounded": re.findall(r"\bF2FP?\.\S*", code)}

    return {
        target: {name: look(target, compiled(target, **case)) for name, case in CASES.items()} for target in TARGETS
    }


@pytest.fixture(scope="module")
def measured() -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


@pytest.mark.parametrize("target", TARGETS)
def test_codegen_of_the_loss_keeps_everything_in_registers(measured: Any, target: str) -> None:
    for case, found in measured[target].items():
        spilled = ("spills", "scratch") if target == "gfx942" else ("stack", "local")
        assert [found[name] for name in spilled] == [0, 0], case


def narrow(accesses: list[str]) -> list[str]:
    return [name for name in accesses if not re.search(r"\.128|dwordx4|b128", name)]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("target", TARGETS)
def test_codegen_of_the_loss_has_wide_accesses(measured: Any, target: str, kind: str) -> None:
    """16 bytes at a time: logits and bias in both passes, and gradients; whole blocks and the rest.

    One by one go the target, its logit and bias, the row's scale, the loss, and that of ignored rows.
    """
    plain, everything = (measured[target][f"{case}, {kind}"]["accesses"] for case in ("plain", "all"))
    assert len(narrow(plain)) <= 6
    assert len(narrow(everything)) <= 8  # with ranks
    wide = set(plain) - set(narrow(plain))
    vectors = 1 if target == "gfx942" else 2  # a block's, for each of its threads
    assert sum(plain.count(name) for name in wide if "LD" in name or "load" in name) == vectors * 8
    assert sum(plain.count(name) for name in wide if "ST" in name or "store" in name) >= vectors * 3


@pytest.mark.parametrize("target", TARGETS)
def test_codegen_of_the_loss_needs_aligned_rows(measured: Any, target: str) -> None:
    """That is what they are for: else logits go one by one."""
    assert len(narrow(measured[target]["not aligned"]["accesses"])) > 50


@pytest.mark.parametrize("target", NVIDIA)
def test_codegen_of_the_loss_runs_several_programs(measured: Any, target: str) -> None:
    """On a multiprocessor, of 65536 registers: while some wait for memory, others calculate."""
    for kind in TYPES:
        registers = measured[target][f"plain, {kind}"]["registers"]
        assert 65536 // (-(-registers // 8) * 8 * 128) >= 4


@pytest.mark.parametrize("target", NVIDIA)
def test_codegen_of_the_loss_rounds_to_the_nearest(measured: Any, target: str) -> None:
    """The interpreter does not: gradients in bfloat16 are of half the error on a GPU."""
    rounded = measured[target]["plain, bf16"]["rounded"]
    assert rounded
    assert not [name for name in rounded if ".RZ" in name]


if __name__ == "__main__":
    print(json.dumps(measure()))

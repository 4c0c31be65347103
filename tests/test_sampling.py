"""Samples of softmax by the draw law: the law in float64, frequencies, all implementations, what decides nothing."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import DEVICE, slow_draw, slow_fold
from scipy.stats import chisquare, poisson
from torch import Tensor

from fastmlm import ReplacedTokens, replace_tokens, sample_tokens
from fastmlm.kernels.cpu import _native
from fastmlm.philox import GUMBEL, draw_rows

IMPLS = ["reference", "cpp", "triton"]
SEED = 0x0123456789ABCDEF
# Around the widths of vectors (4, 8, 16), of blocks of draws (64), and of what a program of the GPU does (2048).
WIDTHS = [1, 2, 15, 16, 63, 64, 65, 130, 2048, 2049]
# Scores are sums of a logit and a logarithm from -3.2 to 22.9, each of which is rounded to 2^-20 or so.
NEAR = 1e-5


@pytest.fixture(params=_native.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    yield _native.select_isa(request.param)
    _native.select_isa(None)


def normal(rows: int, width: int, spread: float = 3.0, seed: int = 0) -> Tensor:
    return spread * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def scores(logits: Tensor, seed: int = SEED, row_keys: Tensor | None = None, temperature: float = 1.0) -> Tensor:
    """By the law, in float64."""
    keys = torch.arange(len(logits)) if row_keys is None else row_keys
    draws = draw_rows(torch.tensor([seed]), keys, logits.shape[1], (GUMBEL,))[0]
    exponential = -torch.log1p(-(draws.double() + 0.5) / 2**32)
    return logits.double() / temperature - exponential.log()


def assert_wins(logits: Tensor, tokens: Tensor, **arguments: Any) -> None:
    """The sample is the id of the highest score, or of one that rounding cannot tell from it."""
    found = scores(logits, **arguments)
    best, place = found.max(1)
    near = NEAR + logits.abs().where(logits.isfinite(), 0).amax(1).double() * 2**-22
    assert (best - found.gather(1, tokens[:, None]).squeeze(1) <= near).all()
    assert (tokens == place).double().mean() > 0.999, "only few are near"


# ---- The law ----


@pytest.mark.parametrize("impl", IMPLS)
def test_the_law_in_plain_integers(impl: str) -> None:
    """From its text: a row's key and position folded, the id as the position of a draw in stream 4."""
    row_keys, positions, logits = [3, 1 << 62, 7], [0, 5, 300], normal(3, 70)
    tokens = sample_tokens(
        logits.to(DEVICE), seed=SEED, row_keys=torch.tensor(row_keys, device=DEVICE),
        positions=torch.tensor(positions, device=DEVICE), temperature=0.5, impl=impl,
    )  # fmt: skip
    for row in range(3):
        key, best = slow_fold(row_keys[row], positions[row]), (-math.inf, -1)
        for id_, logit in enumerate(logits[row].tolist()):
            x = (slow_draw(SEED, key, id_, 4) + 0.5) / 2**32
            best = max(best, (logit / 0.5 - math.log(-math.log1p(-x)), id_))
        assert tokens[row] == best[1]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("width", WIDTHS)
def test_samples_have_the_highest_score(width: int, impl: str) -> None:
    rows = 3 if impl == "triton" and DEVICE == "cpu" else 70
    logits = normal(rows, width, seed=width)
    assert_wins(logits, sample_tokens(logits.to(DEVICE), seed=SEED, impl=impl).cpu())
    warmer = sample_tokens(logits.to(DEVICE), seed=SEED, temperature=2.5, impl=impl).cpu()
    assert_wins(logits, warmer, temperature=2.5)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_instruction_set(isa: str, width: int) -> None:
    logits = normal(70, width, seed=width)
    assert_wins(logits, sample_tokens(logits, seed=SEED, impl="cpp"))
    # Rising by so much that each id beats those before it, falling, and all the same.
    for step in (30.0, -30.0, 0.0):
        slope = (step * torch.arange(width)).expand(70, width)
        assert_wins(slope, sample_tokens(slope, seed=SEED, impl="cpp"))
        assert_wins(slope.bfloat16().float(), sample_tokens(slope.bfloat16(), seed=SEED, impl="cpp"))


@pytest.mark.parametrize(("impl", "rows"), [("reference", 20), ("cpp", 100), ("triton", 2)])
def test_noise_keeps_its_digits(impl: str, rows: int) -> None:
    """Logits that bring all ids to one score, up to rounding, but one, which is a hundred-thousandth above and wins.

    Of 30522 draws the least x are some 1 / 30522, where 1 - x has but ten bits of them in float32.
    """
    logits = -scores(torch.zeros(rows, 30522))
    wanted = (torch.arange(rows) * 7919 + logits.argmin(1)) % 30522  # the first row's has the largest noise of all
    logits.scatter_add_(1, wanted[:, None], torch.full((rows, 1), 1e-5, dtype=torch.float64))
    tokens = sample_tokens(logits.float().to(DEVICE), seed=SEED, impl=impl).cpu()
    assert torch.equal(tokens, wanted)


# ---- Frequencies ----


@pytest.mark.parametrize("impl", ["reference", "cpp"])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_frequencies_are_softmax(impl: str, temperature: float) -> None:
    logits, rows = normal(1, 40, spread=1.5), 60_000
    keys = torch.arange(rows)
    tokens = sample_tokens(logits.expand(rows, -1), seed=7, row_keys=keys, temperature=temperature, impl=impl)
    expected = (logits[0].double() / temperature).softmax(0) * rows
    common = expected >= 5  # the rest together, as the test wants it
    counts = torch.bincount(tokens, minlength=40).double()
    observed = torch.cat([counts[common], counts[~common].sum(0, keepdim=True)])
    wanted = torch.cat([expected[common], expected[~common].sum(0, keepdim=True)])
    assert chisquare(*(x[wanted > 0].numpy() for x in (observed, wanted))).pvalue > 1e-3


def test_positions_are_as_good_as_keys() -> None:
    """Samples at the positions of one row, and of pairs of neighbours, are independent."""
    logits, rows = torch.zeros(1, 4), 40_000
    tokens = sample_tokens(
        logits.expand(rows, -1), seed=1, row_keys=torch.zeros(rows).long(), positions=torch.arange(rows)
    )
    pairs = tokens[0::2] * 4 + tokens[1::2]
    assert chisquare(torch.bincount(pairs, minlength=16).numpy()).pvalue > 1e-3


def test_rare_ids_are_drawn_as_often_as_they_should() -> None:
    """Probabilities of 1e-4 to 1e-6, in 8 million samples; rare where all else is in one id, and in many."""
    rows = 1 << 23
    for others in (1, 40):
        rare = torch.tensor([1e-4, 1e-5, 1e-6], dtype=torch.float64)
        rest = torch.full((others,), (1 - rare.sum()) / others, dtype=torch.float64)
        logits = torch.cat([rare[:2], rest, rare[2:]]).log().float()
        tokens = sample_tokens(logits.expand(rows, -1), seed=11, impl="cpp")
        counts = torch.bincount(tokens, minlength=others + 3)
        for place, p in zip((0, 1, others + 2), rare.tolist(), strict=True):
            assert 1e-4 < poisson.cdf(int(counts[place]), p * rows) < 1 - 1e-4, (others, p, int(counts[place]))


def test_the_probability_of_an_id_is_right_to_2_to_the_minus_32() -> None:
    """Of the 32 bits of the draws, without a sample: the chance of a rare id, over all its draws, against the rest.

    With probability p it wins if its E / p is below that of the others together, an exponential number of rate 1 - p.
    """
    first = torch.arange(1 << 22, dtype=torch.float64)
    for p in (1e-12, 1e-10, 1e-9, 1e-7, 1e-5):
        exponential = -torch.log1p(-(first + 0.5) / 2**32)
        wins = float((-exponential * (1 - p) / p).exp().sum() / 2**32)
        assert abs(wins - p) < 2.0**-32, p


# ---- What logits may be ----


@pytest.mark.parametrize("impl", IMPLS)
def test_extreme_logits(impl: str) -> None:
    """-inf is never sampled, what towers over the rest always is, and a row without a softmax gives -1."""
    logits = normal(10, 130)
    logits[0, 1:] = -math.inf
    logits[1, :-1] = -math.inf
    logits[2] = -math.inf
    logits[3, 77] = math.nan
    logits[4, 0] = math.inf
    logits[5, 99] = 1e4
    logits[6] = -1e4 + logits[6]
    logits[7] = torch.where(torch.arange(130) % 3 > 0, -math.inf, logits[7])
    logits[8, 50] = torch.finfo(torch.float32).max
    logits[9, 3:] = 1e30  # beside which no noise counts: of equal scores the first one wins
    tokens = sample_tokens(logits.to(DEVICE), seed=SEED, impl=impl).tolist()
    assert tokens[:6] == [0, 129, -1, -1, -1, 99]
    assert tokens[7] % 3 == 0
    assert tokens[8:] == [50, 3]
    assert_wins(logits[6:7], torch.tensor(tokens[6:7]), row_keys=torch.tensor([6]))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_types_are_computed_in_float32(impl: str, dtype: torch.dtype) -> None:
    logits = normal(5, 300).to(DEVICE, dtype)
    got = sample_tokens(logits, seed=SEED, impl=impl)
    assert torch.equal(got, sample_tokens(logits.float(), seed=SEED, impl=impl))
    assert got.dtype == torch.int64


# ---- What decides nothing ----


@pytest.mark.parametrize("impl", IMPLS)
def test_a_row_is_sampled_alone(impl: str) -> None:
    """By its key, whatever rows are beside it, in which order, and wherever they lie in memory."""
    logits, keys, positions = normal(6, 100).to(DEVICE), torch.arange(6, device=DEVICE) * 17, torch.arange(6)
    positions = positions.to(DEVICE)
    named = {"seed": SEED, "impl": impl}
    tokens = sample_tokens(logits, row_keys=keys, positions=positions, **named)
    some = torch.tensor([4, 1, 5], device=DEVICE)
    got = sample_tokens(logits[some], row_keys=keys[some], positions=positions[some], **named)
    assert torch.equal(got, tokens[some])
    wide = torch.full((6, 137), math.nan, device=DEVICE)
    wide[:, 20:120] = logits
    assert torch.equal(sample_tokens(wide[:, 20:120], row_keys=keys, positions=positions, **named), tokens)
    turned = logits.t().contiguous().t()
    strided = keys[:, None].expand(6, 2).contiguous()[:, 0]
    assert torch.equal(sample_tokens(turned, row_keys=strided, positions=positions, **named), tokens)
    on_device = torch.tensor([SEED], device=DEVICE)
    assert torch.equal(sample_tokens(logits, seed=on_device, row_keys=keys, positions=positions, impl=impl), tokens)
    others = [{"seed": SEED + 1}, {"row_keys": keys + 1}, {"positions": positions + 1}]
    for change in others:
        again = sample_tokens(logits, **({"row_keys": keys, "positions": positions} | named | change))
        assert not torch.equal(again, tokens), change


def test_any_number_of_threads_gives_the_same() -> None:
    logits, before = normal(64, 4000), torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(sample_tokens(logits, seed=SEED, impl="cpp"))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_to_sample(impl: str) -> None:
    assert sample_tokens(torch.zeros(0, 5), seed=0, impl=impl).shape == (0,)
    assert sample_tokens(torch.zeros(3, 0), seed=0, impl=impl).tolist() == [-1, -1, -1]


def test_no_gradient_and_no_graph() -> None:
    tokens = sample_tokens(normal(3, 9).requires_grad_(), seed=0)
    assert not tokens.requires_grad
    with torch._subclasses.FakeTensorMode():
        assert sample_tokens(torch.zeros(7, 30), seed=0).shape == (7,)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"logits": torch.zeros(3, 4).long()}, "logits: expected a tensor of floating"),
        ({"logits": torch.zeros(4)}, r"logits: expected \(N, V\)"),
        ({"temperature": 0.0}, "temperature: expected"),
        ({"temperature": math.nan}, "temperature: expected"),
        ({"seed": -1}, "seed: expected"),
        ({"row_keys": torch.zeros(2).long()}, "row_keys: expected one a row"),
        ({"positions": torch.zeros(3)}, "positions: expected an int64"),
        ({"impl": "cuda"}, "impl: expected"),
    ],
)
def test_errors_name_the_argument(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        sample_tokens(**{"logits": torch.zeros(3, 4), "seed": 0} | arguments)


# ---- Replacing ----


def test_replaced_are_those_that_changed() -> None:
    """A sample that equals the original is none, nor is one below 0, which stands for none; padding has no label."""
    labels = torch.tensor([[-100, 7, 8, -100, -100], [-100, -100, 0, 9, -100]])
    masked = torch.tensor([[1, 4, 55, 2, 3], [1, 6, 4, 4, 3]])
    real = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    tokens = torch.tensor([7, 5, 1, -1])
    wanted = ReplacedTokens(
        torch.tensor([[1, 7, 5, 2, 3], [1, 6, 1, 9, 3]]), torch.tensor([[0, 0, 1, 0, -100], [0, 0, 1, 0, 0]])
    )
    for ids in (masked, torch.where(labels != -100, labels, masked).int()):
        before = ids.clone()
        got = replace_tokens(ids, labels, tokens, attention_mask=real)
        assert torch.equal(got.input_ids, wanted.input_ids)
        assert torch.equal(got.labels, wanted.labels)
        assert torch.equal(ids, before)
    assert (replace_tokens(masked, labels, tokens).labels >= 0).all()
    with pytest.raises(ValueError, match="tokens: expected one for each of 4"):
        replace_tokens(masked, labels, tokens[:3])
    with pytest.raises(ValueError, match="labels: expected"):
        replace_tokens(masked, labels[:, :3], tokens)


# ---- As a GPU would run it ----


def measure() -> dict[str, Any]:
    """By target. The interpreter must be off: for a process of its own."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    from codegen import compile_for, counts

    from fastmlm.kernels.gpu.sampling import _BLOCKS, _WARPS, _sample_rows

    types = {"logits": "*bf16", "tokens": "*i64", "row_keys": "*i64", "seed": "i64", "stride": "i32"}
    types |= {"vocab_size": "i32", "scale": "fp32"}
    constants, aligned = {"device_seed": None, "BLOCKS": _BLOCKS}, ["logits", "tokens", "row_keys"]
    options = {"warps": _WARPS, "enable_fp_fusion": True}
    return {
        target: counts(target, compile_for(target, _sample_rows, types, constants, aligned, **options))
        for target in ("sm_90", "gfx942")
    }


def test_codegen_keeps_everything_in_registers() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout)
    assert [found["sm_90"][name] for name in ("stack", "local")] == [0, 0]
    assert [found["gfx942"][name] for name in ("spills", "scratch")] == [0, 0]
    # Of 65536 registers: on a multiprocessor at least 6 programs of 128 threads, while some of which wait for memory.
    assert found["sm_90"]["registers"] <= 80


if __name__ == "__main__":
    print(json.dumps(measure()))

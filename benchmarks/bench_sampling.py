"""One sample of each row of logits, as from the generator of replaced-token detection, beside PyTorch's two ways."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastmlm import sample_tokens

VOCABULARY = 30522
# The selected tokens of a batch of 54×128 or 13×512, and of a quarter of it.
CASES = {
    "1024×30522, fp32": (1024, torch.float32),
    "256×30522, fp32": (256, torch.float32),
    "256×30522, bf16": (256, torch.bfloat16),
}


def multinomial(logits: Tensor) -> Tensor:
    return torch.multinomial(logits.float().softmax(-1), 1)


def inverse(logits: Tensor) -> Tensor:
    """One random number a row, looked up among the sums of probabilities; float32 adds up to 1e-5 or so of errors."""
    sums = logits.float().softmax(-1).cumsum(-1)
    return torch.searchsorted(sums, torch.rand(len(logits), 1) * sums[:, -1:]).squeeze(-1)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("peer", [multinomial, inverse], ids=lambda f: f.__name__)
@pytest.mark.parametrize("case", CASES)
def bench_sampling(compare: Callable[..., None], case: str, peer: Callable[[Tensor], Tensor], threads: int) -> None:
    rows, dtype = CASES[case]
    logits = (3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(0))).to(dtype)
    step = iter(range(1 << 30))
    compare(
        lambda: sample_tokens(logits, seed=next(step)),
        lambda: peer(logits),
        case=f"sampling logits, {case}",
        ours_name="sample_tokens",
        peer_name="softmax and multinomial" if peer is multinomial else "softmax, cumsum and searchsorted",
        rounds=5,
        calls=2,
        threads=threads,
    )

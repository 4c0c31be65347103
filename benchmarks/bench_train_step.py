"""Forward and backward of a masked LM, its head dense or sparse, beside the most that counting operations allows."""

from collections.abc import Callable

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from fastmlm import MaskingSpec, mask_tokens, sparsify

SIZES = {
    "MiniLM-sized BERT": (16, 256, {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}),
    "BERT-base": (4, 256, {}),
    "mmBERT-small-like": (
        4,
        256,
        {
            "vocab_size": 256_000,
            "hidden_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "intermediate_size": 1152,
        },
    ),
}


def bound(config: BertConfig, length: int, share: float) -> float:
    """Multiplications with all tokens in the head over those with a share of them; backward triples both."""
    width = config.hidden_size
    layer = 8 * width**2 + 4 * width * config.intermediate_size + 4 * length * width
    encoder = config.num_hidden_layers * layer
    head = 2 * width**2 + 2 * width * config.vocab_size
    return (encoder + head) / (encoder + share * head)


def make_step(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Callable[[], object]:
    model.train()

    def step() -> None:
        model(**batch).loss.backward()
        model.zero_grad()

    return step


@pytest.mark.parametrize("name", SIZES)
def bench_train_step(compare: Callable[..., None], name: str) -> None:
    torch.manual_seed(0)
    rows, length, sizes = SIZES[name]
    config = BertConfig(**sizes)
    ids = torch.randint(1000, config.vocab_size, (rows, length))
    masked = mask_tokens(ids, MaskingSpec(103, config.vocab_size, (0, 100, 101, 102, 103)), seed=1)
    batch = {"input_ids": masked.input_ids, "labels": masked.labels, "attention_mask": torch.ones_like(ids)}
    selected = int((masked.labels != -100).sum())
    most = bound(config, length, selected / ids.numel())
    logits = 4 * config.vocab_size / 1e6
    compare(
        make_step(sparsify(BertForMaskedLM(config)), batch),
        make_step(BertForMaskedLM(config), batch),
        case=f"{name} (H={config.hidden_size}, {config.num_hidden_layers} layers, V={config.vocab_size}), "
        f"{rows}×{length}, fp32, forward + backward; at most {most:.2f} by operations; "
        f"logits {ids.numel() * logits:,.0f} MB, of selected rows {selected * logits:,.0f} MB",
        ours_name="sparsify(model)",
        peer_name="dense model",
        rounds=7,
        calls=1,
        threads=torch.get_num_threads(),
    )

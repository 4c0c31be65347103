"""A training step of a MiniLM-sized BERT: forward, backward and AdamW, sparse head against dense head."""

from collections.abc import Callable

import torch
from transformers import BertConfig, BertForMaskedLM

from fastmlm import MaskingSpec, mask_tokens, sparsify

ROWS, LENGTH, VOCABULARY = 16, 256, 30522
CONFIG = BertConfig(
    vocab_size=VOCABULARY, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
)


def make_step(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Callable[[], object]:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def bench_train_step(compare: Callable[..., None]) -> None:
    torch.manual_seed(0)
    ids = torch.randint(1000, VOCABULARY, (ROWS, LENGTH))
    masked = mask_tokens(ids, MaskingSpec(103, VOCABULARY, (0, 100, 101, 102, 103)), seed=1)
    batch = {"input_ids": masked.input_ids, "labels": masked.labels, "attention_mask": torch.ones_like(ids)}
    dense = BertForMaskedLM(CONFIG)
    sparse = sparsify(BertForMaskedLM(CONFIG))
    compare(
        make_step(sparse, batch),
        make_step(dense, batch),
        case=f"MiniLM-sized BERT (H=384, 6 layers, V={VOCABULARY}), {ROWS}×{LENGTH}, fp32",
        ours_name="sparsify(model)",
        peer_name="dense model",
        rounds=7,
        calls=1,
        threads=torch.get_num_threads(),
    )

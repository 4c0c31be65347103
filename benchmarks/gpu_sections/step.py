"""Training steps of BERT-base: masking, forward and backward under bfloat16 autocast, AdamW."""

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fastmlm
from fastmlm import mask_tokens
from gpu_sections.checks import SPEC
from gpu_sections.masking import hugging_face, make_ids
from gpu_sections.record import Section
from gpu_sections.timing import Call, Captured, Device, ratio, take_turns

ROWS, LENGTH = 64, 512
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
DENSE, DENSE_MASKED = "dense, Hugging Face's masking", "dense, mask_tokens"
SPARSE, FIXED, GRAPH = "sparsify, mask_tokens", "sparsify, mask_tokens, rows", "the same in a CUDA graph"


class Training:
    """A model and its optimizer, and steps of it on one batch, masked anew each time."""

    def __init__(self, device: Device, model: Any, ids: Tensor, special: Tensor, sparse: bool) -> None:
        self.device, self.ids, self.special = device, ids, special
        self.model = fastmlm.sparsify(model) if sparse else model
        on_gpu = device.kind == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True, capturable=on_gpu)
        self.theirs = hugging_face(device)
        self.seed = torch.tensor([1], device=device.device)

    def by_hugging_face(self) -> Tensor:
        ids, labels = self.theirs(self.ids.clone(), self.special)
        return self.train({"input_ids": ids, "labels": labels})

    def by_mask_tokens(self, rows: bool = False) -> Tensor:
        self.seed.add_(1)
        masked = mask_tokens(self.ids, SPEC, seed=self.seed, impl="triton")
        batch = masked._asdict()
        if rows:
            from fastmlm.selection import row_capacity

            capacity = row_capacity(self.ids.numel(), SPEC.mlm_probability)
            batch |= fastmlm.select_rows(masked.labels, capacity)._asdict()
        return self.train(batch)

    def train(self, batch: dict[str, Tensor]) -> Tensor:
        # Without a cache of cast weights, which a graph would keep from one step to the next.
        with torch.autocast(self.device.kind, torch.bfloat16, cache_enabled=False):
            loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def step(section: Section) -> None:
    from transformers import BertConfig, BertForMaskedLM

    device = section.device
    rows, length = (2, 16) if device.dry else (ROWS, LENGTH)
    torch.manual_seed(0)
    config = BertConfig(**(SMALL if device.dry else {}))
    model = BertForMaskedLM(config).train()
    ids, special = make_ids(device, rows, length, torch.int64)
    make = lambda sparse: Training(device, copy.deepcopy(model).to(device.device), ids, special, sparse)  # noqa: E731
    dense, sparse = make(False), make(True)
    calls: dict[str, Call] = {
        SPARSE: sparse.by_mask_tokens,
        DENSE: dense.by_hugging_face,
        DENSE_MASKED: dense.by_mask_tokens,
    }
    if hasattr(fastmlm, "select_rows"):
        calls[FIXED] = partial(sparse.by_mask_tokens, rows=True)
        # A model of its own: a graph keeps its gradients where they were captured.
        calls[GRAPH] = Captured(device, partial(make(True).by_mask_tokens, rows=True))
    look = lambda loss: {} if loss is None else {"loss": float(loss)}  # noqa: E731
    entries = take_turns(device, calls, max(section.left(), 1) / 2, section.until, look=look)
    for entry in entries.values():
        if "ms" in entry:
            entry["tokens_per_s"] = 1e3 * ids.numel() / entry["ms"]
    section.notes.append(
        f"{type(model).__name__} of BertConfig(), random, {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M "
        "parameters in float32, dropout as it is, scaled dot-product attention, fused AdamW; not compiled. Peak memory "
        "is that above models and their optimizers' states."
    )
    section.add({"shape": f"{rows} × {length}", "tokens": ids.numel(), "entries": entries})
    gain = ratio(entries, SPARSE, DENSE)
    section.notes.append(f"With fastmlm {gain:.2f} × as fast." if gain else "One of the two was not measured.")

"""The vocabulary projection and its loss, forward and backward, against whoever computes the same, in bfloat16."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from math import isfinite, nan
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fastmlm
from fastmlm import linear_cross_entropy
from gpu_sections.record import Section
from gpu_sections.timing import Call, Captured, Device, ratio, take_turns

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of input (N, H), weight, bias and labels (N,)

TOKENS, SHARE = 32768, 0.15
SHAPES = {
    "BERT-base": (768, 30522),
    "ModernBERT-base": (768, 50368),
    "mmBERT-base": (768, 256_000),
    "XLM-R base": (768, 250_002),
}
OURS = "fastmlm"
ROWS, ROWS_GRAPH = "fastmlm, rows chosen on the device", "fastmlm, rows chosen on the device, in a CUDA graph"
DENSE, GATHERED = "dense, F.cross_entropy", "gathered, F.cross_entropy"
NARROW = "gathered, F.cross_entropy of bfloat16"
TORCH, TORCH_CHUNKS = "gathered, F.linear_cross_entropy", "gathered, F.linear_cross_entropy, its own chunks"
LIGER, LIGER_GATHERED, CCE = "Liger", "gathered, Liger", "cut-cross-entropy"
ALL = "fastmlm, all positions"
VARIANTS = (ROWS, ROWS_GRAPH, ALL)  # of ours, which the goals are not about

HOW = {
    OURS: "linear_cross_entropy(input, weight, labels, linear_bias=bias) of the selected rows, gathered by nonzero and "
    "index_select within the call, as a sparse model does it",
    ROWS: "select_rows and take_rows, then linear_cross_entropy of as many rows as its capacity; nothing waits",
    ALL: "linear_cross_entropy of all positions, which on a GPU multiplies those that are ignored, too",
    DENSE: "F.cross_entropy(F.linear(input, weight, bias).float(), labels)",
    GATHERED: "the same of the selected rows, gathered within the call",
    NARROW: "without .float(), which loses digits and saves memory",
    LIGER: "LigerFusedLinearCrossEntropyLoss()(weight, input, labels, bias), of all positions or of gathered ones",
    CCE: "cut_cross_entropy.linear_cross_entropy(input, weight, labels): it gathers by itself; no bias (here 0)",
}


def head(section: Section) -> None:
    device = section.device
    tokens, shapes = (32, {"BERT-base": (32, 160)}) if device.dry else (TOKENS, SHAPES)
    section.notes += [f"{name}: {how}." for name, how in HOW.items()]
    section.notes.append(
        f"{tokens} positions, {SHARE:.0%} selected; gradients of input, weight and bias, which count as memory; "
        f"impl of ours: {section.loss_impl or 'None, the fastest there is: the Triton loss does not exist yet'}."
    )
    for number, (name, (width, vocabulary)) in enumerate(shapes.items()):
        given = make_inputs(device, tokens, width, vocabulary)
        calls: dict[str, Call] = {
            who: partial(forward_and_backward, loss, given)
            for who, loss in contenders(device, section.loss_impl).items()
        }
        if ROWS in calls:
            calls[ROWS_GRAPH] = Captured(device, calls[ROWS])
        seconds = max(section.left(), 1) / (len(shapes) - number) / 2
        entries = take_turns(device, calls, seconds, section.until, look=value_of)
        entries |= {peer: {"skipped": reason} for peer, reason in absent().items()}
        row = {"shape": name, "tokens": tokens, "width": width, "vocabulary": vocabulary}
        section.add({**row, "selected": int((given[3] != -100).sum()), "entries": entries})
        goals(section, name, entries)
        del calls, given
        device.free()


def goals(section: Section, shape: str, entries: dict[str, dict[str, Any]]) -> None:
    """Ahead of every peer in time, and within a tenth of the least memory."""
    peers = [name for name, entry in entries.items() if "ms" in entry and name not in (OURS, *VARIANTS)]
    ratios = {name: ratio(entries, OURS, name) for name in peers}
    nearest = min((name for name in peers if ratios[name] is not None), key=lambda name: ratios[name], default=None)
    text = f"head + loss, {shape}: ahead of every peer"
    section.goal(text if nearest is None else f"{text} (nearest: {nearest})", ratios.get(nearest), " × as fast", 1)
    least = min((entries[name]["peak_mb"] for name in peers), default=None)
    ours = entries[OURS].get("peak_mb")
    share = None if least is None or ours is None else ours / least
    section.goal(f"head + loss, {shape}: peak memory at most 1.1 × the least of peers", share, " ×", most=1.1)
    losses = {name: entry["loss"] for name, entry in entries.items() if entry.get("loss") is not None}
    for name, loss in losses.items():
        if OURS in losses and abs(loss - losses[OURS]) > 0.02 * abs(losses[OURS]):
            section.notes.append(f"{shape}: the loss of {name} is {loss:.4f}, ours {losses[OURS]:.4f}.")


def make_inputs(device: Device, tokens: int, width: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator(device.device).manual_seed(0)
    make = partial(torch.randn, device=device.device, generator=generator)
    x, weight = make(tokens, width).bfloat16(), (0.02 * make(vocabulary, width)).bfloat16()
    labels = torch.randint(vocabulary, (tokens,), device=device.device, generator=generator)
    labels[torch.rand(tokens, device=device.device, generator=generator) >= SHARE] = -100
    bias = torch.zeros(vocabulary, dtype=torch.bfloat16, device=device.device)
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), labels


def forward_and_backward(loss: Loss, given: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor | None, ...]:
    value = loss(*given)
    return (value.detach(), *torch.autograd.grad(value, given[:3], allow_unused=True))


def value_of(result: tuple[Tensor | None, ...] | None) -> dict[str, Any]:
    """The loss, None if it is NaN, which JSON has no number for; a graph gives none."""
    value = nan if result is None or result[0] is None else float(result[0])
    return {"loss": value if isfinite(value) else None}


def absent() -> dict[str, str]:
    """Who is not measured because it is not there."""
    found = {}
    if not hasattr(F, "linear_cross_entropy"):
        found[TORCH] = f"torch {torch.__version__} has none"
    for name, module in ((LIGER, "liger_kernel"), (CCE, "cut_cross_entropy")):
        if find_spec(module) is None:
            found[name] = "not installed and not in the folder of peers"
    return found


def contenders(device: Device, impl: str | None) -> dict[str, Loss]:
    """Ours first, to be measured whatever time is left."""
    by_us: Loss = lambda x, w, b, labels: linear_cross_entropy(x, w, labels, linear_bias=b, impl=impl)  # noqa: E731
    found: dict[str, Loss] = {
        OURS: gathered(by_us),
        GATHERED: gathered(lambda x, w, b, labels: F.cross_entropy(F.linear(x, w, b).float(), labels)),
        NARROW: gathered(lambda x, w, b, labels: F.cross_entropy(F.linear(x, w, b), labels)),
        DENSE: lambda x, w, b, labels: F.cross_entropy(F.linear(x, w, b).float(), labels),
    }
    if hasattr(F, "linear_cross_entropy"):
        found[TORCH] = gathered(lambda x, w, b, labels: F.linear_cross_entropy(x, w, labels, linear_bias=b))
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        chunks = torch.nn.LinearCrossEntropyOptions()
        found[TORCH_CHUNKS] = gathered(
            lambda x, w, b, labels: F.linear_cross_entropy(x, w, labels, linear_bias=b, options=chunks)
        )
    if find_spec("liger_kernel") is not None:
        found |= {LIGER: by_liger, LIGER_GATHERED: gathered(by_liger)}
    if find_spec("cut_cross_entropy") is not None:
        found[CCE] = by_cut_cross_entropy
    found[ALL] = by_us
    if hasattr(fastmlm, "select_rows"):
        found[ROWS] = partial(by_rows, impl=impl)
    return found


def gathered(loss: Loss) -> Loss:
    def call(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        rows = labels.ne(-100).nonzero().squeeze(1)
        return loss(x.index_select(0, rows), weight, bias, labels.index_select(0, rows))

    return call


def by_rows(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, impl: str | None) -> Tensor:
    """As a sparse model with `rows` does it: fixed shapes, and nothing that waits for the device."""
    from fastmlm.selection import labels_at, row_capacity, take_rows

    rows, _ = fastmlm.select_rows(labels, row_capacity(labels.numel(), SHARE))
    targets = labels_at(labels, rows, -100)
    return linear_cross_entropy(take_rows(x, rows), weight, targets, linear_bias=bias, impl=impl)


def by_liger(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    module = import_module("liger_kernel.transformers.fused_linear_cross_entropy")
    return module.LigerFusedLinearCrossEntropyLoss()(weight, x, labels, bias)


def by_cut_cross_entropy(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    return import_module("cut_cross_entropy").linear_cross_entropy(x, weight, labels)

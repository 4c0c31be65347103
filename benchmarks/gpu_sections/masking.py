"""Masking on a GPU, against copying as many bytes and against Hugging Face's masking of tensors on the device."""

import itertools
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from fastmlm import mask_tokens
from gpu_sections.checks import SPEC, TABLE, make_options
from gpu_sections.record import Section
from gpu_sections.timing import Call, Captured, Device, ratio, take_turns

LENGTH = 512
TOKENS = {"16 k": 1 << 14, "256 k": 1 << 18, "4 M": 1 << 22, "64 M": 1 << 26}
OURS, COPY = "fastmlm.mask_tokens", "device copy of as many bytes"
HF, HF_COMPILED = "Hugging Face", "Hugging Face, torch.compile"
WHERE, WHERE_GRAPH = "torch.where, torch.compile", "torch.where, torch.compile, in a CUDA graph"
GRAPH, GRAPH_OF_MANY = f"{OURS}, in a CUDA graph", f"{OURS}, many in a CUDA graph, each"

HOW = {
    OURS: "mask_tokens(ids, spec, seed=1): specials looked up by id",
    COPY: "one Tensor.copy_ that reads half of 24 (int64) or 12 (int32) bytes a token and writes the other half",
    HF: 'with torch.device("cuda"): DataCollatorForLanguageModeling(tokenizer).torch_mask_tokens(ids, '
    "special_tokens_mask=special), with ids and special (bool) on the device before; it masks ids in place, which "
    "spares it a copy. It takes no int32: there it is given int64",
    HF_COMPILED: "torch.compile(collator.torch_mask_tokens), called in the same way",
    WHERE: "the same law with torch.rand and torch.where, torch.compile(..., dynamic=False): as well as PyTorch can",
}


def sizes(device: Device) -> dict[str, tuple[int, int]]:
    """Rows and their length by name."""
    if device.dry:
        return {"64": (1, 64)}
    return {name: (tokens // LENGTH, LENGTH) for name, tokens in TOKENS.items()}


def masking(section: Section) -> None:
    device = section.device
    found = sizes(device)
    section.notes += [f"{name}: {how}." for name, how in HOW.items()]
    torch._dynamo.config.recompile_limit = 64  # each size and type is compiled on purpose
    for number, (size, dtype) in enumerate(itertools.product(found, (torch.int64, torch.int32))):
        seconds = max(section.left(), 1) / (2 * len(found) + 2 - number) / 2  # the other half is for compiling
        entries = take_turns(device, contenders(device, *found[size], dtype), seconds, section.until)
        kind = str(dtype).removeprefix("torch.")
        tokens, moved = found[size][0] * found[size][1], 3 * dtype.itemsize
        for entry in entries.values():
            if "ms" in entry:
                entry["gb_per_s"] = tokens * moved / entry["ms"] / 1e6
        section.add({"size": size, "dtype": kind, "tokens": tokens, "bytes_per_token": moved, "entries": entries})
        section.goal(f"masking {size} tokens, {kind}: ≥ 10 × Hugging Face's eager", ratio(entries, OURS, HF), " ×", 10)
        if size == list(found)[-1]:
            copied = ratio(entries, OURS, COPY)
            share = None if copied is None else 100 * copied
            section.goal(f"masking {size} tokens, {kind}: ≥ 85 % of a device copy", share, " %", 85)
    options(section, *list(found.values())[min(2, len(found) - 1)])


def make_ids(device: Device, rows: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Ids with a special one at either end of each row, and which are special."""
    ids = torch.randint(1000, SPEC.vocab_size, (rows, length), dtype=dtype, device=device.device)
    ids[:, 0], ids[:, -1] = 101, 102
    special = torch.zeros(rows, length, dtype=torch.bool, device=device.device)
    special[:, 0] = special[:, -1] = True
    return ids, special


def contenders(device: Device, rows: int, length: int, dtype: torch.dtype) -> dict[str, Call]:
    ids, special = make_ids(device, rows, length, dtype)
    source = torch.randint(256, (ids.numel() * 3 * dtype.itemsize // 2,), dtype=torch.uint8, device=device.device)
    target = torch.empty_like(source)
    theirs = ids.long().clone()  # masked in place, again and again
    where = torch.compile(by_where, dynamic=False, backend=device.compiler)
    return {
        OURS: lambda: mask_tokens(ids, SPEC, seed=1, impl="triton"),
        COPY: lambda: target.copy_(source),
        HF: lambda: hugging_face(device)(theirs, special),
        WHERE: lambda: where(ids, special),
        HF_COMPILED: lambda: hugging_face(device, compiled=True)(theirs, special),
    }


@cache
def hugging_face(device: Device, compiled: bool = False) -> Callable[[Tensor, Tensor], object]:
    """Its own code, which makes its random tensors on the default device.

    Asked for within the calls that are measured, so that ours are measured also where it cannot be imported.
    """
    from tokenizers import Tokenizer, models
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    names = {0: "[PAD]", 100: "[UNK]", 101: "[CLS]", 102: "[SEP]", 103: "[MASK]"}
    words = {names.get(i, f"word{i}"): i for i in range(SPEC.vocab_size)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="[UNK]")),
        pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]",
    )  # fmt: skip
    mask = DataCollatorForLanguageModeling(tokenizer).torch_mask_tokens
    if compiled:
        mask = torch.compile(mask, dynamic=False, backend=device.compiler)

    def call(ids: Tensor, special: Tensor) -> object:
        with torch.device(device.device):
            return mask(ids, special_tokens_mask=special)

    return call


def by_where(ids: Tensor, special: Tensor) -> tuple[Tensor, Tensor]:
    """15 %, 80/10/10, as anybody would write it for a compiler."""
    selected = (torch.rand(ids.shape, device=ids.device) < 0.15) & ~special
    action = torch.rand(ids.shape, device=ids.device)
    words = torch.randint(SPEC.vocab_size, ids.shape, dtype=ids.dtype, device=ids.device)
    changed = torch.where(action < 0.8, SPEC.mask_token_id, torch.where(action < 0.9, words, ids))
    return torch.where(selected, changed, ids), torch.where(selected, ids, SPEC.ignore_index)


def options(section: Section, rows: int, length: int) -> None:
    """What the options cost, int64."""
    ids, given = make_options(section.device.device, torch.int64, rows, length)
    units = torch.arange(length, device=ids.device).expand(rows, length) // 3 * 3
    ends = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=ids.device)
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "right-padded, attention_mask bool": {"attention_mask": given["right"]},
        "left-padded, attention_mask int64": {"attention_mask": given["left"]},
        "special_tokens_mask bool": {"special_tokens_mask": given["special_tokens_mask"]},
        "row_keys": {"row_keys": given["row_keys"]},
        "units int64": {"units": units.contiguous()},
        "a rate a row": {"mlm_probability": given["rate_of_row"]},
        "a rate a token": {"mlm_probability": given["rates"]},
        f"packed, rows of {length}": {"cu_seqlens": ends},
    }
    calls: dict[str, Call] = {
        name: partial(mask_tokens, ids.view(-1) if "cu_seqlens" in call else ids, SPEC, seed=1, impl="triton", **call)
        for name, call in cases.items()
    }
    calls["a table, never the original"] = partial(mask_tokens, ids, TABLE, seed=1, impl="triton")
    entries = take_turns(section.device, calls, max(section.left(), 1) / 2, section.until)
    section.add({"size": f"{rows} × {length}, options", "dtype": "int64", "tokens": ids.numel(), "entries": entries})


def latency(section: Section) -> None:
    """Where launching is all there is: wall-clock time a call, of many in a row, as they are and in CUDA graphs."""
    device = section.device
    rows, length = next(iter(sizes(device).values()))
    ids, special = make_ids(device, rows, length, torch.int64)
    seed = torch.tensor([1], device=device.device)
    out = (torch.empty_like(ids), torch.empty_like(ids))
    theirs = ids.clone()
    where = torch.compile(by_where, dynamic=False, backend=device.compiler)
    many = 2 if device.dry else 20

    def step() -> None:
        seed.add_(1)
        mask_tokens(ids, SPEC, seed=seed, impl="triton", out=out)

    def steps() -> None:
        for _ in range(many):
            step()

    calls: dict[str, Call] = {
        OURS: lambda: mask_tokens(ids, SPEC, seed=1, impl="triton"),
        f"{OURS}, seed on the device, advanced, out=": step,
        GRAPH: Captured(device, step),
        GRAPH_OF_MANY: Captured(device, steps),
        HF: lambda: hugging_face(device)(theirs, special),
        HF_COMPILED: lambda: hugging_face(device, compiled=True)(theirs, special),
        WHERE: lambda: where(ids, special),
        WHERE_GRAPH: Captured(device, lambda: where(ids, special)),
    }
    in_a_row = lambda call, count: device.in_a_row(call, count if device.dry else 10 * count)  # noqa: E731
    entries = take_turns(device, calls, max(section.left(), 1) / 2, section.until, measure=in_a_row)
    entry = entries[GRAPH_OF_MANY]
    if "ms" in entry:
        entry |= {key: [value / many for value in entry[key]] for key in ("quartiles", "turns")}
        entry["ms"] /= many
    section.notes.append(
        f"{rows} × {length} int64; {many} are many; back to back, so the L2 is warm. Hugging Face's own cannot be in a "
        "CUDA graph: its boolean index waits for the device."
    )
    section.add({"size": f"{rows} × {length}", "dtype": "int64", "tokens": ids.numel(), "entries": entries})
    section.goal("back to back: ≥ 10 × Hugging Face's eager", ratio(entries, OURS, HF), " ×", 10)

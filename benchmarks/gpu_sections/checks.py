"""Whether compiled kernels give what they must: the reference's masks, losses like float64, models like dense ones."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fastmlm
from fastmlm import MaskingSpec, linear_cross_entropy, mask_tokens
from gpu_sections.loss import by_rows, contenders, forward_and_backward, make_inputs
from gpu_sections.record import Section
from gpu_sections.timing import Device

SPEC = MaskingSpec(103, 30522, (0, 100, 101, 102, 103))
TABLE = MaskingSpec(
    103, 30522, (0, 100, 101, 102, 103), mlm_probability=0.4, random_token_ids=tuple(range(900, 2900)),
    exclude_original=True,
)  # fmt: skip
POISON = -7
SEED = (1 << 63) - 2  # keys have 64 bits: counting on from here changes their sign as int64

LENGTHS = (1, 15, 64, 65, 515, 4099)  # before, on and after the edges of lanes, blocks and tiles


def correctness(section: Section) -> None:
    dry = section.device.dry
    rows, length = (3, 70) if dry else (64, 507)
    for name, call in masking_calls(section.device.device, rows, length, LENGTHS[:4] if dry else LENGTHS):
        section.check(name, partial(same_masks, **call))
    section.check("masks: 4 replays of a graph that advances its seed", partial(replays, section.device, rows, length))
    section.check("masks: beyond 2^31 tokens", partial(huge, section.device, *((20, 70) if dry else (65 << 16, 509))))
    for name, options in loss_calls(dry):
        section.check(name, partial(loss_is_close, section.device.device, section.loss_impl, **options))
    section.check("loss: nothing selected", partial(nothing_selected, section.device.device, section.loss_impl))
    for name in ("Bert", "Roberta", "ModernBert"):
        section.check(f"model: sparse {name} against dense", partial(same_training, section.device.device, name))
    if hasattr(fastmlm, "select_rows"):
        section.check("loss: 3 replays of a graph, other labels each", partial(loss_replays, section))
        section.check("model: rows chosen on the device", partial(same_with_rows, section.device.device))


def masking_calls(
    device: torch.device, rows: int, length: int, lengths: tuple[int, ...]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """By name, the arguments of `same_masks`."""
    for dtype in (torch.int64, torch.int32):
        ids, options = make_options(device, dtype, rows, length)
        packed_ids, packed = make_packed(device, dtype, rows, length)
        cases: dict[str, tuple[Tensor, MaskingSpec, tuple[str, ...]]] = {
            "plain": (ids, SPEC, ()),
            "right-padded": (ids, SPEC, ("right",)),
            "left-padded": (ids, SPEC, ("left",)),
            "packed": (packed_ids, SPEC, ("cu_seqlens",)),
            "padded, everything": (ids, TABLE, ("left", "special_tokens_mask", "units", "row_keys", "rates")),
            "packed, everything": (packed_ids, TABLE, tuple(packed)),
        }
        if dtype == torch.int64:
            cases |= {
                "special_tokens_mask": (ids, SPEC, ("special_tokens_mask",)),
                "units": (ids, SPEC, ("left", "units")),
                "a rate a row": (ids, SPEC, ("rate_of_row",)),
                "a rate a token": (ids, SPEC, ("rates",)),
                "a table, never the original": (ids, TABLE, ()),
            }
            for n in lengths:
                cases[f"{n} tokens a row"] = (make_options(device, dtype, 5, n)[0], TABLE, ())
        for name, (batch, spec, given) in cases.items():
            call = {arguments(key): (packed if "packed" in name else options)[key] for key in given}
            label = f"masks: {name}, {str(dtype).removeprefix('torch.')}"
            yield label, {"ids": batch, "spec": spec, **call}
            if name in ("plain", "packed"):
                yield f"{label}, seed on the device", {"ids": batch, "spec": spec, "device_seed": True, **call}
            if name == "left-padded":
                yield f"{label}, in place", {"ids": batch, "spec": spec, "in_place": True, **call}


def arguments(key: str) -> str:
    """What `mask_tokens` calls an option that has several kinds."""
    kinds = {"left": "attention_mask", "right": "attention_mask", "rates": "mlm_probability"}
    return kinds.get(key, "mlm_probability" if key == "rate_of_row" else key)


def make_options(device: torch.device, dtype: torch.dtype, rows: int, length: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Ids, and whatever a padded batch may have beside them; the last row has no real token at all."""
    generator = torch.Generator().manual_seed(length)
    pads = torch.randint(length, (rows, 1), generator=generator)
    pads[0], pads[-1] = 0, length
    columns = torch.arange(length)
    left = columns >= pads
    options = {
        "left": left.long(),
        "right": columns < length - pads,
        "special_tokens_mask": torch.rand(rows, length, generator=generator) < 0.1,
        "units": torch.where(left, (columns - pads).clamp(min=0) // 3 * 3, 0),  # words of three tokens
        "row_keys": torch.randint(-(1 << 62), 1 << 62, (rows,), generator=generator),
        "rates": torch.rand(rows, length, generator=generator),
        "rate_of_row": torch.linspace(0, 1, rows)[:, None],
    }
    ids = torch.randint(SPEC.vocab_size, (rows, length), generator=generator).to(dtype)
    return ids.to(device), {name: option.to(device) for name, option in options.items()}


def make_packed(device: torch.device, dtype: torch.dtype, rows: int, length: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The same for rows of random lengths, some of them empty, without padding."""
    generator = torch.Generator().manual_seed(rows)
    count = rows * length
    ends = torch.randint(count, (rows - 1,), generator=generator).sort().values
    ends[1] = ends[0]  # an empty row
    cu_seqlens = torch.cat([torch.tensor([0]), ends, torch.tensor([count])])
    columns = torch.arange(count)
    start = cu_seqlens[torch.searchsorted(cu_seqlens, columns, right=True) - 1]
    options = {
        "cu_seqlens": cu_seqlens.to(torch.int32),
        "special_tokens_mask": torch.rand(count, generator=generator) < 0.1,
        "units": (columns - start) // 3 * 3,
        "row_keys": torch.randint(-(1 << 62), 1 << 62, (rows,), generator=generator),
        "rates": torch.rand(count, generator=generator),
    }
    ids = torch.randint(SPEC.vocab_size, (count,), generator=generator).to(dtype)
    return ids.to(device), {name: option.to(device) for name, option in options.items()}


def same_masks(ids: Tensor, spec: MaskingSpec, device_seed: bool = False, in_place: bool = False, **call: Any) -> str:
    """Triton's ids and labels equal those of the reference, and every element was written."""
    expected = mask_tokens(ids, spec, seed=SEED, impl="reference", **call)
    seed = torch.tensor([SEED], device=ids.device) if device_seed else SEED
    given = ids.clone()
    out = (given if in_place else torch.full_like(ids, POISON), torch.full_like(ids, POISON))
    got = mask_tokens(given, spec, seed=seed, impl="triton", out=out, **call)
    return compare_masks(got, expected)


def compare_masks(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> str:
    for name, one, other in zip(("input_ids", "labels"), got, expected, strict=True):
        assert one.dtype == other.dtype, f"{name}: {one.dtype}, not {other.dtype}"
        assert torch.equal(one, other), f"{name}: {int((one != other).sum())} of {one.numel()} differ"
    return f"{int((expected[1] != SPEC.ignore_index).sum())} of {expected[1].numel()} selected"


def replays(device: Device, rows: int, length: int) -> str:
    """Each replay of a captured step, whose first op adds to the seed on the device, gives the next key's masks."""
    ids, options = make_options(device.device, torch.int64, rows, length)
    seed = torch.tensor([SEED], device=device.device)
    out = (torch.empty_like(ids), torch.empty_like(ids))
    call = {"attention_mask": options["left"]}

    def step() -> None:
        seed.add_(1)
        mask_tokens(ids, SPEC, seed=seed, impl="triton", out=out, **call)

    replay = device.capture(step)
    seed.fill_(SEED)  # warming up advanced it
    seen = []
    for i in range(1, 5):
        for tensor in out:
            tensor.fill_(POISON)
        replay()
        compare_masks(out, mask_tokens(ids, SPEC, seed=SEED + i, impl="reference", **call))
        seen.append(out[1].clone())
    assert not torch.equal(seen[0], seen[1]), "two replays drew the same"
    return "each like the reference with its key"


def huge(device: Device, rows: int, length: int) -> str:
    """int32 ids, more than 2^31 of them: their rows at the start, across the border and at the end."""
    spec, border = SPEC, rows // 2 if device.dry else (1 << 31) // length
    ids = torch.randint(spec.vocab_size, (rows, length), dtype=torch.int32, device=device.device)
    out = (torch.full_like(ids, POISON), torch.full_like(ids, POISON))
    mask_tokens(ids, spec, seed=SEED, impl="triton", out=out)
    for first, last in ((0, 3), (border - 2, border + 3), (rows - 3, rows)):
        keys = torch.arange(first, last, device=device.device)
        expected = mask_tokens(ids[first:last], spec, seed=SEED, row_keys=keys, impl="reference")
        compare_masks((out[0][first:last], out[1][first:last]), expected)
    step = -(-rows // 16)  # the comparison makes tensors of its own
    parts = [part for tensor in out for part in tensor.split(step)]
    unwritten = int(torch.stack([(part == POISON).sum() for part in parts]).sum())
    assert not unwritten, f"{unwritten} elements were not written"
    return f"{ids.numel()} tokens, 11 rows compared, all written"


def loss_calls(dry: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """By name, the arguments of `loss_is_close`."""
    small = {"rows": 11 if dry else 1003, "width": 32 if dry else 96, "vocabulary": 101 if dry else 5003}
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        kind = str(dtype).removeprefix("torch.")
        reduction = "sum" if dtype == torch.float16 else "mean"  # a mean's gradients are below what float16 holds
        yield f"loss: {kind}, {reduction}", {**small, "dtype": dtype, "reduction": reduction}
        yield f"loss: {kind}, no bias", {**small, "dtype": dtype, "reduction": "sum", "bias": False}
        for reduction in ("sum", "none"):
            options = {"reduction": reduction, "label_smoothing": 0.1, "weights": True, "ignored": 0.3}
            yield f"loss: {kind}, {reduction}, weights, smoothing, ignored rows", {**small, "dtype": dtype, **options}
    for name, shape in {"BERT-base": (4915, 768, 30522), "mmBERT-base": (2000, 768, 256_000)}.items():
        sizes = (9, 32, 160) if dry else shape
        yield f"loss: bfloat16, the shape of {name}", dict(zip(("rows", "width", "vocabulary"), sizes, strict=True))


def make_loss(
    device: torch.device, rows: int, width: int, vocabulary: int, ignored: float = 0.0
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Input, weight and bias in float64, targets, weights of rows."""
    generator = torch.Generator(device).manual_seed(rows)
    make = partial(torch.randn, dtype=torch.float64, device=device, generator=generator)
    numbers = [make(rows, width), width**-0.5 * make(vocabulary, width), make(vocabulary)]
    target = torch.randint(vocabulary, (rows,), device=device, generator=generator)
    target[torch.rand(rows, device=device, generator=generator) < ignored] = -100
    return numbers, target, torch.rand(rows, device=device, generator=generator)


def eager(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, scale: Tensor | None, **kw: Any) -> Tensor:
    reduction = kw.pop("reduction")
    logits = F.linear(x, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(logits, target, reduction="none", **kw)
    losses = losses if scale is None else losses * scale
    if reduction == "none":
        return losses
    return losses.sum() / ((target != -100).sum() if reduction == "mean" else 1)


def with_gradients(loss: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    tensors = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    value = loss(*tensors)
    return [value.detach(), *torch.autograd.grad(value.sum(), tensors)]


def relative_error(got: Tensor, true: Tensor) -> float:
    """In the Euclidean norm; that of what is got alone, where it should be 0."""
    size = true.double().norm()
    return float((got.double() - true.double()).norm() / torch.where(size > 0, size, 1))


def loss_is_close(
    device: torch.device, impl: str | None, rows: int, width: int, vocabulary: int,
    dtype: torch.dtype = torch.bfloat16, reduction: str = "mean", bias: bool = True, weights: bool = False,
    ignored: float = 0.0, label_smoothing: float = 0.0,
) -> str:  # fmt: skip
    """Errors against float64, of the loss and each gradient: at most those of eager PyTorch and one epsilon."""
    numbers, target, scale = make_loss(device, rows, width, vocabulary, ignored)
    numbers = [tensor.to(dtype) for tensor in (numbers if bias else numbers[:2])]
    factors = scale if weights else None
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    both = {"target": target, "scale": factors, **options}
    by_eager = lambda x, w, b=None: eager(x, w, b, **both)  # noqa: E731
    by_us = lambda x, w, b=None: linear_cross_entropy(  # noqa: E731
        x, w, target, linear_bias=b, weight_per_row=factors, impl=impl, **options
    )
    truth = with_gradients(by_eager, [tensor.double() for tensor in numbers])
    epsilon = torch.finfo(dtype).eps
    errors = []
    for name, true, ours, theirs in zip(
        ("loss", "input", "weight", "bias"), truth, with_gradients(by_us, numbers), with_gradients(by_eager, numbers),
        strict=False,
    ):  # fmt: skip
        error, allowed = relative_error(ours, true), relative_error(theirs, true)
        assert error <= allowed + epsilon, f"{name}: error {error:.2e}, eager {allowed:.2e}"
        errors.append(f"{error:.1e}")
    return "errors " + ", ".join(errors)


def nothing_selected(device: torch.device, impl: str | None) -> str:
    numbers, target, _ = make_loss(device, 20, 32, 101, ignored=2.0)
    got = with_gradients(
        lambda x, w, b: linear_cross_entropy(x, w, target, linear_bias=b, impl=impl),
        [tensor.to(torch.bfloat16) for tensor in numbers],
    )
    assert all(not tensor.any() for tensor in got), "the loss or a gradient is not 0"
    return "0 with gradients of 0"


def loss_replays(section: Section) -> str:
    """A captured loss of rows that the device chooses, and its gradients, follow labels that change in place."""
    device = section.device
    given = make_inputs(device, *((32, 32, 96) if device.dry else (4096, 768, 5003)))
    labels, eagerly = given[3], next(iter(contenders(device, section.loss_impl).values()))
    results = [tensor.clone() for tensor in forward_and_backward(eagerly, given)]

    def step() -> None:
        for result, new in zip(
            results, forward_and_backward(partial(by_rows, impl=section.loss_impl), given), strict=True
        ):
            result.copy_(new)

    replay = device.capture(step)
    counts = []
    for _ in range(3):
        labels.copy_(labels[torch.randperm(len(labels), device=labels.device)])
        labels[labels == labels.max()] = -100  # one or a few less each time
        for result in results:
            result.fill_(float("nan"))
        replay()
        for result, new in zip(results, forward_and_backward(eagerly, given), strict=True):
            error = relative_error(result, new)
            assert error <= torch.finfo(torch.bfloat16).eps, f"{counts}: error {error:.1e}"
        counts.append(int((labels != -100).sum()))
    return f"{counts} selected"


def make_models(device: torch.device, name: str) -> tuple[Any, Any, dict[str, Tensor]]:
    from fastmlm import sparsify
    from fastmlm.testing import make_batch, make_model

    dense, sparse = (make_model(name).float().to(device) for _ in range(2))
    batch = {key: value.to(device) for key, value in make_batch(name=name).items()}
    return dense, sparsify(sparse), batch


def same_training(device: torch.device, name: str) -> str:
    """In float32, loss and gradients of a tiny model are the same up to rounding."""
    from fastmlm.testing import compare_training

    dense, sparse, batch = make_models(device, name)
    loss, gradients = compare_training(sparse, dense, batch)
    assert max(loss, gradients) < 1e-4, f"errors {loss:.1e} of the loss, {gradients:.1e} of gradients"
    return f"errors {loss:.1e} of the loss, {gradients:.1e} of gradients"


def same_with_rows(device: torch.device) -> str:
    """With rows and count of `select_rows`, as many slots as there are positions, the loss is the same."""
    _, sparse, batch = make_models(device, "Bert")
    labels = batch["labels"]
    losses = []
    for extra in ({}, fastmlm.select_rows(labels, labels.numel())._asdict()):
        losses.append(sparse(**batch, **extra).loss.detach())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    return f"loss {float(losses[1]):.4f}"

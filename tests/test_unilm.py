"""UniLM: attention masks by loops, and by what a model's outputs change with; and what the hybrid objective shares."""

from typing import Any

import pytest
import torch
import transformers
from batches import many, originals
from no_sync import NoSync
from oracle import slow_draw, slow_fold, slow_row_key
from scipy import stats
from test_on_device import assert_same
from test_trainer import arguments
from torch import Tensor
from torch.utils.data import DataLoader

from fastmlm import DataCollatorForMaskedLM, MaskedLMTrainer, attention_masks, sparsify
from fastmlm.attention import MODES
from fastmlm.on_device import mask_batch
from fastmlm.strategies import Hybrid, NGrams, Prompts, UniLM
from fastmlm.testing import CLOSE, dense_loss, make_model

IMPL = None
FIRST = 5  # id of the first token that is not special
TWO32 = 1 << 32

models_take_masks = pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5, reason="models of transformers 4 do not take 4-D masks as they are"
)


def collator_of(tokenizer: Any, strategy: Any, epoch: int | None = 0, **kwargs: Any) -> DataCollatorForMaskedLM:
    settings = {"seed": 3, "mlm_probability": 0.4, "impl": IMPL, **kwargs}
    collator = DataCollatorForMaskedLM(tokenizer, strategy=strategy, **settings)
    if epoch is not None:
        collator.set_epoch(epoch)
    return collator


def only(mode: str, **kwargs: Any) -> UniLM:
    """All rows in one mode."""
    return UniLM(**{name: float(name == mode) for name in MODES}, **kwargs)


def pairs(tokenizer: Any, sentences: list[str], count: int = 8) -> list[dict[str, Any]]:
    """Two segments a row, of unequal length."""
    texts = zip(sentences[:count], sentences[count : 2 * count], strict=True)
    return [dict(tokenizer(a, b, truncation=True, max_length=12 + 5 * (i % 4))) for i, (a, b) in enumerate(texts)]


def sees_of(batch: Any) -> Tensor:
    """(B, T, T) bool, of the attention masks of a batch."""
    return batch["attention_mask"][:, 0] == 0


# ---- The masks, by their definition ----

REAL = {
    "one token": [1], "one of padding": [0], "full": [1] * 7, "right": [1, 1, 1, 1, 0, 0, 0], "nothing": [0] * 5,
    "left": [0, 0, 0, 1, 1, 1, 1], "holes": [0, 1, 1, 0, 1, 0, 1, 0], "no tokens": [],
}  # fmt: skip


def sees(mode: str, q: int, k: int, real: list[int], prefix: int) -> bool:
    if q == k or not (real[q] and real[k]):
        return q == k
    source = k - real.index(1) < prefix
    return {
        "bidirectional": True, "left_to_right": k < q, "right_to_left": k > q, "seq2seq": source or k < q,
    }[mode]  # fmt: skip


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("prefix", [0, 1, 3, 100])
def test_masks_by_their_definition(name, prefix) -> None:
    real, length = REAL[name], len(REAL[name])
    expected = torch.tensor(
        [[[sees(mode, q, k, real, prefix) for k in range(length)] for q in range(length)] for mode in MODES],
        dtype=torch.bool,
    ).reshape(4, 1, length, length)
    for kind in (torch.int64, torch.bool, torch.uint8):
        mask = torch.tensor([real] * 4, dtype=torch.uint8).to(kind)
        for whole in (torch.int64, torch.uint8):
            modes, prefixes = torch.arange(4, dtype=whole), torch.full((4,), prefix, dtype=torch.int32)
            assert torch.equal(attention_masks(modes, mask, prefixes), expected)
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            added = attention_masks(torch.arange(4), mask, prefixes, dtype=dtype)
            assert added.dtype == dtype
            assert bool((added[expected] == 0).all())
            assert bool((added[~expected] == torch.finfo(dtype).min).all())
    modes = torch.tensor([0, 2, 3])
    assert torch.equal(attention_masks(modes, mask[:3]), expected[modes])


def test_masks_without_a_wait() -> None:
    given = torch.empty(3, dtype=torch.uint8, device="meta"), torch.empty(3, 5, device="meta", dtype=torch.int64)
    with NoSync() as mode:
        for dtype in (torch.bool, torch.bfloat16):
            masks = attention_masks(*given, torch.empty(3, dtype=torch.int32, device="meta"), dtype=dtype)
            assert (masks.shape, masks.dtype) == ((3, 1, 5, 5), dtype)
    assert mode.operations > 10


# ---- What a model makes of them ----


def changes(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """[i, j]: whether output i of a row changes when its token j becomes another."""
    ids = inputs["input_ids"]
    length = ids.shape[1]
    other = ids.expand(length, -1).clone()
    other.diagonal().copy_(torch.where(other.diagonal() == 20, 21, 20))
    rows = {name: x.expand(length + 1, *x.shape[1:]) for name, x in inputs.items()}
    with torch.no_grad():
        out = model(**rows | {"input_ids": torch.cat([ids, other])}).logits
    assert not out.isnan().any()
    return ((out[1:] - out[:1]).abs().amax(2) > 1e-9).T


@models_take_masks
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["right", "left", "holes", "nothing"])
def test_outputs_change_with_what_is_seen(name, mode, attention) -> None:
    """With that, through two layers, and with nothing else: exactly what the definition says."""
    model, real = make_model(attn_implementation=attention), REAL[name]
    length = len(real)
    ids, mask = torch.arange(FIRST, FIRST + length)[None], torch.tensor([real])
    index = torch.tensor([MODES.index(mode)])
    for dtype in (torch.float64, torch.bool)[: 2 if attention == "sdpa" else 1]:
        four = attention_masks(index, mask, torch.tensor([2]), dtype=dtype)
        expected = torch.tensor([[sees(mode, i, j, real, 2) for j in range(length)] for i in range(length)])
        assert torch.equal(changes(model, {"input_ids": ids, "attention_mask": four}), expected)
        if mode == "bidirectional" and any(real):
            plain, out = model(ids, attention_mask=mask).logits, model(ids, attention_mask=four).logits
            torch.testing.assert_close(out[mask != 0], plain[mask != 0], **CLOSE)


@models_take_masks
@pytest.mark.parametrize("name", ["Roberta", "DistilBert", "ModernBert", "Electra", "Albert"])
def test_other_models(name) -> None:
    for attention in ("eager", "sdpa"):
        model, mask = make_model(name, attn_implementation=attention), torch.ones(1, 7, dtype=torch.int64)
        inputs = {"input_ids": torch.arange(FIRST, FIRST + 7)[None]}
        for mode in ("seq2seq", "right_to_left"):
            four = attention_masks(torch.tensor([MODES.index(mode)]), mask, torch.tensor([2]), dtype=torch.float64)
            expected = torch.tensor([[sees(mode, i, j, [1] * 7, 2) for j in range(7)] for i in range(7)])
            assert torch.equal(changes(model, inputs | {"attention_mask": four}), expected)


# ---- The collator ----


def mode_of(sees: Tensor) -> str:
    """The mode of a row of real tokens, of which the first two are the source."""
    first, last = bool(sees[0, -1]), bool(sees[-1, 0])
    if first != last:
        return "right_to_left" if first else "seq2seq" if bool(sees[0, 1]) else "left_to_right"
    return "bidirectional"


def test_shares_and_law(wordpiece) -> None:
    rows = [row | {"prefix_length": 2} for row in many(wordpiece, 3000, 5)]
    for shares in ((1 / 3, 1 / 3, 1 / 6, 1 / 6), (0.1, 0.2, 0.0, 0.7)):
        batch = collator_of(wordpiece, UniLM(*shares, prefix="prefix_length"))(rows)
        assert "prefix_length" not in batch
        assert not [name for name in batch if name.startswith("fastmlm")]
        modes = [mode_of(row) for row in sees_of(batch)]
        counts = [modes.count(mode) for mode in MODES]
        there = [i for i, share in enumerate(shares) if share]
        assert sum(counts[i] for i in there) == len(rows)
        expected = [shares[i] * len(rows) for i in there]
        assert stats.chisquare([counts[i] for i in there], expected).pvalue > 1e-3
        limits = [round(sum(shares[: m + 1]) * TWO32) for m in range(3)]
        for row, mode in list(zip(rows, modes, strict=True))[:50]:
            key = slow_row_key(list(enumerate(row["input_ids"].tolist())))
            draw = slow_draw(slow_fold(3, 0), key, 0, 7)
            assert mode == MODES[sum(draw >= limit for limit in limits)]


def by_row(batch: Any) -> list[Any]:
    """What each row's tokens are and see, and their labels, without padding."""
    found = []
    for ids, labels, seen in zip(batch["input_ids"], batch["labels"], sees_of(batch), strict=True):
        real = ids != 0
        found.append((ids[real].tolist(), labels[real].tolist(), seen[real][:, real].tolist()))
    return found


@pytest.mark.parametrize("strategy", [UniLM(), Hybrid(), (UniLM(), NGrams(whole_words=False), Prompts("prompt"))])
def test_masks_are_a_function_of_the_row(wordpiece, sentences, strategy) -> None:
    """Batches, workers, padding, the order of rows and the place where a pass starts change nothing."""
    rows = pairs(wordpiece, sentences)
    if isinstance(strategy, tuple):
        rows = [row | {"prompt": i} for i, row in enumerate(rows)]
    expected = by_row(collator_of(wordpiece, strategy)(rows))
    for size, side, multiple, workers in ((1, "left", 8, 0), (3, "right", None, 2), (5, "left", None, 0)):
        wordpiece.padding_side = side
        collator = collator_of(wordpiece, strategy, pad_to_multiple_of=multiple)
        loader = list(DataLoader(rows, size, collate_fn=collator, num_workers=workers))
        assert [row for batch in loader for row in by_row(batch)] == expected
        assert not multiple or all(batch["labels"].shape[1] % multiple == 0 for batch in loader)
    assert by_row(collator_of(wordpiece, strategy)(rows[5:])) == expected[5:]
    assert by_row(collator_of(wordpiece, strategy)(rows[::-1])) == expected[::-1]
    assert by_row(collator_of(wordpiece, strategy, epoch=1)(rows)) != expected
    evaluation = collator_of(wordpiece, strategy).for_evaluation()
    assert by_row(evaluation(rows)) == by_row(evaluation(rows))


def test_the_source_of_a_row(wordpiece, sentences) -> None:
    """By segments or by a column, all the same; a row of one segment is all source."""
    for side in ("right", "left"):
        wordpiece.padding_side = side
        rows = [*pairs(wordpiece, sentences), dict(wordpiece(sentences[0], truncation=True, max_length=9))]
        lengths = [row["token_type_ids"].index(1) if 1 in row["token_type_ids"] else 10**6 for row in rows]
        assert lengths[0] < len(rows[0]["input_ids"])
        batch = collator_of(wordpiece, only("seq2seq"))(rows)
        real = torch.stack([originals(batch)[i] != 0 for i in range(len(rows))])
        expected = attention_masks(torch.ones(len(rows), dtype=torch.int64), real, torch.tensor(lengths))
        assert torch.equal(sees_of(batch), expected[:, 0])
        assert "token_type_ids" in batch
        named = [row | {"prefix_length": n} for row, n in zip(rows, lengths, strict=True)]
        by_column = collator_of(wordpiece, only("seq2seq", prefix="prefix_length"))(named)
        assert_same(by_column, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_on_the_device(wordpiece, sentences, dtype) -> None:
    """No more than a few bytes a row are shipped, and the masks are the collator's."""
    strategy = UniLM(mask_dtype=dtype)
    for side in ("right", "left"):
        wordpiece.padding_side = side
        rows = pairs(wordpiece, sentences)
        ships = collator_of(wordpiece, strategy, mask_on_device=True)
        shipped = ships(rows)
        assert (shipped["fastmlm_modes"].dtype, shipped["fastmlm_prefix"].dtype) == (torch.uint8, torch.int32)
        assert all(column.dim() <= 2 for column in shipped.values())
        assert_same(mask_batch(shipped, ships), collator_of(wordpiece, strategy)(rows))
        assert_same(mask_batch(shipped, ships), collator_of(wordpiece, strategy)(rows))  # left as it was
    assert ships.spec.tables(torch.device("meta")) is not None  # of the first batch: copied to the device once
    with NoSync():
        there = {name: column.to("meta") for name, column in shipped.items()}
        assert mask_batch(there, ships)["attention_mask"].device.type == "meta"


# ---- Training ----


class Fixed(torch.utils.data.Dataset):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        return self.rows[i]


@models_take_masks
@pytest.mark.parametrize("cls", [transformers.Trainer, MaskedLMTrainer])
@pytest.mark.parametrize("strategy", [UniLM(), Hybrid()])
def test_training(wordpiece, sentences, tmp_path, strategy, cls) -> None:
    rows = Fixed(pairs(wordpiece, sentences, count=8))
    model = make_model(vocab_size=len(wordpiece), max_position_embeddings=64).float()
    settings = {"max_steps": 60, "learning_rate": 0.01, "logging_steps": 10, "per_device_train_batch_size": 8}
    trainer = cls(
        model, arguments(tmp_path, **settings), data_collator=collator_of(wordpiece, strategy, None),
        train_dataset=rows, eval_dataset=rows,
    )  # fmt: skip
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0]
    assert trainer.evaluate()["eval_loss"] < losses[0]


@models_take_masks
@pytest.mark.parametrize("strategy", [UniLM(mask_dtype=torch.float64), Hybrid(mask_dtype=torch.float64)])
def test_the_sparse_loss_is_the_dense_one(wordpiece, sentences, strategy) -> None:
    batch = dict(collator_of(wordpiece, strategy)(pairs(wordpiece, sentences)))
    dense, sparse = (make_model(vocab_size=len(wordpiece), max_position_embeddings=64) for _ in range(2))
    torch.testing.assert_close(sparsify(sparse)(**batch).loss, dense_loss(dense, batch), **CLOSE)


# ---- Bad input ----


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: UniLM(0.5, 0.5, 0.5, 0.5), ValueError, "bidirectional, seq2seq, .*: expected shares that sum to 1"),
        (lambda: UniLM(seq2seq=-1.0), ValueError, "seq2seq: expected a number between 0 and 1"),
        (lambda: UniLM(prefix=3), TypeError, "prefix: expected the name of a column, got 3"),
        (lambda: UniLM(mask_dtype=torch.int64), TypeError, "mask_dtype: expected torch.bool or a floating-point dtype"),
        (lambda: Hybrid(1.5), ValueError, "autoregressive: expected a number between 0 and 1"),
        (lambda: Hybrid(position_ids_start=-1), ValueError, "position_ids_start: expected an int in"),
        (lambda: Hybrid(mask_dtype="float"), TypeError, "mask_dtype: expected torch.bool or a floating-point dtype"),
    ],
)
def test_bad_strategies(make, error, message) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("strategy", "kwargs", "message"),
    [
        (UniLM(), {"packing": True}, r"packing: expected False with UniLM\(.*attention masks are \(B, 1, S, S\)"),
        (Hybrid(), {"packing": True}, r"packing: expected False with Hybrid\("),
        (Hybrid(), {"mask_on_device": True}, r"mask_on_device: expected False with Hybrid\(.*masks say how long"),
        (UniLM(), {"return_tensors": "np"}, r"return_tensors: expected 'pt' with UniLM\(.*got 'np'"),
        ((UniLM(), Hybrid()), {}, "strategy: expected one that arranges tokens or rows, got UniLM.* and Hybrid"),
        (Hybrid(), {"rng": "torch", "impl": None}, "strategy: expected None with rng='torch'"),
    ],
)
def test_bad_combinations(wordpiece, strategy, kwargs, message) -> None:
    with pytest.raises(ValueError, match=message):
        collator_of(wordpiece, strategy, None, **kwargs)


def test_bad_columns(wordpiece) -> None:
    rows = [{"input_ids": [10, 11]}] * 2
    with pytest.raises(ValueError, match=r"features: expected a column 'token_type_ids' of numbers for UniLM"):
        collator_of(wordpiece, UniLM())(rows)
    assert collator_of(wordpiece, UniLM(0.5, 0.0, 0.5, 0.0))(rows)["attention_mask"].shape == (2, 1, 2, 2)
    for value, message in ((0.5, "expected one int a row .* got torch.float"), (-1, "expected ints from 0 on"),
                           ([1, 1], r"expected one int a row .* of shape \(2, 2\)")):  # fmt: skip
        with pytest.raises(ValueError, match=f"features: {message}"):
            collator_of(wordpiece, UniLM(prefix="n"))([row | {"n": value} for row in rows])
    with pytest.raises(ValueError, match="return_tensors: expected 'pt'"):
        collator_of(wordpiece, Hybrid())(rows, return_tensors="np")


@pytest.mark.parametrize(
    ("modes", "mask", "prefix", "message"),
    [
        ([0], [[1, 1]] * 2, None, r"modes: expected 2 integers on cpu, one for each row .* got .*\(1,\)"),
        ([0.5, 1.0], [[1, 1]] * 2, None, "modes: expected 2 integers"),
        ([0, 4], [[1, 1]] * 2, None, r"modes: expected integers from 0 to 3, got \[0, 4\]"),
        ([0, 1], [[1, 1]] * 2, None, "prefix_lengths: expected one for each row, since some are in mode 1, got None"),
        ([0, 1], [[1, 1]] * 2, [1, -1], "prefix_lengths: expected integers from 0 on"),
        ([0, 1], [[1, 1]] * 2, [1], "prefix_lengths: expected 2 integers"),
        ([0, 1], [1, 1], None, r"attention_mask: expected \(B, S\) integers or bool"),
        ([0], [[1.0]], None, r"attention_mask: expected \(B, S\) integers or bool, got torch.float"),
    ],
)
def test_bad_masks(modes, mask, prefix, message) -> None:
    with pytest.raises(ValueError, match=message):
        attention_masks(torch.tensor(modes), torch.tensor(mask), None if prefix is None else torch.tensor(prefix))

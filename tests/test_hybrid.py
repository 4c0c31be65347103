"""The hybrid objective: what is appended and who sees it, by the definition, and what a model's outputs change with."""

from typing import Any

import pytest
import torch
from batches import many
from oracle import slow_draw, slow_fold, slow_row_key
from scipy import stats
from test_unilm import TWO32, changes, collator_of, models_take_masks, pairs, sees_of

from fastmlm.strategies import Hybrid, MaskedDiffusion
from fastmlm.testing import CLOSE, make_model

MASK = 4  # id of the mask token


def described(ids: list[int], masked: list[int], late: list[bool]) -> tuple[list[Any], list[Any]]:
    """The tokens of a row as the definition has them, (kind, position, id, label); and what each of them sees."""
    selected = [s for s in range(len(ids)) if masked[s] == MASK]
    tokens = [("main", s, masked[s], ids[s] if s in selected and not late[s] else -100) for s in range(len(ids))]
    tokens += [("given", s, ids[s], -100) for s in selected]
    tokens += [("asked", s, MASK, ids[s]) for s in selected if late[s]]

    def sees(kind: str, s: int, other: str, k: int) -> bool:
        if other == "main" or (kind, s) == (other, k):
            return other == "main" or kind == other
        if kind == "main" or other == "asked":
            return False
        return not late[k] or (late[s] and (k < s or (k == s and kind == "given")))

    return tokens, [[sees(kind, s, other, k) for other, k, *_ in tokens] for kind, s, *_ in tokens]


@pytest.mark.parametrize("share", [0.5, 0.0, 1.0])
@pytest.mark.parametrize("side", ["right", "left"])
def test_hybrid_by_its_definition(wordpiece, sentences, side, share) -> None:
    wordpiece.padding_side = side
    rows = pairs(wordpiece, sentences)
    batch = collator_of(wordpiece, Hybrid(share))(rows)
    width = max(len(row["input_ids"]) for row in rows)
    plain = collator_of(wordpiece, None, mask_replace_prob=1.0, random_replace_prob=0.0)(rows)
    assert torch.equal(batch["input_ids"][:, :width], plain["input_ids"])
    assert (batch["labels"] != -100).sum() == (plain["labels"] != -100).sum() > 20  # one label a selected token
    for i, row in enumerate(rows):
        ids, length = row["input_ids"], len(row["input_ids"])
        key = slow_row_key(list(enumerate(ids)))
        late = [slow_draw(slow_fold(3, 0), key, s, 8) < round(share * TWO32) for s in range(length)]
        main = slice(width - length, width) if side == "left" else slice(0, length)
        tokens, expected = described(ids, plain["input_ids"][i, main].tolist(), late)
        at = [*range(width)[main], *range(width, width + len(tokens) - length)]
        assert batch["input_ids"][i, at].tolist() == [token for _, _, token, _ in tokens]
        assert batch["labels"][i, at].tolist() == [label for *_, label in tokens]
        assert batch["position_ids"][i, at].tolist() == [s for _, s, *_ in tokens]
        assert batch["token_type_ids"][i, at].tolist() == [row["token_type_ids"][s] for _, s, *_ in tokens]
        seen = sees_of(batch)[i]
        assert seen[at][:, at].tolist() == expected
        outside = [t for t in range(len(seen)) if t not in at]
        assert torch.equal(seen[outside], torch.eye(len(seen), dtype=torch.bool)[outside])
        assert not seen[at][:, outside].any()
        assert set(batch["labels"][i, outside].tolist()) <= {-100}


@models_take_masks
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_hybrid_outputs(wordpiece, sentences, attention) -> None:
    """No output depends on its own token or a later one, and the masked row's on nothing that is appended."""
    rows = pairs(wordpiece, sentences, count=4)
    batch = collator_of(wordpiece, Hybrid(mask_dtype=torch.float64))(rows)
    model = make_model(attn_implementation=attention, vocab_size=len(wordpiece), max_position_embeddings=64)
    labels = batch.pop("labels")
    for i in range(len(rows)):
        inputs = {name: column[i : i + 1] for name, column in batch.items()}
        assert torch.equal(changes(model, inputs), sees_of(inputs)[0])  # which is the definition's, and transitive
    width = max(len(row["input_ids"]) for row in rows)
    mask = (torch.arange(width) < torch.tensor([[len(row["input_ids"])] for row in rows])).long()
    ids, types = batch["input_ids"][:, :width], batch["token_type_ids"][:, :width]
    alone = model(ids, token_type_ids=types, attention_mask=mask).logits
    torch.testing.assert_close(model(**batch).logits[:, :width][mask != 0], alone[mask != 0], **CLOSE)
    assert (labels[:, width:] != -100).any()


def test_hybrid_shares_and_weights(wordpiece) -> None:
    rows = many(wordpiece, 40, 200)
    batch = collator_of(wordpiece, (Hybrid(0.25, position_ids_start=2), MaskedDiffusion()))(rows)
    labels = batch["labels"] != -100
    late, count = int(labels[:, 200:].sum()), int(labels.sum())
    assert stats.binomtest(late, count, 0.25).pvalue > 1e-3
    assert batch["position_ids"][0, :200].tolist() == list(range(2, 202))
    weights, appended = batch["loss_weights"], labels[:, 200:]
    assert torch.equal(weights[:, 200:][appended], weights[:, :1].expand(-1, appended.shape[1])[appended])

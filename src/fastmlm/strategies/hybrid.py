"""The hybrid objective: some selected tokens predicted in parallel, the others one by one, given those before them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmlm.attention import check_dtype, stepwise_masks
from fastmlm.philox import HALVES, as_int64, draw_rows, first_real
from fastmlm.spec import integer, probability, threshold
from fastmlm.strategies.base import Batch, Strategy

_LATE = "fastmlm_late"
_CARRIED = ("token_type_ids", "loss_weights", "position_ids")  # an appended token has them of the one it stands for


@dataclass(frozen=True)
class Hybrid(Strategy):
    """``-log P(parallel | context) - log P(a_1 | context, parallel) - log P(a_2 | context, parallel, a_1) - ...``

    Of a row's selected tokens, half are parallel ones, which BERT's way predicts from the tokens that are not selected
    (the context); the others, a_1, a_2, ... from left to right, are each predicted given the context, all parallel ones
    and the a's before it. The sum is that of one factorisation of P(selected | context), so every selected token has
    one label, and all are replaced by the mask token.

    An encoder that predicts tokens where they stand cannot hide a token from itself and show it to others, so the
    batch becomes (B, S + E) with E more columns, of tokens that share the positions of those they stand for:

    - The first S are the masked row as ever, with the labels of parallel tokens alone. They see one another and nothing
      that is appended: what the model makes of them is what it makes without.
    - Then, of each selected token, its original. Those of parallel tokens see the first S and one another; that of a_i
      sees the first S, those of parallel tokens, and those of a_1 ... a_i.
    - Then a mask token for each a_i (a pseudo-mask), with its label, which sees the first S, the originals of parallel
      tokens, those of a_1 ... a_(i-1), and itself. No other token sees it.

    So ``attention_mask`` is (B, 1, S + E, S + E), and there are ``position_ids``; E is 1.5 times the number of selected
    tokens, as a rule, 1.5 · 0.15 · S. Models as for :class:`fastmlm.strategies.UniLM`, which take ``position_ids``
    (DistilBERT does not). ``packing=True`` is refused, and so is ``mask_on_device=True``, since E depends on the masks.

    Args:
        autoregressive: the share of the selected tokens that are predicted one by one.
        position_ids_start: the first position of each row, where rows bring no ``position_ids``. RoBERTa and its like
            number from ``padding_idx + 1``: give them 2.
        mask_dtype: as in :class:`fastmlm.strategies.UniLM`.

    Law: a selected token s is among the a's if ``draw_8(s) < T(autoregressive)``, each token by itself, of words and
    spans too. Positions are s, plus position_ids_start.

    Source: Bao et al., "UniLMv2: Pseudo-masked language models" (2020), "Partially autoregressive modeling" and
    "Pseudo-masked LM": the model, its pseudo-masks and who sees whom; the factorisation has parallel tokens in its
    first step and one token in each later one. (There all tokens are predicted both ways, in spans and in any order.)
    """

    autoregressive: float = 0.5
    position_ids_start: int = 0
    mask_dtype: torch.dtype = torch.float32

    appends = True

    def __post_init__(self) -> None:
        probability("autoregressive", self.autoregressive)
        integer("position_ids_start", self.position_ids_start, 0, 1 << 31)
        check_dtype("mask_dtype", self.mask_dtype)

    def replaces(self) -> dict[str, float]:
        return {"mask_replace_prob": 1.0, "random_replace_prob": 0.0}

    def prepares(self, batch: Batch) -> dict[str, Tensor]:
        key = torch.full((1,), as_int64(batch.key), device=batch.row_keys.device)
        draws = draw_rows(key, batch.row_keys, batch.input_ids.shape[1], (HALVES,))[0]
        positions = batch.positions().clamp(min=0).expand(draws.shape)
        return {_LATE: (draws < threshold(self.autoregressive)).gather(1, positions)}

    def arranges(
        self, batch: dict[str, Any], attention_mask: Tensor, tokenizer: Any, multiple: int | None
    ) -> dict[str, Any]:
        ids, labels, late = batch["input_ids"], batch["labels"], batch.pop(_LATE)
        selected = labels != -100
        late = late & selected
        source, query, used = _appended(selected, late, multiple)
        original = labels.gather(1, source)
        if "position_ids" not in batch:
            columns = torch.arange(ids.shape[1], device=ids.device) - first_real(attention_mask)[:, None]
            batch["position_ids"] = columns.clamp(min=0) + self.position_ids_start
        batch |= {
            name: torch.cat([x, x.gather(1, source)], 1) for name in _CARRIED if (x := batch.get(name)) is not None
        }
        filled = torch.where(used, torch.where(query, tokenizer.mask_token_id, original), tokenizer.pad_token_id or 0)
        steps = torch.where(late.gather(1, source), source + 2, 1)
        nothing = torch.zeros_like(ids)
        return batch | {
            "input_ids": torch.cat([ids, filled], 1),
            "labels": torch.cat([labels.masked_fill(late, -100), original.masked_fill(~query, -100)], 1),
            "attention_mask": stepwise_masks(
                torch.cat([nothing, steps], 1),
                torch.cat([nothing.bool(), used & ~query], 1),
                torch.cat([attention_mask != 0, used], 1),
                dtype=self.mask_dtype,
            ),
        }


def _appended(selected: Tensor, late: Tensor, multiple: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """The E columns to append: which column each stands for, whether it is a query, and whether it is any, (B, E).

    Args:
        selected: (B, S) bool, each of which has an original.
        late: (B, S) bool, each of which has a query.
        multiple: of which S + E is to be one.
    """
    length = selected.shape[1]
    wanted = torch.cat([selected, late], 1)
    most = int(wanted.sum(1).max())
    missing = 0 if multiple is None else -(length + most) % multiple
    wanted = F.pad(wanted, (0, missing)).to(torch.uint8)
    used, place = (x[:, : most + missing] for x in wanted.sort(dim=1, descending=True, stable=True))
    used = used != 0
    return place % max(length, 1), used & (place >= length), used

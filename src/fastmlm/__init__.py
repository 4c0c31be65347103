"""Masked language modelling made cheap, exact and reproducible: masking, a sparse head and a drop-in collator.

``import fastmlm`` needs torch alone and is quick. What loads more is fetched when it is first asked for: the collator
and the trainer need transformers, the sparse head the compiler of torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fastmlm.attention import attention_masks as attention_masks
from fastmlm.dispatch import available_impls as available_impls
from fastmlm.loss import linear_cross_entropy as linear_cross_entropy, masked_accuracy as masked_accuracy
from fastmlm.masked_lm_head import MaskedLMHead as MaskedLMHead
from fastmlm.masking import MaskedTokens as MaskedTokens, advance_seed as advance_seed, mask_tokens as mask_tokens
from fastmlm.metrics import MaskedAccuracy as MaskedAccuracy
from fastmlm.sampling import (
    ReplacedTokens as ReplacedTokens,
    replace_tokens as replace_tokens,
    sample_tokens as sample_tokens,
)
from fastmlm.selection import (
    Overflow as Overflow,
    SelectedRows as SelectedRows,
    row_capacity as row_capacity,
    select_rows as select_rows,
)
from fastmlm.selection_spec import Selection as Selection
from fastmlm.spec import MaskingSpec as MaskingSpec
from fastmlm.unmasking import unmask as unmask

if TYPE_CHECKING:
    from fastmlm.collator import DataCollatorForMaskedLM as DataCollatorForMaskedLM
    from fastmlm.electra import ReplacedTokenDetection as ReplacedTokenDetection
    from fastmlm.head import densify as densify, sparsify as sparsify
    from fastmlm.on_device import mask_batches as mask_batches
    from fastmlm.permutation import DataCollatorForPermutationLM as DataCollatorForPermutationLM
    from fastmlm.trainer import MaskedLMTrainer as MaskedLMTrainer, MaskOnDevice as MaskOnDevice

__all__ = [
    "DataCollatorForMaskedLM",
    "DataCollatorForPermutationLM",
    "MaskOnDevice",
    "MaskedAccuracy",
    "MaskedLMHead",
    "MaskedLMTrainer",
    "MaskedTokens",
    "MaskingSpec",
    "Overflow",
    "ReplacedTokenDetection",
    "ReplacedTokens",
    "SelectedRows",
    "Selection",
    "advance_seed",
    "attention_masks",
    "available_impls",
    "densify",
    "linear_cross_entropy",
    "mask_batches",
    "mask_tokens",
    "masked_accuracy",
    "replace_tokens",
    "row_capacity",
    "sample_tokens",
    "select_rows",
    "sparsify",
    "unmask",
]
__version__ = "0.1.0"

_LAZY = {
    "DataCollatorForMaskedLM": "fastmlm.collator",
    "DataCollatorForPermutationLM": "fastmlm.permutation",
    "MaskedLMTrainer": "fastmlm.trainer",
    "MaskOnDevice": "fastmlm.trainer",
    "ReplacedTokenDetection": "fastmlm.electra",
    "densify": "fastmlm.head",
    "mask_batches": "fastmlm.on_device",
    "sparsify": "fastmlm.head",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])

"""Ways of selecting beyond single tokens, for ``DataCollatorForMaskedLM(tokenizer, strategy=...)``: one, or several."""

from fastmlm.strategies.base import Strategy as Strategy
from fastmlm.strategies.counts import Counts as Counts
from fastmlm.strategies.diffusion import MaskedDiffusion as MaskedDiffusion
from fastmlm.strategies.hybrid import Hybrid as Hybrid
from fastmlm.strategies.rates import (
    Prompts as Prompts,
    RandomRates as RandomRates,
    RateColumn as RateColumn,
    RatesByLength as RatesByLength,
    TokenWeights as TokenWeights,
    WeightColumn as WeightColumn,
    inverse_frequency as inverse_frequency,
)
from fastmlm.strategies.segmentation import reference_words as reference_words, segmented_words as segmented_words
from fastmlm.strategies.spans import NGrams as NGrams, Spans as Spans
from fastmlm.strategies.unilm import UniLM as UniLM
from fastmlm.strategies.words import WholeWords as WholeWords

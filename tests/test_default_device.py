"""A default device that is not the CPU changes nothing: collating stays on the CPU."""

import subprocess
import sys

CODE = """
import torch, fastmlm
from fastmlm import strategies
from fastmlm.masking import row_keys
from fastmlm.testing import make_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

vocabulary = {token: i for i, token in enumerate(["[PAD]", "[MASK]", "a", "b", "##c", "d"])}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordPiece(vocabulary, unk_token="a")), mask_token="[MASK]", pad_token="[PAD]"
)
rows = [{"input_ids": [2, 3, 4, 5]}, {"input_ids": [3, 4]}]
ways = (
    strategies.WholeWords(), strategies.Spans(), strategies.NGrams(), strategies.Counts(exactly=2),
    strategies.RandomRates(), strategies.RatesByLength(lambda lengths: lengths / 9), strategies.RateColumn("rate"),
    strategies.TokenWeights(torch.ones(6)), strategies.inverse_frequency(torch.ones(6)), strategies.Prompts(),
    strategies.MaskedDiffusion(), strategies.MaskedDiffusion("cosine", "stratified"),
    strategies.UniLM(prefix="prompt_length"), strategies.Hybrid(),
)

def batches():
    for impl in ("cpp", "reference"):
        for kwargs in ({}, {"whole_word_mask": True}, {"packing": True}, {"random_words": [2, 3]}):
            if impl not in fastmlm.available_impls():
                continue
            collator = fastmlm.DataCollatorForMaskedLM(tokenizer, seed=1, mlm_probability=0.5, impl=impl, **kwargs)
            collator.set_epoch(3)
            yield dict(collator(rows))
        for strategy in ways:
            collator = fastmlm.DataCollatorForMaskedLM(
                tokenizer, seed=1, mlm_probability=0.5, impl=impl, strategy=strategy
            )
            collator.set_epoch(3)
            yield dict(collator([row | {"rate": 0.5, "prompt_length": 1} for row in rows]))
        collator = fastmlm.DataCollatorForPermutationLM(tokenizer, seed=1, impl=impl)
        collator.set_epoch(3)
        yield dict(collator(rows))
    yield dict(fastmlm.DataCollatorForMaskedLM(tokenizer, seed=1, rng="torch")(rows))
    yield {"keys": row_keys(torch.tensor([[7, 8]], device="cpu"))}

expected = list(batches())
torch.set_default_device("meta")
for got, want in zip(batches(), expected, strict=True):
    assert got.keys() == want.keys()
    for name, value in got.items():
        assert not torch.is_tensor(value) or value.device.type == "cpu", name
        assert torch.equal(value, want[name]) if torch.is_tensor(value) else value == want[name], name
print("same")
"""


def test_default_device() -> None:
    """In a process of its own, since a wrong one reads memory that is not there."""
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.split()) == (0, ["same"]), run.stderr

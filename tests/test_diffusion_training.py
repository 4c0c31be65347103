"""Masked diffusion from text to text: rows, `MaskedLMTrainer`, and what `unmask` writes with the trained model."""

import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast, TrainingArguments, set_seed

from fastmlm import DataCollatorForMaskedLM, MaskedLMTrainer, unmask
from fastmlm.strategies import MaskedDiffusion, Prompts

LENGTH = 12
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
NAMES = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIALS, strict=True))


def alphabet(start: int) -> str:
    """Letters in a row, from one of them on: ``"y z a b c"``."""
    return " ".join(string.ascii_lowercase[(start + i) % 26] for i in range(LENGTH))


def test_text_is_learned_and_written(tmp_path: Path) -> None:
    """The prompt is one letter, which training never masks; all that follows is written, in four passes."""
    letters = {token: i for i, token in enumerate([*SPECIALS, *string.ascii_lowercase])}
    core = Tokenizer(models.WordLevel(letters, "[UNK]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **NAMES)
    rows = [tokenizer(alphabet(start)) | {"prompt_length": 1} for start in range(26)]
    set_seed(0)
    config = BertConfig(
        vocab_size=len(letters), hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
        initializer_range=0.07, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=16,
    )  # fmt: skip
    collator = DataCollatorForMaskedLM(tokenizer, seed=1, strategy=(MaskedDiffusion(times="stratified"), Prompts()))
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=600, per_device_train_batch_size=26, learning_rate=5e-3, warmup_steps=10,
        use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
        remove_unused_columns=False,
    )  # fmt: skip
    trainer = MaskedLMTrainer(BertForMaskedLM(config), arguments, collator, rows, eval_dataset=rows)
    bound = trainer.evaluate()["eval_loss"]
    trainer.train()
    # Of a token, given the first letter of its row: nothing is left to learn, so that the bound comes down to zero.
    assert bound > 2.5
    assert trainer.evaluate()["eval_loss"] < 0.2
    prompt = torch.tensor([row["input_ids"] for row in rows])
    prompt[:, 1:] = tokenizer.mask_token_id
    forbidden = range(len(SPECIALS))
    written = unmask(trainer.model, prompt, mask_token_id=tokenizer.mask_token_id, steps=4, forbidden_ids=forbidden)
    right = [text == alphabet(start) for start, text in enumerate(tokenizer.batch_decode(written))]
    assert sum(right) >= 24, tokenizer.batch_decode(written)

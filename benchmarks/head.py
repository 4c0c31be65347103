"""What the sparse head takes and does: the classes it serves, and accumulation of gradients.

Writes ``results/support.md`` and ``results/accumulation.md``, which the README quotes.
"""

import copy
import tempfile
from typing import Any

import transformers
from report import quote
from torch import Tensor
from torch.utils.data import Dataset

from fastmlm import sparsify
from fastmlm.testing import MASKED_LM_CLASSES, compare_training, make_batch, make_model

COUNTS = (5, 0, 1, 3)  # selected tokens in the four rows of a step


def support(name: str) -> str:
    """A row of the table: the errors against the dense model, or why there is no sparse head."""
    dense = make_model(name)
    try:
        sparse: Any = sparsify(copy.deepcopy(dense))
    except (TypeError, ValueError) as error:
        return f"| `{name}` | no: {str(error).partition(': ')[2]} | | |"
    loss_error, gradient_error = compare_training(sparse, dense, make_batch(name=name))
    dtype = str(next(dense.parameters()).dtype).removeprefix("torch.")
    logits = "without logits" if sparse._fastmlm_sparse.fused else "logits of selected rows"
    return f"| `{name}` | yes, {logits} | {dtype} | {loss_error:.0e}, {gradient_error:.0e} |"


class Rows(Dataset):
    def __init__(self) -> None:
        self.batch = make_batch(counts=COUNTS)

    def __len__(self) -> int:
        return len(COUNTS)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {name: column[i] for name, column in self.batch.items()}


def one_step(model: Any, steps: int) -> tuple[float, float]:
    """The loss and the norm of the gradients that the Trainer logs for one optimizer step over the four rows."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, max_steps=1,
            logging_steps=1, learning_rate=0.0, max_grad_norm=1e9, per_device_train_batch_size=len(COUNTS) // steps,
            gradient_accumulation_steps=steps, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=Rows())
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return trainer.state.log_history[0]["loss"], trainer.state.log_history[0]["grad_norm"]


def accumulation() -> str:
    lines = [
        "| model | accumulation steps | dense: loss | gradient norm | sparse: loss | gradient norm |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in ("Bert", "Roberta", "Esm", "ModernBert"):
        for steps in (1, 2, 4):
            dense, sparse = one_step(make_model(name), steps), one_step(sparsify(make_model(name)), steps)
            lines.append(f"| {name} | {steps} | {dense[0]:.3f} | {dense[1]:.3f} | {sparse[0]:.3f} | {sparse[1]:.3f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    rows = [support(name) for name in MASKED_LM_CLASSES]
    yes = sum("| yes" in row for row in rows)
    table = ["| class | sparse head | in | error of loss, of gradients |", "|---|---|---|---|", *rows]
    quote(
        "support",
        f"transformers {transformers.__version__} lists {len(rows)} classes for masked language modelling; {yes} take "
        "the sparse head. The errors are relative, against the dense model with every parameter perturbed.\n\n"
        "<details><summary>All classes</summary>\n\n" + "\n".join(table) + "\n\n</details>\n",
    )
    quote("accumulation", accumulation())


if __name__ == "__main__":
    main()

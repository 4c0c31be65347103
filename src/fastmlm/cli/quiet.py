"""What transformers and datasets print on their own would bury the command's output."""

import datasets
import transformers


def quiet() -> None:
    """Only their errors are shown, and no progress bars but ours."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()

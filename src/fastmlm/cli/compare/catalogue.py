"""The objectives by name, and what each is; nothing heavy is imported here, for ``--help`` prints it."""

from fastmlm.cli.errors import CliError

# Of a name with a rate behind it, mlm-40 say, that many percent of the tokens are selected; else --mlm-probability.
OBJECTIVES = {
    "mlm": "single tokens, masked anew in each epoch (RoBERTa)",
    "static": "single tokens, masked once for all epochs (BERT)",
    "static10": "single tokens, masked in ten ways that take turns (RoBERTa's duplicated data)",
    "decay": "single tokens, from twice the rate down to half of it, by a cosine",
    "words": "whole words (BERT-wwm)",
    "spans": "spans of geometric lengths (SpanBERT)",
    "ngrams": "one to four whole words (MacBERT)",
    "exact": "the same number of tokens in equally long rows (BERT's code)",
    "rare": "rare tokens more often (XLM)",
    "rates": "a rate for each row, uniform from none to all (PMLM)",
    "diffusion": "the same, all masked and weighted by 1 / rate (MDLM, LLaDA)",
    "unilm": "single tokens, a third of the rows each with full, prefix and one-sided attention (UniLM)",
    "hybrid": "single tokens, half in parallel and half one by one (UniLMv2)",
    "electra": "replaced-token detection beside a generator of half the width (ELECTRA)",
    "xlnet": "permutation language modelling, a sixth of the tokens (XLNet)",
}
WITHOUT_RATE = {"rates", "diffusion", "xlnet"}
DEFAULT = ("mlm-15", "mlm-20", "mlm-30", "mlm-40", "static", "words", "spans", "diffusion", "electra")


def catalogue() -> str:
    """The table that ``--help`` ends with."""
    lines = [f"  {name:<10} {text}" for name, text in OBJECTIVES.items()]
    return "\n".join(["objectives, with the percentage of tokens selected behind it where wished (mlm-40):", *lines])


def parse_objective(text: str) -> tuple[str, float | None]:
    """``"mlm-40"`` → ``("mlm", 0.4)``; the rate is None where none was given."""
    name, dash, percent = text.partition("-")
    if name not in OBJECTIVES:
        raise CliError(f"argument OBJECTIVE: expected one of {', '.join(OBJECTIVES)}, got {text!r}")
    if not dash:
        return name, None
    if name in WITHOUT_RATE:
        raise CliError(f"argument OBJECTIVE: expected {name}, whose rate is its own, without one, got {text!r}")
    try:
        rate = float(percent) / 100
    except ValueError:
        rate = 0.0
    if not 0 < rate <= 1:
        raise CliError(f"argument OBJECTIVE: expected a percentage above 0 and up to 100 behind {name}, got {text!r}")
    return name, rate

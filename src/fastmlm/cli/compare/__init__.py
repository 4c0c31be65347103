"""``fastmlm compare``: one model for each objective and seed, trained on the same text and measured the same way."""

"""Ways of selecting beyond single tokens."""

"""What `benchmarks/gpu.py` runs: its sections, and what they measure and write with."""

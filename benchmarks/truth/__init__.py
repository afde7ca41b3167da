"""Probes of the chip whose records the emulator is compared with; `benchmarks/hardware_truth.py` runs them."""

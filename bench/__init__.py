"""Benchmarks: every figure the documentation states, each beside its peer's figure from the same run.

Run one with `python -m bench.log`; the results stand in `bench/results`.
"""

"""Benchmarks. `python -m bench.engine` puts our engine beside its peers on this machine."""

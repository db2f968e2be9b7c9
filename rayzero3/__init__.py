"""rayzero3: a multi-node trainer for large language models, ZeRO-3 on Ray."""

__version__ = "0.1.0"

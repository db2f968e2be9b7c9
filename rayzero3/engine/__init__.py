"""The ZeRO-3 engine. Needs torch alone: no Ray, no job file, no model."""

from rayzero3.engine.adam import Zero3Adam
from rayzero3.engine.layer import Zero3Layer
from rayzero3.engine.sequential import Zero3Sequential

__all__ = ["Zero3Adam", "Zero3Layer", "Zero3Sequential"]

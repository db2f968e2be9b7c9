"""The ZeRO-3 engine. Needs torch alone: no Ray, no job file, no model."""

from rayzero3.engine.adam import Zero3Adam
from rayzero3.engine.build import generator_for
from rayzero3.engine.gathered import gathered
from rayzero3.engine.layer import Zero3Layer
from rayzero3.engine.memory import Memory, predict
from rayzero3.engine.mesh import hybrid_mesh
from rayzero3.engine.scaler import LossScaler
from rayzero3.engine.sequential import Zero3Model, Zero3Sequential
from rayzero3.engine.shard import shard_model

__all__ = [
    "LossScaler",
    "Memory",
    "Zero3Adam",
    "Zero3Layer",
    "Zero3Model",
    "Zero3Sequential",
    "gathered",
    "generator_for",
    "hybrid_mesh",
    "predict",
    "shard_model",
]

"""The tensors of ExpertWeights that plans over torch watch, in the order of torch_op::Role."""

from __future__ import annotations

import dataclasses
from typing import Any

from .config import ExpertWeights, WeightTensor

# Field of ExpertWeights, and of its scales.
ROLES = (("w13", ""), ("w13_up", ""), ("w2", ""), ("w13_bias", ""), ("w2_bias", ""),
         *[(name, f"scales.{part}") for name in ("w13", "w13_up", "w2")
           for part in ("data", "zero_points", "global_scales")])


def part_of(weights: ExpertWeights, role: int) -> Any:
    """The array of that role, or None."""
    name, part = ROLES[role]
    value = getattr(weights, name)
    if not part:
        return value.data if isinstance(value, WeightTensor) else value
    if not isinstance(value, WeightTensor) or value.scales is None:
        return None
    return getattr(value.scales, part.removeprefix("scales."))


def with_part(weights: ExpertWeights, role: int, array: Any) -> ExpertWeights:
    """The same weights with another array in that role, which has one already."""
    name, part = ROLES[role]
    value = getattr(weights, name)
    if part:
        scales = dataclasses.replace(value.scales, **{part.removeprefix("scales."): array})
        value = dataclasses.replace(value, scales=scales)
    elif isinstance(value, WeightTensor):
        value = dataclasses.replace(value, data=array)
    else:
        value = array
    return dataclasses.replace(weights, **{name: value})

"""Plans of fusedmoe.torch over a test's layer."""

from __future__ import annotations

import torch
from support import Layer

from fusedmoe import PlanOptions
from fusedmoe.torch import FusedMoe


def plan_of(layer: Layer, watch: bool = True, weights=None, **options) -> FusedMoe:
    return FusedMoe.create(layer.config, weights or layer.weights, PlanOptions(**options),
                           watch=watch)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)

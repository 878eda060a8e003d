"""The operators of fusedmoe.torch in Python, for installations without libfusedmoe_torch.so.

The same schemas and the same behaviour as python/src/torch_op; calls cost some microseconds more
and run on the library's own threads.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from . import _core
from ._fork import ForkLock
from ._roles import ROLES, with_part
from .errors import InvalidArgument, StaleWeights

_REFRESH, _RELEASE = 1, 2
_SHARED = "Tensor(a!) output, Tensor hidden, Tensor topk_weights, Tensor topk_ids, "

_library = torch.library.Library("fusedmoe", "DEF")
_library.define(f"apply({_SHARED}Tensor(b!)? workspace, int plan) -> ()")
_library.define(f"apply_weights({_SHARED}Tensor(b!)? workspace, Tensor[] weights, int plan) -> ()")
_library.define(f"apply_lent({_SHARED}Tensor(b!)? workspace13, Tensor(c!)? workspace2, "
                "Tensor? expert_map, int plan) -> ()")


def _fingerprint(tensor: torch.Tensor, contents: bool) -> tuple[Any, ...]:
    version = tensor._version if contents and not tensor.is_inference() else None
    return (tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.data_ptr(), version)


class _Record:
    def __init__(self, plan: _core.FusedMoe, refresh: bool, contents: bool) -> None:
        self.plan, self.refreshes, self.contents = plan, refresh, contents
        self.lock, self.turn = ForkLock(), ForkLock()
        self.weights: Any = None
        # One object, so that readers need no lock: tensors, roles, prints, what is only held.
        self.seen: tuple[list[torch.Tensor], list[int], list[tuple[Any, ...]], list[Any]] = (
            [], [], [], [])
        self.memory: list[torch.Tensor] = []

    def watch(self, weights: Any, tensors: list[torch.Tensor], roles: list[int],
              before: int) -> None:
        with self.lock:
            watched = [t for t, role in zip(tensors, roles) if role < len(ROLES)]
            kept = [t for t, role in zip(tensors, roles) if role >= len(ROLES)]
            prints = [_fingerprint(t, self.contents) for t in watched]
            if before == _REFRESH:
                self.plan.refresh(weights)
            elif before == _RELEASE:
                self.plan.release_weights()
            self.weights = weights
            # Holding a tensor does not hold its memory: after `p.data = x` twice the second x may
            # lie where the packed data lay, with the same version. These aliases keep it.
            self.memory = [t.detach() for t in watched] if self.contents else []
            self.seen = watched, roles[:len(watched)], prints, kept

    def check(self, given: list[torch.Tensor]) -> None:
        if self.fresh(given):
            return
        if not self.refreshes:
            raise StaleWeights(
                "weights: expected the tensors that the plan was made from, unchanged, got others "
                "or changed ones; call refresh(), or build the plan with on_stale='refresh'")
        with self.lock:
            if not self.fresh(given):  # what is watched may be others by now, or none
                self.read(list(given or self.seen[0]))

    def fresh(self, given: list[torch.Tensor]) -> bool:
        tensors, _, prints, _ = self.seen
        if given and len(given) != len(tensors):
            raise InvalidArgument(
                f"weights: expected the {len(tensors)} tensors that the plan watches, got "
                f"{len(given)}; pass those of create in the order w13, w13_up, w2, w13_bias, "
                "w2_bias, then scales, zero points and global scales of each, and call refresh() "
                "after release_weights()")
        return [_fingerprint(t, self.contents) for t in given or tensors] == prints

    def reread(self) -> None:
        with self.lock:
            if not self.seen[0]:
                raise InvalidArgument("weights: expected tensors, got none, and the plan watches "
                                      "none; pass them")
            self.read(self.seen[0])

    def read(self, now: list[torch.Tensor]) -> None:
        _, roles, prints, kept = self.seen
        if [_fingerprint(t, False)[:4] for t in now] != [p[:4] for p in prints]:
            raise StaleWeights(
                "weights: expected tensors of the shapes, dtypes and device that the plan was made "
                "from, got others; build another plan for them")
        weights = self.weights
        for role, tensor in zip(roles, now):
            weights = with_part(weights, role, tensor)
        self.watch(weights, now + kept, roles + [len(ROLES)] * len(kept), _REFRESH)


_records: dict[int, _Record] = {}
_numbers = itertools.count(1)


def _find(handle: int) -> _Record:
    record = _records.get(handle)
    if record is None:
        raise InvalidArgument(f"plan: expected the handle of a living plan, got {handle}; keep the "
                              "fusedmoe.torch.FusedMoe that it came from")
    return record


def _apply(output: torch.Tensor, hidden: torch.Tensor, topk_weights: torch.Tensor,
           topk_ids: torch.Tensor, workspace: torch.Tensor | None, plan: int) -> None:
    record = _find(plan)
    record.check([])
    record.plan.apply(output, hidden, topk_weights, topk_ids, workspace)


def _apply_weights(output: torch.Tensor, hidden: torch.Tensor, topk_weights: torch.Tensor,
                   topk_ids: torch.Tensor, workspace: torch.Tensor | None,
                   weights: list[torch.Tensor], plan: int) -> None:
    record = _find(plan)
    with record.turn:  # nobody else makes the plan read other tensors until this call has ended
        record.check(weights)
        record.plan.apply(output, hidden, topk_weights, topk_ids, workspace)


def _apply_lent(output: torch.Tensor, hidden: torch.Tensor, topk_weights: torch.Tensor,
                topk_ids: torch.Tensor, workspace13: torch.Tensor | None,
                workspace2: torch.Tensor | None, expert_map: torch.Tensor | None,
                plan: int) -> None:
    record = _find(plan)
    record.check([])
    if expert_map is not None and (expert_map.dtype != torch.int32 or expert_map.dim() != 1):
        raise InvalidArgument("expert_map: expected int32 [num_experts], got another dtype or "
                              "shape; cast it")
    record.plan.apply(output, hidden, topk_weights, topk_ids, workspace2, workspace13=workspace13,
                      expert_map=expert_map)


for _name, _function in (("apply", _apply), ("apply_weights", _apply_weights),
                         ("apply_lent", _apply_lent)):
    _library.impl(_name, _function, "CPU")


class Operators:
    """What fusedmoe.torch asks of its operators, besides calling them."""

    def register(self, plan: _core.FusedMoe, refresh: bool, contents: bool) -> int:
        handle = next(_numbers)
        _records[handle] = _Record(plan, refresh, contents)
        return handle

    def unregister(self, handle: int) -> None:
        _records.pop(handle, None)

    def watch(self, handle: int, weights: Any, tensors: list[torch.Tensor], roles: list[int],
              before: int) -> None:
        _find(handle).watch(weights, tensors, roles, before)

    def reread(self, handle: int) -> None:
        _find(handle).reread()

    def thread_runner(self) -> int:
        return 0

"""The older function ``xpu_fused_moe``: the orders of arguments that it has had, and the plans that
it finds again by the identity of its tensors.
"""

from __future__ import annotations

import dataclasses
import enum
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._fork import ForkLock
from ._xpu_formats import (
    FLAGS,
    FLOATS,
    TENSORS,
    Kind,
    Tensors,
    weight_format,
    weights_of,
)
from ._xpu_layer import (
    activation_name,
    describe,
    in_words_of_apply,
    in_words_of_constructor,
)
from .config import PlanOptions, WeightLayout
from .errors import Error, Unsupported
from .torch import FusedMoe

Tensor = torch.Tensor

_FLAG_NAMES = tuple(FLAGS)
_CORE = ("topk_weights", "topk_ids", "n_experts_per_token", "activation", "num_experts")
_SIX = ("w13", "w13_scales", "w13_bias", "w2", "w2_scales", "w2_bias")
# The orders of arguments that there were, the last first. What follows num_experts is optional.
_SIGNATURES: tuple[tuple[str, ...], ...] = (
    ("hidden_states", *_SIX, *_CORE, "ep_rank", "ep_size", "expert_map", "output", *_FLAG_NAMES),
    ("hidden_states", *_SIX, *_CORE, "ep_rank", "ep_size", "output", *_FLAG_NAMES),
    ("hidden_states", *_SIX, *_CORE, *_FLAG_NAMES),
    ("hidden_states", "w13", "w2", *_CORE, "w13_scales", "w2_scales", "w13_bias", "w2_bias",
     "act_quant", "ep_rank", "ep_size", "expert_map", "output", *_FLAG_NAMES),
    ("hidden_states", "w13", "w13_bias", "w2", "w2_bias", *_CORE),
)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_flag(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _of_rank(*ranks: int, optional: bool = False) -> Callable[[Any], bool]:
    return lambda value: (optional and value is None) or (
        isinstance(value, Tensor) and value.ndim in ranks)


# What tells one order from another.
_FITS: dict[str, Callable[[Any], bool]] = {
    "w13": _of_rank(3), "w2": _of_rank(3),
    "w13_bias": _of_rank(2, optional=True), "w2_bias": _of_rank(2, optional=True),
    "hidden_states": _of_rank(2), "topk_weights": _of_rank(2), "topk_ids": _of_rank(2),
    "output": _of_rank(2, optional=True), "expert_map": _of_rank(1, optional=True),
    "n_experts_per_token": _is_count, "num_experts": _is_count, "ep_rank": _is_count,
    "ep_size": _is_count, "activation": lambda value: isinstance(value, str | enum.Enum),
    "act_quant": _is_flag, **{name: _is_flag for name in _FLAG_NAMES},
}
_REQUIRED = ("hidden_states", "w13", "w2", *_CORE)


def _arrange(arguments: Sequence[Any], named: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, in whichever order they came."""
    for names in _SIGNATURES:
        if len(arguments) > len(names) or not set(named) <= set(names):
            continue
        call = dict(zip(names, arguments))
        if call.keys() & named.keys():
            continue
        call.update(named)
        if all(name in call for name in _REQUIRED) and all(
                name not in _FITS or _FITS[name](value) for name, value in call.items()):
            return call
    raise TypeError("xpu_fused_moe: expected the arguments of one of its signatures, the last of "
                    f"which is ({', '.join(_SIGNATURES[0])}), got {len(arguments)} by position and "
                    f"{sorted(named)} by name; pass them by name")


@dataclasses.dataclass(eq=False)
class _Cached:
    """A plan of the function, and the tensors that it has read, which it does not keep alive."""

    owners: list[weakref.ref[Tensor]]
    lock: ForkLock = dataclasses.field(default_factory=ForkLock)
    plan: FusedMoe | None = None
    kind: Kind | None = None
    prints: tuple[Any, ...] = ()


# Keyed by the tensors' identity and everything else that shapes a plan. Entries go when one of
# their tensors does, so an id in a key is never that of another tensor.
_cache: dict[tuple[Any, ...], _Cached] = {}
_cache_lock = ForkLock()  # a weak reference's callback may come while it is held
_builds: dict[tuple[Any, ...], int] = {}  # of tensors that keep changing their identity
_BUILDS_BEFORE_WARNING = 4


def _owner(tensor: Tensor) -> Tensor:
    """The tensor whose life and version a view shares."""
    return tensor if tensor._base is None else tensor._base


def _print(tensor: Tensor) -> tuple[Any, ...]:
    version = None if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version


def _geometry(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    return (id(_owner(tensor)), tensor.storage_offset(), tensor.shape, tensor.stride(),
            tensor.dtype, tensor.device)


def _find(key: tuple[Any, ...], tensors: Sequence[Tensor]) -> _Cached:
    with _cache_lock:
        entry = _cache.get(key)
        if entry is None:
            cache = _cache  # at exit the module's names are gone before the last tensors

            def forget(_: Any) -> None:
                cache.pop(key, None)

            entry = _Cached([weakref.ref(_owner(tensor), forget) for tensor in tensors])
            _cache[key] = entry
            # In the key, identities; here, places: the same place again and again is a caller that
            # makes new tensor objects, and pays for a plan each time.
            place = tensors[0].data_ptr(), tensors[0].shape
            if len(_builds) > 4096:
                _builds.clear()
            _builds[place] = _builds.get(place, 0) + 1
            if _builds[place] == _BUILDS_BEFORE_WARNING:
                warnings.warn("fusedmoe.xpu.xpu_fused_moe: the same weights came as new tensor "
                              "objects again and again, and each time a plan is built; keep the "
                              "tensors, or use XpuFusedMoe", RuntimeWarning, stacklevel=3)
        return entry


def _layout_of(w13: Tensor, w2: Tensor, hidden_size: int, gated: bool) -> WeightLayout:
    """[E, K, N], or [E, N, K] of the first versions: the hidden size tells which."""
    nk = (w13.shape[2] == hidden_size and w2.shape[1] == hidden_size
          and w13.shape[1] == (2 if gated else 1) * w2.shape[2])
    kn = (w13.shape[1] == hidden_size and w2.shape[2] == hidden_size
          and w13.shape[2] == (2 if gated else 1) * w2.shape[1])
    return "nk" if nk and not kn else "kn"


def xpu_fused_moe(*arguments: Any, **named: Any) -> Tensor:
    """The layer as a function, in any of the orders of arguments that it has had, the last of them
    (hidden_states, w13, w13_scales, w13_bias, w2, w2_scales, w2_bias, topk_weights, topk_ids,
    n_experts_per_token, activation, num_experts, ep_rank=0, ep_size=1, expert_map=None,
    output=None, is_fp8=False, is_int4=False, is_mxfp4=False, is_mxfp8=False, is_block_fp8=False).
    Shapes as in :class:`XpuFusedMoe`; f32, f16 and bf16 weights may also be [E, N, K], as the first
    versions had them. Returns ``output``, or a new tensor [num_tokens, hidden_size].

    A plan is built at the first call with some tensors and found again by their identity: it does
    not keep them alive, and goes when one of them does. Changed in place or moved, they are read
    again, into the same memory; ``tensor.data.copy_()`` is not seen by PyTorch: call
    ``xpu_fused_moe.refresh(w13)`` after it. Safe from any thread. Raises as the class.
    """
    call = _arrange(arguments, named)
    if call.get("act_quant"):
        raise Unsupported("act_quant: expected False, got True: activations are not quantised; "
                          "pass False")
    six: dict[str, Any] = {name: call.get(name) for name in TENSORS}
    tensors = Tensors(**six)
    hidden, output = call["hidden_states"], call.get("output")
    if output is None:
        output = torch.empty_like(hidden)
    flags = {name: call.get(name) for name in _FLAG_NAMES}
    activation = activation_name(call["activation"])
    format = weight_format(tensors.w13, tensors.w13_scales, **flags)
    layout: WeightLayout = "kn"
    if format in FLOATS.values() and tensors.w13.ndim == tensors.w2.ndim == 3:
        layout = _layout_of(tensors.w13, tensors.w2, hidden.shape[1], activation != "relu2_no_mul")
    expert_map = call.get("expert_map")
    num_experts, ep_size = call["num_experts"], call.get("ep_size", 1)
    # The map itself comes with each call; of the plan it is the number of experts that matters.
    total = num_experts * ep_size if expert_map is None else expert_map.shape[0]
    settings = (call["n_experts_per_token"], activation, num_experts, call.get("ep_rank", 0),
                ep_size, total, expert_map is None, format, layout, hidden.dtype, output.dtype,
                torch.get_num_threads())
    given = [tensor for name in TENSORS if (tensor := getattr(tensors, name)) is not None]
    key = (*(_geometry(getattr(tensors, name)) for name in TENSORS), settings)
    entry = _find(key, given)
    prints = tuple(_print(tensor) for tensor in given)
    plan = entry.plan
    if plan is None or entry.prints != prints:
        with entry.lock:
            prints = tuple(_print(tensor) for tensor in given)  # before they are read
            try:
                if entry.plan is None or entry.kind is None:
                    layer = describe(tensors, call["n_experts_per_token"], activation, num_experts,
                                      call.get("ep_rank", 0), ep_size, expert_map, None, None, None,
                                      flags, hidden.dtype, output.dtype, PlanOptions(), layout)
                    entry.kind = layer.kind
                    entry.plan = FusedMoe.create(layer.config, layer.weights, layer.options,
                                                 watch=False)
                elif entry.prints != prints:
                    entry.plan.plan.refresh(weights_of(tensors, entry.kind))
            except Error as error:
                raise in_words_of_constructor(error) from None
            entry.prints = prints
            plan = entry.plan
    if expert_map is not None and expert_map.dtype == torch.int64:
        expert_map = expert_map.to(torch.int32)
    try:
        plan.apply(output, hidden, call["topk_weights"], call["topk_ids"], expert_map=expert_map)
    except Error as error:
        raise in_words_of_apply(error) from None
    return output


def _refresh_function(w13: Tensor) -> int:
    """Have plans of this w13 read their weights again at their next call; returns how many."""
    with _cache_lock:
        entries = [entry for key, entry in list(_cache.items()) if key[0][0] == id(_owner(w13))]
    for entry in entries:
        with entry.lock:
            entry.prints = ()
    return len(entries)


xpu_fused_moe.refresh = _refresh_function  # type: ignore[attr-defined]

"""Whether the parts of an installation and an engine's calls fit, and putting classes where the
engine imports them from.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import pathlib
import sys
import types
from typing import Any

import torch

from . import _core
from . import torch as binding
from ._xpu_formats import supports_format
from .errors import Unsupported

_PEER = "vllm_xpu_kernels"
_INTERFACE = f"{_PEER}.fused_moe_interface"
_VLLM_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.xpu_moe"
_OPERATORS = {
    "apply": ("output", "hidden", "topk_weights", "topk_ids", "workspace", "plan"),
    "apply_weights": ("output", "hidden", "topk_weights", "topk_ids", "workspace", "weights",
                      "plan"),
    "apply_lent": ("output", "hidden", "topk_weights", "topk_ids", "workspace13", "workspace2",
                   "expert_map", "plan"),
}
# Reloaded weights are copied by `parameter.data.copy_()` in this function of this module.
_VLLM_RELOAD, _VLLM_COPY = ("vllm.model_executor.model_loader.reload.layerwise",
                            "_copy_and_restore_kernel_tensors")
_replaced: list[tuple[Any, str, Any]] = []  # (module, name, what was there), for uninstall
_MISSING = object()


def handshake() -> None:
    """Raises Unsupported with one line when the parts of this installation do not belong together:
    the package, its compiled core and its operators for PyTorch."""
    here = pathlib.Path(__file__).resolve().parent
    try:
        distribution = importlib.metadata.distribution("fusedmoe")
    except importlib.metadata.PackageNotFoundError:
        distribution = None
    # Another copy may be installed than the one that is imported: that one says nothing.
    if distribution is not None and (
            pathlib.Path(str(distribution.locate_file("fusedmoe"))).resolve() == here):
        if distribution.version != _core.__version__:
            raise Unsupported(f"fusedmoe: expected one version, got package {distribution.version} "
                              f"with a compiled core {_core.__version__}; install it again")
    if "does not load" in binding.OPERATOR:
        raise Unsupported("fusedmoe: expected operators that fit this PyTorch, got "
                          f"{binding.OPERATOR}; install fusedmoe again beside torch "
                          f"{torch.__version__}")
    for name, expected in _OPERATORS.items():
        operator = getattr(torch.ops.fusedmoe, name, None)
        got = None if operator is None else tuple(
            argument.name for argument in operator.default._schema.arguments)
        if got != expected:
            raise Unsupported(f"fusedmoe {_core.__version__}: expected an operator "
                              f"{name}({', '.join(expected)}), got {got and ', '.join(got)}; "
                              "install it again")


def calls_out_of_step(source: str, cls: Any) -> list[str]:
    """What in an engine's source calls XpuFusedMoe, or its ``apply``, in a way that ``cls`` does
    not take: one line each."""
    wrong = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id == "XpuFusedMoe":
            name, target = "XpuFusedMoe", cls.__init__
        elif (isinstance(called, ast.Attribute) and called.attr == "apply"
              and isinstance(called.value, ast.Attribute)
              and called.value.attr == "fused_moe_impl"):
            name, target = "XpuFusedMoe.apply", cls.apply
        else:
            continue
        keywords = [keyword.arg for keyword in node.keywords if keyword.arg is not None]
        if len(keywords) < len(node.keywords) or any(
                isinstance(one, ast.Starred) for one in node.args):
            continue  # **settings: what they hold is not in the source
        try:
            inspect.signature(target).bind(None, *node.args, **dict.fromkeys(keywords))
        except TypeError as error:
            wrong.append(f"line {node.lineno} calls {name}: {error}")
    return wrong


def _vllm_source(module: str) -> tuple[pathlib.Path, str] | None:
    """Of one of its modules, without importing vLLM."""
    try:
        spec = importlib.util.find_spec("vllm")
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = pathlib.Path(folder).joinpath(*module.split(".")[1:]).with_suffix(".py")
        if path.is_file():
            return path, path.read_text(encoding="utf-8")
    return None


def replace(module: Any, name: str, value: Any) -> None:
    before = getattr(module, name, _MISSING)
    if before is not value:
        _replaced.append((module, name, before))
        setattr(module, name, value)


def install(cls: type, function: Any) -> list[str]:
    """``fusedmoe.xpu.install``."""
    handshake()
    if torch.xpu.is_available() and not (answer := supports_format("bf16", "xpu:0")):
        raise Unsupported(f"{answer.reason}: XpuFusedMoe would refuse the first layer")
    if (found := _vllm_source(_VLLM_EXPERTS)) is not None:
        path, source = found
        if wrong := calls_out_of_step(source, cls):
            raise Unsupported(f"vllm: expected calls of XpuFusedMoe as fusedmoe "
                              f"{_core.__version__} takes them, got others in {path}: "
                              f"{'; '.join(wrong)}; use a fusedmoe that knows this vLLM")
    if (found := _vllm_source(_VLLM_RELOAD)) is not None and f"def {_VLLM_COPY}(" not in found[1]:
        raise Unsupported(f"vllm: expected {_VLLM_COPY} to copy reloaded weights, got another "
                          f"{found[0]}; use a fusedmoe that knows this vLLM")
    interface = sys.modules.get(_INTERFACE)
    if interface is None:
        try:
            interface = importlib.import_module(_INTERFACE)
        except ModuleNotFoundError as error:
            if error.name not in (_PEER, _INTERFACE):
                raise
            interface = _make_interface()
    replace(interface, "XpuFusedMoe", cls)
    replace(interface, "xpu_fused_moe", function)
    where = [_INTERFACE]
    if (experts := sys.modules.get(_VLLM_EXPERTS)) is not None:
        replace(experts, "XpuFusedMoe", cls)
        where.append(_VLLM_EXPERTS)
    return where


def count_copies_of_reloads() -> None:
    """Make vLLM's reload, where vLLM is imported, count the parameters that it copies into: it does
    so past PyTorch's counters, and a plan would not see that its weights have changed."""
    if "vllm" not in sys.modules:
        return
    try:
        module = importlib.import_module(_VLLM_RELOAD)
    except ModuleNotFoundError:  # a vLLM without it
        return
    copy = getattr(module, _VLLM_COPY, None)
    if copy is None or hasattr(copy, "_fusedmoe"):
        return

    @functools.wraps(copy)
    def copy_and_count(layer: torch.nn.Module, info: Any) -> None:
        copy(layer, info)
        for parameter in layer.parameters(recurse=False):
            if not parameter.is_inference():
                torch.autograd.graph.increment_version(parameter)

    copy_and_count._fusedmoe = True  # type: ignore[attr-defined]
    replace(module, _VLLM_COPY, copy_and_count)


def _make_interface() -> types.ModuleType:
    modules = []
    for name in (_PEER, _INTERFACE):
        module = types.ModuleType(name, "Made by fusedmoe.xpu.install().")
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=name == _PEER)
        modules.append(module)
    package, interface = modules
    package.__path__ = []  # a package, so that its other modules are missing by their own names
    for module in modules:
        sys.modules[module.__name__] = module
        _replaced.append((sys.modules, module.__name__, _MISSING))
    setattr(package, "fused_moe_interface", interface)
    return interface


def uninstall() -> None:
    """Undo :func:`install`; objects that were built stay as they are."""
    while _replaced:
        where, name, before = _replaced.pop()
        if where is sys.modules:
            sys.modules.pop(name, None)
        elif before is _MISSING:
            delattr(where, name)
        else:
            setattr(where, name, before)

"""Goldens through Python: within the tolerance of the reference models' own outputs, and the bits
that the command gives, which runs in C++."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess

import numpy as np
import pytest
import torch
from safetensors import safe_open
from support import assert_close, dirty

import fusedmoe
import fusedmoe.torch

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
MANIFEST = json.loads((GOLDEN / "manifest.json").read_text())
COMMAND = os.environ.get("FUSEDMOE_COMMAND") or shutil.which("fusedmoe")


CASES = sorted(case["name"] for case in MANIFEST["cases"])
FLOATS = {"f32", "f16", "bf16"}


def test_every_case_is_listed():
    assert CASES == sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))


def goldens(folder: pathlib.Path) -> list[tuple[int, dict[str, torch.Tensor]]]:
    found = []
    for file in sorted(folder.glob("golden*.safetensors")):
        with safe_open(file, "pt") as content:
            layer = int((content.metadata() or {}).get("layer", 0))
            found.append((layer, {name: content.get_tensor(name) for name in content.keys()}))
    return found


def fnv1a(data: bytes) -> str:
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{value:016x}"


def outputs(name: str) -> dict[tuple[int, int], torch.Tensor]:
    """(layer, number of the golden) -> output, equal through both kinds of plan."""
    results = {}
    checkpoint = fusedmoe.load_checkpoint(GOLDEN / name)
    layers = {layer.index: layer for layer in checkpoint}
    for number, (index, golden) in enumerate(goldens(GOLDEN / name)):
        layer = layers[index]
        plan = fusedmoe.FusedMoe.create(layer.config, layer.weights)
        hidden, router, ids = golden["hidden"], golden["topk_weights"], golden["topk_ids"]
        output = dirty(*hidden.shape, dtype=hidden.dtype)
        plan.apply(output, hidden, router, ids, fusedmoe.WorkspaceBuffer(
            plan.workspace_size(hidden.shape[0])))
        assert_close(output, golden["expected"], hidden.dtype,
                     quantised=not set(layer.formats) <= FLOATS)
        watched = fusedmoe.torch.FusedMoe.create(layer.config, layer.weights)
        again = dirty(*hidden.shape, dtype=hidden.dtype)
        watched.apply(again, hidden, router, ids)
        assert torch.equal(again.view(torch.uint8), output.view(torch.uint8))
        results[index, number] = output
    assert results
    return results


@pytest.mark.parametrize("name", CASES)
def test_bits_of_the_command(name):
    got = {(layer, fnv1a(output.contiguous().view(torch.uint8).numpy().tobytes()))
           for (layer, _), output in outputs(name).items()}
    if COMMAND is None:
        pytest.skip("no command fusedmoe on the PATH; `make test-python` builds it")
    rows = subprocess.run([COMMAND, "verify", str(GOLDEN / name), "--json"], check=True,
                          capture_output=True, text=True).stdout.splitlines()
    want = {(row["layer"], row["output_fnv1a"]) for row in map(json.loads, rows)
            if row.get("source") == "golden"}
    assert got == want


@pytest.mark.parametrize("name", CASES)
def test_routing_of_the_checkpoint(name):
    for layer in fusedmoe.load_checkpoint(GOLDEN / name):
        for index, golden in goldens(GOLDEN / name):
            if index != layer.index or "router_logits" not in golden or layer.routing is None:
                continue
            logits = golden["router_logits"]
            weights = np.empty((logits.shape[0], layer.config.top_k), np.float32)
            ids = np.empty(weights.shape, np.int64)
            fusedmoe.route(layer.routing, logits, weights, ids)
            order, want = np.argsort(ids), golden["topk_ids"].long()
            assert (np.sort(ids) == want.sort().values.numpy()).all()
            np.testing.assert_allclose(
                np.take_along_axis(weights, order, 1),
                golden["topk_weights"].gather(1, want.argsort()).numpy(), rtol=5e-6)


def test_one_ranks_experts():
    """Ranks of an uneven map add up to the whole layer."""
    name = "qwen3_moe_bf16_shards"
    layer = fusedmoe.load_checkpoint(GOLDEN / name)[0]
    golden = next(tensors for index, tensors in goldens(GOLDEN / name) if index == layer.index)
    hidden, experts = golden["hidden"], layer.config.num_experts
    total = torch.zeros(hidden.shape, dtype=torch.float32)
    for chosen in (range(1), range(1, experts)):
        table = [-1] * experts
        for local, expert in enumerate(chosen):
            table[expert] = local
        plan = fusedmoe.FusedMoe.create(dataclasses.replace(layer.config, output_dtype="f32"),
                                        layer.weights.local(table),
                                        fusedmoe.PlanOptions(expert_map=table))
        output = dirty(*hidden.shape, dtype=torch.float32)
        plan.apply(output, hidden, golden["topk_weights"], golden["topk_ids"])
        total += output
    assert_close(total.to(hidden.dtype), golden["expected"], hidden.dtype)


def test_router_tensors_of_the_checkpoint():
    name = "deepseek_v3_bf16"
    layer = next(iter(fusedmoe.load_checkpoint(GOLDEN / name)))
    assert layer.router_weight.dtype == "bf16"
    assert layer.router_weight.data.shape == (layer.config.num_experts, layer.config.hidden_size)
    assert layer.routing.score_function == "sigmoid" and layer.routing.selection_bias is not None
    assert layer.formats == ["bf16"] and layer.bytes > 0


# Format, layout of scales, their type, group (or block), zero points, and whether gate and up are two.
SCALES = {
    "awq_int4": ("int4", "group", "f16", 32, True, True),
    "ct_fp8_channel": ("fp8_e4m3", "channel", "bf16", 0, None, True),
    "ct_fp8_tensor": ("fp8_e4m3", "tensor", "f32", 0, None, True),
    "ct_int4_group128_asym": ("int4", "group", "bf16", 128, True, True),
    "ct_int4_group32": ("int4", "group", "bf16", 32, None, True),
    "ct_int8_channel": ("int8", "channel", "bf16", 0, None, True),
    "ct_int8_packed": ("int8", "channel", "bf16", 0, None, True),
    "ct_nvfp4": ("nvfp4", "group", "e4m3", 16, None, True),
    "deepseek_v3_fp8_block": ("fp8_e4m3", "block", "f32", 128, None, True),
    "gguf_mxfp4": ("mxfp4", "group", "e8m0", 32, None, True),
    "gguf_q4_0_fused": ("int4", "group", "f16", 32, None, False),
    "gguf_q4_k_q6_k": ("q4_k", None, None, 0, None, True),
    "gguf_q8_0": ("int8", "group", "f16", 32, None, True),
    "gpt_oss_mxfp4": ("mxfp4", "group", "e8m0", 32, None, False),
    "gptq_int4": ("int4", "group", "f16", 32, True, True),
    "modelopt_nvfp4": ("nvfp4", "group", "e4m3", 16, None, True),
}


@pytest.mark.parametrize("name", CASES)
def test_formats_and_scales_are_told(name):
    for layer in fusedmoe.load_checkpoint(GOLDEN / name):
        weights, config = layer.weights, layer.config
        w13, w2 = weights.w13, weights.w2
        assert w13.data is None and w13.format == layer.formats[0] and w2.format in layer.formats
        rows = config.intermediate_size
        if config.activation.kind != "relu2" and weights.w13_up is None:
            rows *= 2
        assert w13.shape == (config.num_experts, rows, config.hidden_size)
        assert w2.shape == (config.num_experts, config.hidden_size, config.intermediate_size)
        assert isinstance(layer.notes, list)
        if name not in SCALES:
            assert set(layer.formats) <= FLOATS and w13.scales is None and w2.scales is None
            continue
        format, layout, type, size, points, two = SCALES[name]
        assert w13.format == format and (weights.w13_up is not None) == two
        if layout is None:
            assert w13.scales is None
            continue
        for tensor in (w13, w2, weights.w13_up or w2):
            scales = tensor.scales
            assert (scales.layout, scales.type, scales.zero_points) == (layout, type, points)
            assert (scales.group_size or scales.block_n) == size
            assert scales.block_n == scales.block_k and scales.data is None


@pytest.mark.parametrize("name", ["ct_int4_group128_asym", "modelopt_nvfp4", "deepseek_v3_fp8_block",
                                  "gguf_q4_k_q6_k"])
def test_one_ranks_quantised_experts(name):
    layer = fusedmoe.load_checkpoint(GOLDEN / name)[0]
    golden = next(tensors for index, tensors in goldens(GOLDEN / name) if index == layer.index)
    hidden, experts = golden["hidden"], layer.config.num_experts
    total = torch.zeros(hidden.shape, dtype=torch.float32)
    for chosen in (range(1), range(1, experts)):
        table = [chosen.index(e) if e in chosen else -1 for e in range(experts)]
        plan = fusedmoe.FusedMoe.create(dataclasses.replace(layer.config, output_dtype="f32"),
                                        layer.weights.local(table),
                                        fusedmoe.PlanOptions(expert_map=table))
        output = dirty(*hidden.shape, dtype=torch.float32)
        plan.apply(output, hidden, golden["topk_weights"], golden["topk_ids"])
        total += output
    assert_close(total.to(hidden.dtype), golden["expected"], hidden.dtype, quantised=True)

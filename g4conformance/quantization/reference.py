"""The reference of a quantized runtime: the Hugging Face model, fake-quantized where the runtime's graphs are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from g4conformance.checkpoints.checkpoint import Checkpoint
from g4conformance.quantization.parameters import ActivationQuantization, LinearQuantization, Quantization
from g4conformance.reference.otherwise import WAY, OtherwiseLinear
from g4conformance.runtime.contract import KeyValue
from g4conformance.runtime.static import own_modules

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def fake_quantized(checkpoint: Checkpoint, quantization: Quantization) -> Checkpoint:
    """`checkpoint` with a model of its own that rounds to the runtime's grids; it shares every float tensor.

    The model keeps its own dynamic path: its own cache, masks, lengths. Weights are dequantized when a linear op needs
    them, so that no second copy of them exists.

    Rounding to a grid hides most rounding errors and magnifies a few, which depend on the order of every sum. Therefore
    the same model with linear ops computed otherwise is another way, whose distance counts as noise.
    """
    outputs = quantization.outputs
    return replace(
        checkpoint,
        model=_rounding_model(checkpoint, quantization, functional.linear),
        digest=f"{checkpoint.digest}-{quantization.scheme.name}-{quantization.digest[:16]}",
        on_key_value=_key_value_rounding(outputs),
        other_ways={WAY: _rounding_model(checkpoint, quantization, OtherwiseLinear())},
    )


def _rounding_model(checkpoint: Checkpoint, quantization: Quantization, compute: Linear) -> Any:
    """A copy of the model that rounds, and computes its linear ops with `compute`."""
    model: Any = own_modules(checkpoint.model)
    for path, linear in quantization.linears.items():
        _fake_quantize_linear(model.get_submodule(path), linear, compute)
    outputs = quantization.outputs
    for name, module in _returning_modules(model).items():
        if name in outputs:
            module.register_forward_hook(_on_output(outputs[name]))
    if "per_layer_inputs" in outputs:
        _wrap(model.model.language_model, "project_per_layer_inputs", outputs["per_layer_inputs"].fake_quantized)
    return model


def _returning_modules(model: Any) -> dict[str, nn.Module]:
    """The module that returns what a graph returns, by its trace name without prefill or decode step."""
    tower = model.model.vision_tower
    return {
        "vision/patch_embeds": tower.patch_embedder,
        **{f"vision/layer/{i}/hidden": layer for i, layer in enumerate(tower.encoder.layers)},
        "visual_embeds": model.model.embed_vision,
        **{f"layer/{i}/hidden": layer for i, layer in enumerate(model.model.language_model.layers)},
        "logits": model.lm_head,
    }


def _fake_quantize_linear(module: Any, linear: LinearQuantization, compute: Linear) -> None:
    def forward(values: Tensor) -> Tensor:
        if linear.input is not None:
            values = linear.input.fake_quantized(values)
        weight = module.weight if linear.weight is None else linear.weight.dequantized(values.dtype)
        result = compute(values, weight, module.bias)
        return result if linear.output is None else linear.output.fake_quantized(result)

    module.forward = forward


def _on_output(quantization: ActivationQuantization) -> Callable[..., Tensor]:
    return lambda module, args, output: quantization.fake_quantized(output)


def _wrap(holder: Any, name: str, change: Callable[[Tensor], Tensor]) -> None:
    original = getattr(holder, name)
    setattr(holder, name, lambda *args, **kwargs: change(original(*args, **kwargs)))


def _key_value_rounding(outputs: dict[str, ActivationQuantization]) -> Callable[[int, KeyValue], KeyValue] | None:
    """From a storing layer and its new K/V to what it stores; None where the cache stays in floating point."""
    if not any(name.endswith("/key") for name in outputs):
        return None

    def rounded(layer: int, key_value: KeyValue) -> KeyValue:
        key, value = key_value
        return outputs[f"layer/{layer}/key"].fake_quantized(key), outputs[f"layer/{layer}/value"].fake_quantized(value)

    return rounded

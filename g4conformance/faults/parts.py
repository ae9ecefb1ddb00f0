"""Where faults get hold of a runtime: the few places at which several of them go in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

from g4conformance.faults.patching import Patch
from g4conformance.judging.given import positional_tensors
from g4conformance.runtime.contract import MasksAndRope, Runtime, StaticInputs
from g4conformance.runtime.masks import mask_bias
from g4conformance.runtime.static import StaticGemma4Runtime
from g4conformance.runtime.vision import StaticVisionTower

SLIDING, FULL = "sliding_attention", "full_attention"

# --- the contract's methods, of any runtime ---------------------------------------------------------------------------


def change_inputs(runtime: Runtime, patch: Patch, change: Callable[[StaticInputs], StaticInputs]) -> None:
    """What `build_static_inputs` returns is changed."""
    build = runtime.build_static_inputs
    patch(runtime, "build_static_inputs", lambda prompt, images: change(build(prompt, images)))


def change_picture(runtime: Runtime, patch: Patch, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    """Pixel values [1, N, 3 * patch_size ** 2] and patch positions [1, N, 2] of a picture are changed."""

    def changed(inputs: StaticInputs) -> StaticInputs:
        if inputs.pixel_values is None or inputs.image_position_ids is None:
            return inputs
        pixels, positions = change(inputs.pixel_values, inputs.image_position_ids)
        return replace(inputs, pixel_values=pixels, image_position_ids=positions)

    change_inputs(runtime, patch, changed)


def change_output(
    runtime: Runtime, patch: Patch, method: str, trace_name: str, change: Callable[[Tensor], Tensor]
) -> None:
    """What `method` returns, and reports under `trace_name`, is changed."""
    call = getattr(runtime, method)

    def changed(*args: Any) -> Tensor:
        listener = runtime.on_tensor
        if listener is None:
            return change(call(*args))
        runtime.on_tensor = lambda name, tensor: None if name == trace_name else listener(name, tensor)
        try:
            result = change(call(*args))
        finally:
            runtime.on_tensor = listener
        listener(trace_name, result)
        return result

    patch(runtime, method, changed)


def change_positions(runtime: Runtime, patch: Patch, change: Callable[[MasksAndRope], MasksAndRope]) -> None:
    """What `masks_and_rope` returns and reports for a prompt is changed; decode steps are not."""
    build = runtime.masks_and_rope

    def changed(valid_length: int) -> MasksAndRope:
        listener, runtime.on_tensor = runtime.on_tensor, None
        try:
            positional = change(build(valid_length))
        finally:
            runtime.on_tensor = listener
        for name, tensor in positional_tensors(positional).items():
            if listener is not None:
                listener(name, tensor)
        return positional

    patch(runtime, "masks_and_rope", changed)


# --- parts of the shipped runtime -------------------------------------------------------------------------------------


def text_model(runtime: StaticGemma4Runtime) -> Any:
    return runtime.model.model.language_model


def vision_model(runtime: StaticGemma4Runtime) -> Any:
    return runtime.model.model.vision_tower


def repack_middle_rows(patch: Patch, embedding: Any) -> None:
    """Interleaves four neighbouring rows in the middle of a table, as a matrix kernel wants its weights."""
    weight = embedding.weight.detach().clone()
    rows = slice(weight.shape[0] // 2, weight.shape[0] // 2 + 4)
    weight[rows] = weight[rows].t().reshape(4, -1)
    patch(embedding, "weight", nn.Parameter(weight, requires_grad=False))


def text_norms(runtime: StaticGemma4Runtime) -> Iterator[Any]:
    """Every scaled RMSNorm of the decoder, in the order of the modules."""
    for module in text_model(runtime).modules():
        if isinstance(module, Gemma4RMSNorm) and module.with_scale:
            yield module


def decoding(runtime: StaticGemma4Runtime) -> bool:
    """Whether a decode step is under way, seen from inside a layer: prefill begins with an empty cache."""
    return runtime.past_len > 0


def change_call(patch: Patch, holder: Any, name: str, change: Callable[..., Any]) -> None:
    """`holder.name(*args)` becomes `change(original, *args)`."""
    original = getattr(holder, name)
    patch(holder, name, lambda *args, **kwargs: change(original, *args, **kwargs))


def change_tower(runtime: StaticGemma4Runtime, patch: Patch, change: Callable[[Any], None]) -> None:
    """The `StaticVisionTower` is changed when it is built for a picture."""
    build = runtime._vision_tower

    def built(image_position_ids: Tensor) -> StaticVisionTower:
        tower = build(image_position_ids)
        change(tower)
        return tower

    patch(runtime, "_vision_tower", built)


def change_pooling(patch: Patch, runtime: StaticGemma4Runtime, bucket: Callable[[Tensor, int], Tensor]) -> None:
    """Patches are averaged into the soft tokens that `bucket(positions [1, N, 2], k)` [1, N] names; -1 drops one."""

    def pooled(hidden: Tensor, position_ids: Tensor, length: int) -> tuple[Tensor, Tensor]:
        k = int((hidden.shape[1] // length) ** 0.5)
        buckets = bucket(position_ids.clamp(min=0), k)
        buckets = buckets.masked_fill((buckets >= length) | (buckets < 0), length)
        weights = nn.functional.one_hot(buckets, length + 1)[..., :length].float() / k**2
        return (weights.transpose(1, 2) @ hidden.float()).to(hidden.dtype), ~(weights == 0).all(dim=1)

    patch(vision_model(runtime).pooler, "_avg_pool_by_positions", pooled)


def change_positional(
    runtime: StaticGemma4Runtime,
    patch: Patch,
    change: Callable[[MasksAndRope, Tensor], MasksAndRope],
    *,
    prefill: bool = True,
    decode: bool = True,
) -> None:
    """Masks and rotary tables are changed, given the query positions [Q], in prefill, in decode, or in both."""
    build = runtime._positional

    def changed(positions: Tensor, key_count: int, image_block: range) -> MasksAndRope:
        built = build(positions, key_count, image_block)
        wanted = decode if len(positions) == 1 else prefill
        return change(built, positions) if wanted else built

    patch(runtime, "_positional", changed)


def with_masks(built: MasksAndRope, masks: Mapping[str, Tensor]) -> MasksAndRope:
    """`built` with other patterns for some layer types, and the biases that go with them."""
    biases = {layer_type: mask_bias(mask, built.biases[layer_type].dtype) for layer_type, mask in masks.items()}
    return replace(built, masks={**built.masks, **masks}, biases={**built.biases, **biases})


def with_rope(built: MasksAndRope, change: Callable[[Tensor], Tensor]) -> MasksAndRope:
    """`built` with each rotary table changed."""
    return replace(built, rope={kind: (change(cos), change(sin)) for kind, (cos, sin) in built.rope.items()})

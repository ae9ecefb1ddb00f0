"""The vision tower's names and layouts become those of the contract (N patches, V soft tokens)."""

from __future__ import annotations

import re

import numpy as np

from g4conformance.runtimes.llama.listening import Heard
from g4conformance.runtimes.llama.names import Array, Trace

# By name without the layer's number: which of the operation's inputs are of interest too.
_WANTED: dict[str, tuple[int, ...]] = {
    "inp_raw_scaled": (),  # pixels, from [0, 1] to [-1, 1]
    "pos_embd": (),
    "layer_out": (),
    "pooled": (),
    "projected": (),
}


def wanted_of_vision(name: str) -> tuple[int, ...] | None:
    """What a `Listener` to the tower is to look at."""
    return _WANTED.get(re.sub(r"-\d+$", "", name))


def vision_trace(heard: Heard, patches: int) -> Trace:
    """One picture under the contract's names.

    llama.cpp has no padding patches. Pixels of padding are the suite's, and in the layers nobody looks at padding; the
    embeddings of padding patches are not made up.

    Args:
        patches: how many there are with padding; a picture with more is told without its patches.
    """
    trace = {"vision/soft_tokens": heard["pooled"][0, 0], "visual_embeds": heard["projected"][0, 0]}
    embeds = heard["pos_embd"][0]
    own = embeds.shape[1]
    if own == patches:
        trace["vision/patch_embeds"] = embeds
    if own > patches:
        return trace
    pixels = (heard["inp_raw_scaled"][0] + 1) / 2
    patch = round((pixels.shape[1] * pixels.shape[2] / own) ** 0.5)
    trace["pixel_values"] = _padded(patches_of(pixels, patch)[None], patches)
    layers = (name for name in heard if name.startswith("layer_out-"))
    hidden = {
        f"vision/layer/{name.removeprefix('layer_out-')}/hidden": _padded(heard[name][0], patches) for name in layers
    }
    return trace | hidden


def patches_of(pixels: Array, patch: int) -> Array:
    """[3, H, W] -> [N, patch * patch * 3], row by row of patches, the three colours of a pixel beside each other."""
    colours, height, width = pixels.shape
    grid = pixels.reshape(colours, height // patch, patch, width // patch, patch)
    return grid.transpose(1, 3, 2, 4, 0).reshape(-1, patch * patch * colours)


def pixels_of(patches: Array, positions: Array) -> Array:
    """The way back from [0, 1]: uint8 [H, W, 3]; patches whose position is -1 are padding."""
    own = (positions >= 0).all(axis=-1)
    columns, rows = positions[own].max(axis=0) + 1
    patch = round((patches.shape[1] / 3) ** 0.5)
    grid = patches[own].reshape(rows, columns, patch, patch, 3).transpose(0, 2, 1, 3, 4)
    return np.rint(grid.reshape(rows * patch, columns * patch, 3) * 255).astype(np.uint8)


def _padded(rows: Array, count: int) -> Array:
    """[1, n, ...] -> [1, count, ...]."""
    return np.pad(rows, [(0, 0), (0, count - rows.shape[1]), *[(0, 0)] * (rows.ndim - 2)])

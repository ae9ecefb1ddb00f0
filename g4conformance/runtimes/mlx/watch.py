"""Looks at what mlx-vlm's modules return while its own `generate_step` runs them, and names it as the contract does."""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from g4conformance.runtimes.mlx.layouts import (
    Array,
    AttentionMask,
    key_positions,
    padded,
    patches_of,
    tables_of,
    visible,
)

Seen = Callable[..., None]


@dataclass(frozen=True)
class Attended:
    """What one pass through a layer's attention saw: keys [1, KV, K, D] in the cache's order, for Q queries."""

    layer: int
    mask: AttentionMask
    keys: Any
    queries: int


@dataclass(frozen=True)
class Rotated:
    """What one pass had a layer rotate: so many rows, from the position `offset` on."""

    layer: int
    offset: Any
    rows: int
    dtype: Any


@contextmanager
def spied(points: Sequence[tuple[Any, str, Seen]]) -> Iterator[None]:
    """Each `(owner, name, seen)`: `seen` gets what `owner.name` returns, then its arguments, until the context ends.

    The owner is a module of Python or a class, because that is where Python looks for `__call__`.
    """
    with ExitStack() as undo:
        for owner, name, seen in points:
            original = vars(owner)[name]
            undo.callback(setattr, owner, name, original)
            setattr(owner, name, _spy(original, seen))
        yield


def _spy(original: Callable[..., Any], seen: Seen) -> Callable[..., Any]:
    @functools.wraps(original)
    def spy(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        seen(found, *args, **kwargs)
        return found

    return spy


class Watch:
    """The tensors of one request. Passes up to the first token are prefill, each later one is a decode step.

    mlx-vlm prefills all rows but the last, then the last: what it yields of several passes is put together. Arrays are
    lazy, and computed when all is over. Those that a cache holds are assigned to, so slices of them are kept.

    Args:
        caches: one for each layer that stores K/V, in the layers' order.
    """

    def __init__(self, model: Any, caches: Sequence[Any], as_numpy: Callable[[Any], Array]) -> None:
        self.model, self.as_numpy = model, as_numpy
        self.text, self.vision = model.language_model.model, model.vision_tower
        self.step: int | None = None
        kinds = [layer.layer_type for layer in self.text.layers]
        self._first = {kinds.index(kind): kind for kind in sorted(set(kinds))}
        self._layer_of_cache = {id(cache): i for i, cache in enumerate(caches)}
        self._layer_of_rope = {id(self.text.layers[i].self_attn.rope): i for i in self._first}
        self._layer_of_block = {id(block): i for i, block in enumerate(self.vision.encoder.layers)}
        self._rows: dict[str, tuple[int, list[Any]]] = {}
        self._last: dict[str, Any] = {}
        self._attended: dict[str, list[Attended]] = defaultdict(list)
        self._written: dict[int, list[Any]] = defaultdict(list)
        self._pictures: tuple[Any, Any] | None = None
        self._rotated: dict[str, list[Rotated]] = defaultdict(list)

    def next_token(self) -> None:
        """To be called when a token has been chosen: what follows is the step that feeds it."""
        self.step = 0 if self.step is None else self.step + 1

    @property
    def _entering(self) -> str:
        return "" if self.step is None else f"decode/{self.step}/"

    @property
    def _leaving(self) -> str:
        return "prefill/" if self.step is None else f"decode/{self.step}/"

    def points(self) -> list[tuple[Any, str, Seen]]:
        """Where to look, for `spied`."""
        language, layer = self.model.language_model, self.text.layers[0]
        gemma4, attention = (sys.modules[type(module).__module__] for module in (self.model, layer.self_attn))
        caches = {type(cache) for cache in self.model.make_cache()}
        ropes = {type(self.text.layers[i].self_attn.rope) for i in self._first}
        return [
            (type(self.model), "get_input_embeddings", self._on_embeddings),
            (gemma4, "masked_scatter", self._on_fusion),
            (type(self.text.embed_tokens), "__call__", self._on_lookup),
            (type(self.text), "project_per_layer_inputs", self._on_per_layer_inputs),
            (type(layer), "__call__", self._on_layer),
            (attention, "scaled_dot_product_attention", self._on_attention),
            (type(language), "__call__", self._on_pass),
            (type(language), "logits_from_hidden", self._on_logits),
            *((cache, "update_and_fetch", self._on_key_value) for cache in caches),
            *((rope, "__call__", self._on_rope) for rope in ropes),
            (type(self.vision.patch_embedder), "__call__", self._on_patches),
            (type(self.vision.patch_embedder), "embed_patches", self._on_patches),
            (type(self.vision.encoder.layers[0]), "__call__", self._on_vision_layer),
            (type(self.vision), "__call__", self._on_soft_tokens),
            (type(self.model.embed_vision), "__call__", self._on_visual_embeds),
        ]

    # --- what is seen ------------------------------------------------------------------------------------------------

    def _add(self, name: str, rows: Any, axis: int = 1) -> None:
        self._rows.setdefault(name, (axis, []))[1].append(rows)

    def _on_embeddings(self, found: Any, *_: Any, **__: Any) -> None:
        if "text_embeds" not in self._rows:  # there was nothing to fuse
            self._add("text_embeds", found.inputs_embeds)

    def _on_fusion(self, fused: Any, text_embeds: Any, *_: Any) -> None:
        self._add("text_embeds", text_embeds)
        self._add("fused_embeds", fused)

    def _on_lookup(self, _: Any, table: Any, ids: Any) -> None:
        if self.step is None and table is self.text.embed_tokens:
            self._add("llm_input_ids", ids)

    def _on_per_layer_inputs(self, found: Any, *_: Any) -> None:
        self._add(self._entering + "per_layer_inputs", found)

    def _on_layer(self, found: Any, layer: Any, entering: Any, *_: Any, **__: Any) -> None:
        if layer.layer_idx == 0 and self.step is not None:
            self._add(self._entering + "text_embeds", entering)
        self._add(f"{self._leaving}layer/{layer.layer_idx}/hidden", found[0])

    def _on_key_value(self, _: Any, cache: Any, key: Any, value: Any) -> None:
        layer, key, value = self._layer_of_cache[id(cache)], key[...], value[...]
        self._written[layer].append(key)
        self._add(f"{self._leaving}layer/{layer}/key", key, axis=2)
        self._add(f"{self._leaving}layer/{layer}/value", value, axis=2)

    def _on_attention(self, _: Any, queries: Any, keys: Any, *__: Any, cache: Any, mask: Any, **___: Any) -> None:
        layer = self._layer_of_cache.get(id(cache))  # none where K/V are another layer's
        if layer is not None and layer in self._first:
            name = f"{self._entering}mask/{self._first[layer]}"
            self._attended[name].append(Attended(layer, mask, keys[...], queries.shape[2]))

    def _on_rope(self, _: Any, rope: Any, x: Any, offset: Any) -> None:
        """Of keys and of queries alike, which come to the same positions."""
        layer = self._layer_of_rope.get(id(rope))
        if layer is not None and x.shape[1] == self.text.layers[layer].self_attn.n_kv_heads:
            name = f"{self._entering}rope/{self._first[layer]}"
            self._rotated[name].append(Rotated(layer, offset, x.shape[2], x.dtype))

    def _on_pass(self, _: Any, __: Any, inputs: Any, **___: Any) -> None:
        if self.step is not None:
            self._last[self._entering + "token"] = inputs

    def _on_logits(self, logits: Any, *_: Any) -> None:
        self._last[self._leaving + "logits"] = logits[:, -1]

    def _on_patches(self, found: Any, *_: Any) -> None:
        self._last["vision/patch_embeds"] = found

    def _on_vision_layer(self, found: Any, block: Any, *_: Any) -> None:
        self._last[f"vision/layer/{self._layer_of_block[id(block)]}/hidden"] = found

    def _on_soft_tokens(self, found: Any, _: Any, pixels: Any, positions: Any = None) -> None:
        self._pictures = pixels, positions
        self._last["vision/soft_tokens"] = found[0]

    def _on_visual_embeds(self, found: Any, *_: Any) -> None:
        self._last["visual_embeds"] = found[0]

    # --- what it comes to --------------------------------------------------------------------------------------------

    def tensors(self, rotate: Callable[[Any, int, Rotated], Any]) -> dict[str, Array]:
        """Everything under its trace name; masks over the positions there were.

        Args:
            rotate: `rotate(rope, head_dim, rotated)` is what the layer's rotation makes of a unit vector in these rows.
        """
        found = {
            name: np.concatenate([self.as_numpy(part) for part in parts], axis)
            for name, (axis, parts) in self._rows.items()
        }
        found |= {name: self.as_numpy(array) for name, array in self._last.items()}
        if self._pictures is not None:
            found["pixel_values"], found["image_position_ids"] = self._patches(*self._pictures)
        for name, attended in self._attended.items():
            found[name] = self._mask(attended)
        for name, rotations in self._rotated.items():
            tables = [self._tables(rotated, rotate) for rotated in rotations]
            found[f"{name}/cos"], found[f"{name}/sin"] = (np.concatenate(part, 1) for part in zip(*tables, strict=True))
            if name.startswith("decode/"):
                found[name.partition("rope/")[0] + "position"] = self.as_numpy(rotations[0].offset).reshape(1)
        return found

    def _patches(self, pixels: Any, positions: Any) -> tuple[Array, Array]:
        """What entered the vision tower, as patches and their positions: a whole picture, unless it was given both."""
        if positions is None:
            return patches_of(self.as_numpy(pixels), self.vision.patch_size)
        return self.as_numpy(pixels), self.as_numpy(positions)

    def _mask(self, passes: Sequence[Attended]) -> Array:
        """bool [1, Q, n] of the passes' queries, over the positions there were when the last was done."""
        parts = []
        for seen in passes:
            written = np.concatenate([self.as_numpy(key) for key in self._written[seen.layer]], axis=2)
            positions = key_positions(self.as_numpy(seen.keys), written)
            mask = seen.mask if seen.mask is None or isinstance(seen.mask, str) else self.as_numpy(seen.mask)
            parts.append(visible(mask, positions, seen.queries, int(positions.max()) + 1))
        return np.concatenate([padded(part, parts[-1].shape[2], 2, False) for part in parts], axis=1)

    def _tables(self, rotated: Rotated, rotate: Callable[[Any, int, Rotated], Any]) -> tuple[Array, Array]:
        """cos and sin [1, rows, D] of one pass."""
        attention = self.text.layers[rotated.layer].self_attn
        return tables_of(self.as_numpy(rotate(attention.rope, attention.head_dim, rotated)))

"""The contract between the suite and a runtime under test: plain tensors or numpy arrays in and out.

Trace names under which a runtime reports intermediate tensors through `on_tensor` (B batch, S rows of the static
buffer, H hidden size, V soft tokens, L layers, P per-layer width, N patches, K keys, D head dim):

    vision/patch_embeds [1,N,Hv]   vision/layer/<i>/hidden [1,N,Hv]   vision/soft_tokens [V,Hv]
    text_embeds [B,S,H]   visual_embeds [V,H]   fused_embeds [B,S,H]   per_layer_inputs [B,S,L,P]
    mask/<layer_type> bool [B,Q,K], true = may attend   mask_bias/<layer_type> [B,1,Q,K], what is added to the scores
    rope/<layer_type>/cos|sin [B,S,D]
    prefill/layer/<i>/hidden [B,S,H]   prefill/layer/<i>/key|value [B,KV,S,D], after RoPE, of layers that store
    prefill/cache/<i>/key|value [B,KV,S,D], the whole buffer after prefill   prefill/logits [B,vocab]
    decode/<t>/...  likewise for the t-th decoded token, Q = 1 and K = S, with decode/<t>/token and decode/<t>/position
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from PIL import Image
from torch import Tensor

from g4conformance.runtime.layout import StaticLayout

if TYPE_CHECKING:
    from g4conformance.quantization.parameters import Quantization

OnTensor = Callable[[str, Tensor], object]
KeyValue = tuple[Tensor, Tensor]


class StopReason(StrEnum):
    """Why a generation ended."""

    STOP_TOKEN = "stop_token"
    MAX_NEW_TOKENS = "max_new_tokens"
    MAX_SEQ = "max_seq"


@dataclass(frozen=True)
class StaticInputs:
    """One request in the shape of the static buffers.

    Attributes:
        input_ids: int64 [B, S], placeholders kept, padded with the pad id.
        llm_input_ids: int64 [B, S], the same with placeholders replaced by the pad id.
        attention_mask: bool [B, S], true at the prompt's own rows.
        valid_length: number of the prompt's own rows.
        pixel_values: [1, N, 3 * patch_size ** 2] in the model's dtype, or None.
        image_position_ids: int64 [1, N, 2], (x, y) of each patch, -1 at padding patches, or None.
        processor_output: what the processor returned, for reuse.
    """

    input_ids: Tensor
    llm_input_ids: Tensor
    attention_mask: Tensor
    valid_length: int
    pixel_values: Tensor | None = None
    image_position_ids: Tensor | None = None
    processor_output: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class MasksAndRope:
    """What attention needs to know about positions, by layer type.

    Attributes:
        masks: bool [B, Q, K], true = may attend.
        biases: the masks as they are added to attention scores, [B, 1, Q, K] in the model's dtype.
        rope: (cos, sin), each [B, Q, head_dim].
    """

    masks: Mapping[str, Tensor]
    biases: Mapping[str, Tensor]
    rope: Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Generation:
    """The prompt's real ids followed by the new ones, and why it ended. A stop token is part of `token_ids`."""

    token_ids: tuple[int, ...]
    stop_reason: StopReason


@dataclass(frozen=True)
class LayerInputs:
    """What enters one decoder layer, in the shape of the static buffers: Q rows, S of them in prefill, 1 in decode.

    Attributes:
        hidden: [B, Q, H].
        per_layer_input: the layer's own [B, Q, P]; None without per-layer embeddings.
        mask, bias: bool [B, Q, S], true = may attend, and as it is added to the scores, [B, 1, Q, S].
        rope: (cos, sin) of its layer type, each [B, Q, D].
        key_value: the buffers that it reads, each [B, KV, S, D], zero where nothing was written: its own before this
            step, or, where it shares, its donor's with this step's rows.
        slot: which rows of the buffers this step fills, bool [S].
        past_len: rows before this step.
        new_rows: rows of this step; those of Q behind them are padding.
        stores: whether it makes K/V of its own, and writes them into the slot.
    """

    hidden: Tensor
    per_layer_input: Tensor | None
    mask: Tensor
    bias: Tensor
    rope: tuple[Tensor, Tensor]
    key_value: KeyValue
    slot: Tensor
    past_len: int
    new_rows: int
    stores: bool

    def unpadded(self) -> LayerInputs:
        """The same without padding, for a runtime with a growing cache: as many rows as there are."""
        new, total = self.new_rows, self.past_len + self.new_rows
        cos, sin = self.rope
        key, value = self.key_value
        known = self.past_len if self.stores else total
        own = self.per_layer_input
        return replace(
            self,
            hidden=self.hidden[:, :new],
            per_layer_input=None if own is None else own[:, :new],
            mask=self.mask[:, :new, :total],
            bias=self.bias[:, :, :new, :total],
            rope=(cos[:, :new], sin[:, :new]),
            key_value=(key[:, :, :known], value[:, :, :known]),
            slot=self.slot[:total],
        )


class Runtime(Protocol):
    """A Gemma 4 runtime under test. Only `prefill` is required; what is missing is reported as not observed.

    `prefill` and `load_state` begin a new request: cache rows beyond its own are zero, and nothing of an earlier
    request may show afterwards. What it returns and reports may be torch tensors or numpy arrays.

    Attributes, all of them optional:
        on_tensor: set by the suite while it listens; to be called with trace names as tensors come into being.
        arrays: what its methods are given, "torch" (the default) or "numpy".
        views: by trace name or pattern, how its own layouts become the contract's; see `adopting/views.py`.
        capabilities: what it does not support, such as {"images": False}; see `adopting/capabilities.py`.
    """

    on_tensor: OnTensor | None

    def for_layout(self, layout: StaticLayout) -> Runtime:
        """The runtime for `layout`: weights load once, one cached runtime a layout."""
        ...

    def reset(self) -> None:
        """Forgets every request: what `decode_one` then feeds is row 0."""
        ...

    def build_static_inputs(self, prompt: str, images: Sequence[Image.Image]) -> StaticInputs: ...

    def token_embedding(self, llm_input_ids: Tensor) -> Tensor:
        """[B, S] -> [B, S, H]."""
        ...

    def vision_prefill(self, pixel_values: Tensor, image_position_ids: Tensor) -> Tensor:
        """[1, N, 3 * patch_size ** 2], [1, N, 2] -> [V, H]."""
        ...

    def mm_fusion(self, text_embeds: Tensor, visual_embeds: Tensor) -> Tensor:
        """[B, S, H], [V, H] -> [B, S, H]."""
        ...

    def masks_and_rope(self, valid_length: int) -> MasksAndRope:
        """Masks [B, S, S] and rotary tables [B, S, head_dim] of a prompt of `valid_length` rows."""
        ...

    def prefill(
        self,
        inputs: StaticInputs,
        fused_embeds: Tensor | None = None,
        masks_and_rope: MasksAndRope | None = None,
    ) -> Tensor:
        """Logits [B, vocab] of the prompt's last row, after the softcap. What is not given is computed.

        A runtime may take `inputs` only, or no `masks_and_rope`: it is then not blamed for what it makes of them.
        """
        ...

    def load_state(self, key_values: Mapping[int, KeyValue], past_len: int) -> None:
        """Takes over K/V [B, KV, past_len, head_dim] of every storing layer, as if they had been prefilled."""
        ...

    def decode_one(self, token: int) -> Tensor:
        """Feeds one token at the next position: logits [B, vocab], after the softcap."""
        ...

    def select(self, logits: Tensor) -> tuple[int, StopReason | None]:
        """The next token of logits [B, vocab], and `STOP_TOKEN` if it ends the generation."""
        ...

    def generate(self, inputs: StaticInputs, max_new_tokens: int) -> Generation: ...

    def run_layer(self, i: int, inputs: LayerInputs) -> tuple[Tensor, ...]:
        """What decoder layer `i` returns, by itself: hidden [B,Q,H] and, where it stores them, its new K and V
        [B,KV,Q,D], after RoPE. Rows of padding may be left out.
        """
        ...

    @property
    def quantization(self) -> Quantization | None:
        """Scales and integers of a quantized runtime; a runtime with none is judged in floating point."""
        ...

    def run_graph(self, name: str, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """What one graph beside the decoder layers returns, by itself; asked of quantized runtimes only.

        "vision/patch_embeds", "vision/layer/<i>", "visual_embeds": what enters it, positions [1,N,2]
        "per_layer_inputs": ids [B,Q], embeddings [B,Q,H]
        "head": hidden [B,1,H]; it returns logits [B,vocab] in front of the softcap
        """
        ...

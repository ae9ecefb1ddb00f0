"""Gemma 4 by plain transformers code: shapes as the prompt has them, and a K/V cache that grows."""

import torch
from torch.nn.functional import pad
from transformers import AutoProcessor, DynamicCache, Gemma4ForConditionalGeneration

from g4conformance.runtime.contract import Generation, StaticInputs, StopReason


class PlainGemma4:
    def __init__(self, checkpoint):
        self.model = Gemma4ForConditionalGeneration.from_pretrained(checkpoint.name, dtype=checkpoint.dtype).eval()
        self.processor = AutoProcessor.from_pretrained(checkpoint.name)
        self.config, self.text_model = self.model.config, self.model.model.language_model
        self.placeholders = torch.tensor([self.config.image_token_id, self.config.audio_token_id])
        self.stops = {self.processor.tokenizer.eos_token_id, *self.model.generation_config.eos_token_id}
        self.max_seq, self.on_tensor = checkpoint.facts.default_max_seq, None

    def for_layout(self, layout):
        self.max_seq = layout.max_seq  # only the padding of what is handed over depends on it
        return self

    def reset(self):
        self.cache, self.steps = DynamicCache(config=self.config.text_config), 0

    def build_static_inputs(self, prompt, images):
        found = self.processor(text=prompt, images=list(images) or None, return_tensors="pt").to(self.model.dtype)
        length = found["input_ids"].shape[1]
        ids = pad(found["input_ids"], (0, self.max_seq - length), value=self.config.text_config.pad_token_id)
        valid, pictures = torch.arange(self.max_seq)[None] < length, found.get("image_position_ids")
        return StaticInputs(ids, self._llm_ids(ids), valid, length, found.get("pixel_values"), pictures)

    def token_embedding(self, llm_input_ids):
        return self._tell("text_embeds", self.text_model.embed_tokens(llm_input_ids))

    def vision_prefill(self, pixel_values, positions):
        return self._tell("visual_embeds", self.model.get_image_features(pixel_values, positions).pooler_output[0])

    def prefill(self, inputs, fused_embeds=None, masks_and_rope=None):
        self.reset()
        if fused_embeds is None:
            fused_embeds = self.token_embedding(inputs.llm_input_ids).clone()
            if (slot := inputs.input_ids == self.config.image_token_id).any():
                fused_embeds[slot] = self.vision_prefill(inputs.pixel_values, inputs.image_position_ids)
        return self._tell("prefill/logits", self._forward(inputs.llm_input_ids, fused_embeds, inputs.valid_length))

    def load_state(self, key_values, past_len):
        self.reset()
        for layer, key_value in key_values.items():
            self.cache.update(*key_value, layer)

    def decode_one(self, token):
        ids = self._llm_ids(torch.tensor([[token]]))
        self.steps += 1
        return self._tell(f"decode/{self.steps - 1}/logits", self._forward(ids, self.text_model.embed_tokens(ids)))

    def select(self, logits):
        token = int(logits[0].argmax())
        return token, StopReason.STOP_TOKEN if token in self.stops else None

    def generate(self, inputs, max_new_tokens):
        token, stop = self.select(self.prefill(inputs))
        ids = [*inputs.input_ids[0, : inputs.valid_length].tolist(), token]
        while stop is None and len(ids) < inputs.valid_length + max_new_tokens:
            token, stop = self.select(self.decode_one(token))
            ids.append(token)
        return Generation(tuple(ids), stop or StopReason.MAX_NEW_TOKENS)

    def _forward(self, ids, embeds, rows=None):  # padding stays outside: shapes are dynamic here
        per_layer = self.text_model.get_per_layer_inputs(ids[:, :rows])
        return self.model(inputs_embeds=embeds[:, :rows], per_layer_inputs=per_layer, cache=self.cache).logits[:, -1]

    def _llm_ids(self, ids):
        return ids.masked_fill(torch.isin(ids, self.placeholders), self.config.text_config.pad_token_id)

    def _tell(self, name, tensor):
        if self.on_tensor:
            self.on_tensor(name, tensor)
        return tensor

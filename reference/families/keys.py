"""One JSON object read key by key, so that keys that nothing asked for can be reported. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from reference.errors import CheckpointError

# Written by every exporter and without any meaning for the mathematics: bookkeeping, training, and the settings of
# generation that transformers 4 copied into every config.json.
IGNORED_KEYS = frozenset(
    """architectures auto_map dtype torch_dtype model_type transformers_version use_cache initializer_range
    attention_dropout _name_or_path _attn_implementation output_attentions output_hidden_states return_dict
    chunk_size_feed_forward is_encoder_decoder problem_type id2label label2id ignore_index quantization_config
    num_key_value_heads head_dim image_placeholder video_placeholder
    aux_loss_alpha seq_aux router_aux_loss_coef output_router_logits pretraining_tp ep_size
    add_cross_attention bad_words_ids begin_suppress_tokens cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id is_decoder length_penalty max_length min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores prefix pruned_heads
    remove_invalid_values repetition_penalty return_dict_in_generate sep_token_id suppress_tokens task_specific_params
    temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torchscript typical_p
    use_bfloat16""".split()
)
_MISSING = object()


class Keys:
    """One JSON object, read key by key; remembers what was asked for, so that the rest can be reported."""

    def __init__(self, data: Any, path: str = "") -> None:
        if not isinstance(data, dict):
            raise CheckpointError(f"{path or 'the file'} is not a JSON object", where="config.json")
        self.data, self.path, self.used, self.parts = data, path, set(), []

    def _name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def value(self, key: str, kind: type, default: Any = _MISSING) -> Any:
        """The value of `key`, checked to be of `kind`; null counts as absent. Raises CheckpointError naming the key."""
        self.used.add(key)
        found = self.data.get(key)
        if found is None:
            if default is _MISSING:
                raise CheckpointError(
                    f"key {self._name(key)!r} is missing",
                    where="config.json",
                    todo="the model cannot be built without it",
                )
            return default
        fits = isinstance(found, kind) and not (kind is not bool and isinstance(found, bool))
        if kind is float and isinstance(found, int) and not isinstance(found, bool):
            return float(found)
        if not fits:
            raise CheckpointError(
                f"key {self._name(key)!r} must be {kind.__name__}, got {found!r}", where="config.json"
            )
        return found

    def integer(self, key: str, default: Any = _MISSING) -> Any:
        return self.value(key, int, default)

    def number(self, key: str, default: Any = _MISSING) -> Any:
        return self.value(key, float, default)

    def flag(self, key: str, default: Any = _MISSING) -> Any:
        return self.value(key, bool, default)

    def text(self, key: str, default: Any = _MISSING) -> Any:
        return self.value(key, str, default)

    def integers(self, key: str, default: Any = _MISSING) -> Any:
        found = self.value(key, list, default)
        if found is not default and not all(isinstance(i, int) and not isinstance(i, bool) for i in found):
            raise CheckpointError(f"key {self._name(key)!r} must be a list of integers", where="config.json")
        return found

    def part(self, key: str, *, optional: bool = False) -> Keys | None:
        self.used.add(key)
        if optional and self.data.get(key) is None:
            return None
        if key not in self.data:
            raise CheckpointError(f"key {self._name(key)!r} is missing", where="config.json")
        part = Keys(self.data[key], self._name(key))
        self.parts.append(part)
        return part

    def unknown(self) -> Iterable[str]:
        yield from (self._name(key) for key in self.data if key not in self.used and key not in IGNORED_KEYS)
        for part in self.parts:
            yield from part.unknown()

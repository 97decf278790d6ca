"""Which models are served, and what their layers remember of the tokens that they saw. A table."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class Memory(StrEnum):
    """What a model's layers keep between two passes; it decides how passes are run."""

    ROWS = "rows"
    """A row of keys and values per position, which our attention reads: passes mix answers, prefixes can be cut."""
    STATES = "states"
    """What transformers' own cache holds: recurrent states, compressed keys. A cache per answer, shared as a whole."""
    NOTHING = "nothing"
    """The modelling code has no cache: every token runs the whole answer again."""


MEMORY: Final[Mapping[str, Memory]] = MappingProxyType(
    {
        "LlamaForCausalLM": Memory.ROWS,
        "MistralForCausalLM": Memory.ROWS,
        "Qwen2ForCausalLM": Memory.ROWS,
        "Qwen3ForCausalLM": Memory.ROWS,
        "Qwen3MoeForCausalLM": Memory.ROWS,
        "MixtralForCausalLM": Memory.ROWS,
        "DeepseekV3ForCausalLM": Memory.STATES,
        "Glm5NextForConditionalGeneration": Memory.STATES,
        "GlmMoeDsaForCausalLM": Memory.STATES,
        "KimiLinearForCausalLM": Memory.STATES,
        "Qwen3_5ForCausalLM": Memory.STATES,
        "Qwen3_5ForConditionalGeneration": Memory.STATES,
        "Qwen3_5MoeForCausalLM": Memory.STATES,
        "Qwen3_5MoeForConditionalGeneration": Memory.STATES,
        "DeepseekV41ForCausalLM": Memory.NOTHING,
        "KimiK3ForConditionalGeneration": Memory.NOTHING,
    }
)
"""By the architecture that a checkpoint's config names."""

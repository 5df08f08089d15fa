"""Fields of a Hugging Face configuration under the names of each family."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from yunlu.core.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

ALIASES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim", "n_embed"),
    "heads": (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
    ),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("head_dim", "d_kv", "kv_channels", "attention_head_dim"),
    "ffn": (
        "intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "d_ff", "encoder_ffn_dim",
        "hidden_dim",
    ),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "experts": (
        "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts",
        "num_routed_experts",
    ),
    "active": (
        "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k",
        "top_k_experts", "moe_top_k",
    ),
    "expert_ffn": ("moe_intermediate_size", "expert_ffn_hidden_size", "expert_intermediate_size"),
    "shared_ffn": (
        "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
    ),
    "shared_count": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "first_dense": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    "every": ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq"),
    "decoder_layers": ("num_decoder_layers", "decoder_layers"),
    "mixer_heads": ("mamba_num_heads", "mamba_n_heads"),
    "mixer_head_dim": ("mamba_head_dim", "mamba_d_head"),
    "mixer_groups": ("mamba_n_groups", "n_groups"),
    "mixer_kernel": ("conv_kernel", "mamba_d_conv", "linear_conv_kernel_dim"),
    "mixer_state": ("ssm_state_size", "mamba_d_state"),
}  # fmt: skip
"""Our name and those in configurations; the most common first."""


class Fields:
    """A configuration with its family's defaults and its source."""

    def __init__(
        self, config: Mapping[str, Any], *, where: str, defaults: Mapping[str, Any]
    ) -> None:
        self.config = config
        self.where = where
        self._defaults = defaults

    def get(self, name: str, otherwise: Any = None) -> Any:
        """The field of this name, else the family's default, else ``otherwise``."""
        value = self.config.get(name)
        return self._defaults.get(name, otherwise) if value is None else value

    def flag(self, given: bool | str) -> bool:
        """A boolean, or the field that holds it."""
        return bool(self.get(given, otherwise=False)) if isinstance(given, str) else given

    def need(self, meaning: str, expected: str) -> int:
        """A required size of at least 1."""
        value = self.size(meaning, 0)
        if value == 0:
            names = ALIASES[meaning]
            raise ModelError(
                f"{self.where}: the field {names[0]!r} is missing: {expected}.",
                hint=f"add it (or {' or '.join(map(repr, names[1:]))})"
                if len(names) > 1
                else "add it",
            )
        return value

    def size(self, meaning: str, otherwise: int) -> int:
        """A size under any of its names; ``otherwise`` where absent, null or 0."""
        names = ALIASES[meaning]
        for source in (self.config, self._defaults):
            for name in names:
                if source.get(name) is not None:
                    return self._whole(name, source[name]) or otherwise
        return otherwise

    def number(self, name: str, otherwise: int) -> int:
        """An integer of this name."""
        value = self.get(name)
        return otherwise if value is None else self._whole(name, value)

    def _whole(self, name: str, value: Any) -> int:
        if isinstance(value, list | tuple) and value and len(set(map(str, value))) == 1:
            value = value[0]  # one entry for each block, all equal
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
            raise ModelError(
                f"{self.where}: the field {name!r} is {value!r}; expected a whole number."
            )
        if value < 0:
            raise ModelError(f"{self.where}: the field {name!r} is {value}; expected at least 0.")
        return int(value)

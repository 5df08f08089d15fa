"""Packing for Hugging Face encoders: samples are concatenated instead of padded.

The model keeps its usual inputs. Only its encoder, between embeddings and pooling, works on packed
tokens: padding is removed on the way in and restored as zeros on the way out, and attention is computed
per sample. Head, positions and export stay the model's own.

Shapes: B batch, L length, T tokens of all samples, D width, H heads, K width of a head.
"""

# ruff: noqa: N803, N806 - capital letters in names are shapes

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from yunlu.training.models.hf import is_hf
from yunlu.training.models.transformer import attend_apart

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

_ATTENTION = "yunlu_packed"
_PROBED_LENGTHS = (5, 1, 3, 7)
_PROBED_SPREAD = 1e-4


class HFPacking:
    """Removes padding inside the encoder of one model; inactive without lengths."""

    def __init__(self, model: nn.Module) -> None:
        """Install hooks on the model permanently: recomputed layers need them in the backward pass."""
        encoder = _find_encoder(model)
        if encoder is None:
            raise ValueError(f"{type(model).__name__} has no encoder that can be packed")
        _register_attention()
        self._lengths: list[int] | None = None
        self._token_indices_T: Tensor | None = None
        self._shape = (0, 0)
        self._config: Any = model.config
        self._before = self._config._attn_implementation
        self._config._attn_implementation = _ATTENTION
        self._hooks = (
            encoder.register_forward_pre_hook(self._remove_padding, with_kwargs=True),
            encoder.register_forward_hook(self._restore_padding),
        )

    @contextmanager
    def of(self, lengths: Sequence[int]) -> Generator[None]:
        """Context for calls of the model with samples of these lengths, padded at the end."""
        self._lengths = list(lengths)
        try:
            yield
        finally:
            self._lengths = None

    def remove(self) -> None:
        """Remove the hooks."""
        self._config._attn_implementation = self._before
        for hook in self._hooks:
            hook.remove()

    def _remove_padding(
        self, encoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        del encoder
        if self._lengths is None:
            return None
        kwargs = dict(kwargs)
        hidden_BLD = args[0] if args else kwargs.pop("hidden_states")
        self._shape = hidden_BLD.shape[:2]
        rows = [torch.arange(n) + i * self._shape[1] for i, n in enumerate(self._lengths)]
        self._token_indices_T = torch.cat(rows).to(hidden_BLD.device)
        packed_1TD = hidden_BLD.flatten(0, 1).index_select(0, self._token_indices_T)[None]
        return (packed_1TD, *args[1:]), {**kwargs, "packed_lengths": self._lengths}

    def _restore_padding(self, encoder: nn.Module, args: Any, output: Any) -> Any:
        del encoder, args
        if self._lengths is None:
            return None
        assert self._token_indices_T is not None
        is_bare = isinstance(output, Tensor)
        packed_1TD: Tensor = output if is_bare else output[0]
        empty = packed_1TD.new_zeros(self._shape[0] * self._shape[1], packed_1TD.shape[2])
        hidden_BLD = empty.index_copy(0, self._token_indices_T, packed_1TD[0]).unflatten(
            0, self._shape
        )
        if is_bare:
            return hidden_BLD
        if isinstance(output, tuple):
            return (hidden_BLD, *output[1:])
        output.last_hidden_state = hidden_BLD
        return output


_packings: WeakKeyDictionary[nn.Module, HFPacking] = WeakKeyDictionary()


def call_packed(model: nn.Module, inputs: dict[str, Tensor], lengths: Sequence[int]) -> Any:
    """Call the model on padded inputs, computed without the padding."""
    inner = getattr(model, "module", model)  # of a data-parallel wrapper
    if inner not in _packings:
        _packings[inner] = HFPacking(inner)
    with _packings[inner].of(lengths):
        return model(**inputs)


def can_pack_hf(model: nn.Module) -> bool:
    """Whether packing gives the same outputs; tested on a few random tokens."""
    if not is_hf(model) or _find_encoder(model) is None or not _has_plain_attention(model):
        return False
    packing = HFPacking(model)
    was_training = model.training
    model.eval()
    try:
        return _gives_same_outputs(model, packing)
    except Exception:  # noqa: BLE001 - any error of an unknown architecture means it cannot be packed
        return False
    finally:
        model.train(was_training)
        packing.remove()


def _gives_same_outputs(model: nn.Module, packing: HFPacking) -> bool:
    config: Any = model.config
    lengths, device = torch.tensor(_PROBED_LENGTHS), next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    shape = (len(lengths), int(lengths.max()))
    ids_BL = torch.randint(0, config.vocab_size, shape, generator=generator)
    pad = config.pad_token_id
    if pad is not None:  # must not occur among real tokens
        ids_BL = torch.where(ids_BL == pad, (pad + 1) % config.vocab_size, ids_BL)
    mask_BL = torch.arange(shape[1]) < lengths[:, None]
    ids_BL = ids_BL.masked_fill(~mask_BL, pad or 0)
    inputs = {"input_ids": ids_BL.to(device), "attention_mask": mask_BL.long().to(device)}
    with torch.no_grad():
        padded = model(**inputs).logits
        with packing.of(_PROBED_LENGTHS):
            packed = model(**inputs).logits
    # Untrained models give nearly equal outputs: compare with the spread between outputs.
    spread = (padded - padded.mean(dim=0)).abs().max()
    return bool((padded - packed).abs().max() <= _PROBED_SPREAD * spread)


def _find_encoder(model: nn.Module) -> nn.Module | None:
    """The module between embeddings and pooling that only runs its layers."""
    for module in model.modules():
        children = dict(module.named_children())
        if set(children) == {"layer"} and isinstance(children["layer"], nn.ModuleList):
            return module
    return None


def _has_plain_attention(model: nn.Module) -> bool:
    """Whether it uses torch's attention without a window: the probe's samples are too short to tell."""
    config: Any = model.config
    names = ("sliding_window", "local_attention", "attention_window", "layer_types")
    is_local = any(getattr(config, name, None) for name in names)
    return config._attn_implementation == "sdpa" and not is_local


def _register_attention() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415 - optional
    from transformers.masking_utils import sdpa_mask  # noqa: PLC0415

    AttentionInterface.register(_ATTENTION, _attend)
    AttentionMaskInterface.register(_ATTENTION, sdpa_mask)


def _attend(
    module: nn.Module,
    query_BHLK: Tensor,
    key_BHLK: Tensor,
    value_BHLK: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    packed_lengths: Sequence[int] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The library's own attention, or packed attention if lengths are given."""
    if packed_lengths is None:
        from transformers.integrations.sdpa_attention import (  # noqa: PLC0415
            sdpa_attention_forward,
        )

        return sdpa_attention_forward(
            module, query_BHLK, key_BHLK, value_BHLK, attention_mask,
            dropout=dropout, scaling=scaling, **kwargs,
        )  # fmt: skip
    output_THK = attend_apart(
        query_BHLK[0],
        key_BHLK[0],
        value_BHLK[0],
        packed_lengths,
        packed_lengths,
        causal=bool(getattr(module, "is_causal", False)),
        dropout=dropout,
        scale=scaling,
    )
    return output_THK[None], None

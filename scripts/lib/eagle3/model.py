"""The EAGLE-3 drafter network, as SGLang's `LlamaForCausalLMEagle3` computes it.

Shapes: T tokens, H hidden size, A attention heads, G key/value heads, E head size, D draft vocabulary, V target vocabulary.
The token embedding is the target's and stays outside: callers pass embedded tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from scripts.lib.eagle3.cache import DraftCache, LayerCache

# SGLang's Llama family reads neither key of DeepSeek's yarn; a drafter that kept them would be rotated differently when served.
UNREAD_ROPE_KEYS = ("mscale", "mscale_all_dim")


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes of a drafter and the target layers that it listens to, as boundary ids.

    EAGLE-3.1: `fc_norm` norms each of the target's states before `fc`, `norm_output` feeds back states behind `norm`, not before it.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    draft_vocab_size: int
    max_position_embeddings: int
    rope_parameters: dict[str, Any]
    boundaries: tuple[int, ...]
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    num_hidden_layers: int = 1
    fc_norm: bool = False
    norm_output: bool = False

    @classmethod
    def from_target(cls, target: PretrainedConfig, draft_vocab_size: int, boundaries: tuple[int, ...]) -> "DrafterConfig":
        """Take sizes, rotary embedding and positions from the target's config, or its text part when it has several.

        `intermediate_size` is the one of these sizes that may be replaced by another: no state of the target has it.
        """
        text = target.get_text_config()
        rope = {key: value for key, value in text.rope_parameters.items() if key not in UNREAD_ROPE_KEYS}
        # Multi-head latent attention names only the parts of a head; its value part is the size of a plain one.
        head_dim = getattr(text, "v_head_dim", None) or getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return cls(
            hidden_size=text.hidden_size,
            intermediate_size=text.intermediate_size,
            num_attention_heads=text.num_attention_heads,
            num_key_value_heads=text.num_key_value_heads,
            head_dim=head_dim,
            rms_norm_eps=text.rms_norm_eps,
            vocab_size=text.vocab_size,
            draft_vocab_size=draft_vocab_size,
            max_position_embeddings=text.max_position_embeddings,
            rope_parameters=rope,
            boundaries=tuple(boundaries),
            bos_token_id=text.bos_token_id,
            eos_token_id=text.eos_token_id,
        )


class Rotary:
    """Rotary position embedding from a config's `rope_parameters`.

    No module: `Drafter.to(bfloat16)` must not round the frequencies.
    """

    def __init__(self, config: DrafterConfig) -> None:
        llama = LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(config.rope_parameters),
        )
        with torch.device("cpu"):  # also while the drafter is built without memory
            embedding = LlamaRotaryEmbedding(llama)
        self.frequencies = embedding.inv_freq.float()
        self.scaling = embedding.attention_scaling

    def __call__(self, states: Tensor, positions: Tensor) -> Tensor:
        """Turn `states` [T, heads, E] at `positions` [T]."""
        self.frequencies = self.frequencies.to(states.device)
        angles = positions[:, None].float() * self.frequencies
        cos = (torch.cat([angles, angles], -1).cos() * self.scaling).to(states.dtype)[:, None]
        sin = (torch.cat([angles, angles], -1).sin() * self.scaling).to(states.dtype)[:, None]
        first, second = states.chunk(2, -1)
        return states * cos + torch.cat([-second, first], -1) * sin


class Attention(nn.Module):
    """Projections of grouped-query attention whose input is `width` W wide."""

    def __init__(self, config: DrafterConfig, width: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(width, heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, groups * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, groups * config.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * config.head_dim, config.hidden_size, bias=False)
        self.rotary = Rotary(config)

    def queries(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """Rotated queries [T, A, E] of `inputs` [T, W] at `positions` [T]."""
        return self.rotary(self.q_proj(inputs).unflatten(-1, (-1, self.head_dim)), positions)

    def keys_values(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values, both [T, G, E], of `inputs` [T, W] at `positions` [T]."""
        keys = self.k_proj(inputs).unflatten(-1, (-1, self.head_dim))
        return self.rotary(keys, positions), self.v_proj(inputs).unflatten(-1, (-1, self.head_dim))


class GatedMLP(nn.Module):
    """SiLU-gated feed-forward block."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """[T, H] to [T, H]."""
        return self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))


class DecoderLayer(nn.Module):
    """A pre-norm decoder layer. The `first` one of a drafter sees [normed embedding; normed feature], the others their normed stream alone.

    The residual stream is what comes in, not normed: the feature, or what the layer before gave.
    """

    def __init__(self, config: DrafterConfig, first: bool) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.first = first
        self.self_attn = Attention(config, 2 * size if first else size)
        self.mlp = GatedMLP(config)
        if first:
            self.input_layernorm = nn.RMSNorm(size, eps)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)

    def inputs(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """What the projections see, [T, 2H] or [T, H], of `embeds` and `hidden`, both [T, H]."""
        normed = self.hidden_norm(hidden)
        return torch.cat([self.input_layernorm(embeds), normed], -1) if self.first else normed

    def decode(self, embeds: Tensor, hidden: Tensor, positions: Tensor, cache: LayerCache) -> Tensor:
        """The layer's output [T, H] of `embeds` and `hidden` [T, H]: each token sees the cache, the tokens before it, and itself.

        `positions` [T]. Appends T tokens to `cache`.
        """
        inputs = self.inputs(embeds, hidden)
        queries = self.self_attn.queries(inputs, positions)
        before = cache.length
        keys, values = cache.append(*self.self_attn.keys_values(inputs, positions))
        count = len(embeds)
        mask = torch.ones(count, before + count, dtype=torch.bool, device=embeds.device).tril(before) if count > 1 else None
        attended = functional.scaled_dot_product_attention(
            queries.transpose(0, 1)[None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None], mask, enable_gqa=True
        )
        return self.finish(attended[0].transpose(0, 1), hidden)

    def finish(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """The layer's output [T, H] from `attended` [T, A, E] and the residual `hidden` [T, H]."""
        hidden = hidden + self.self_attn.o_proj(attended.flatten(1))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Drafter(nn.Module):
    """EAGLE-3 drafter: `fc` fuses three target states, one decoder layer or several draft, the last one's output is fed back."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DrafterConfig, d2t: Tensor, t2d: Tensor) -> None:
        """Random weights; `d2t` i64[D] holds offsets (target id = draft id + d2t[draft id]), `t2d` bool[V] marks kept ids."""
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.boundaries) * config.hidden_size, config.hidden_size, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in config.boundaries)
        self.midlayer = DecoderLayer(config, first=True)
        # Engines know the first layer by either name, and the others by their number.
        self.layers = nn.ModuleDict({str(number): DecoderLayer(config, first=False) for number in range(1, config.num_hidden_layers)})
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", d2t)
        self.register_buffer("t2d", t2d)

    @property
    def target_ids(self) -> Tensor:
        """The target id of every draft id, i64[D]."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @property
    def decoder(self) -> list[DecoderLayer]:
        """All decoder layers in order."""
        return [self.midlayer, *cast(Iterable[DecoderLayer], self.layers.values())]

    def fuse(self, aux: Tensor) -> Tensor:
        """Features [T, H] from the target's states `aux` [T, 3H] or [T, 3, H] at the boundaries."""
        if self.config.fc_norm:
            states = aux.unflatten(1, (len(self.fc_norm), -1)) if aux.dim() == 2 else aux
            aux = torch.stack([norm(state) for norm, state in zip(self.fc_norm, states.unbind(1), strict=True)], 1)
        return self.fc(aux.flatten(1))

    def fed_back(self, states: Tensor) -> Tensor:
        """What the next draft step takes as features [T, H] after draft `states` [T, H] before `norm`."""
        return self.norm(states) if self.config.norm_output else states

    def decode(self, embeds: Tensor, hidden: Tensor, positions: Tensor, cache: DraftCache) -> Tensor:
        """Draft states [T, H] before `norm`: each token sees the cache, the tokens before it, and itself.

        `embeds` [T, H] are the embedded *next* tokens, `hidden` [T, H] is `fuse(aux)` of the tokens themselves or, while
        drafting, what is `fed_back` of the step before; `positions` [T]. Appends T tokens to `cache`.
        """
        for number, layer in enumerate(self.decoder):
            hidden = layer.decode(embeds, hidden, positions, cache.layers[number])
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [T, D] over the draft vocabulary of draft states `hidden` [T, H]."""
        return self.lm_head(self.norm(hidden))

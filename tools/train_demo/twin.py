"""A PyTorch twin of mlx-lm's `qwen3_5` text model: the same function, with a fast backward pass on a CPU.

Names follow mlx-lm's, so that the export is a renaming. The gated delta rule is computed chunk by chunk (Yang et al.,
"Gated Delta Networks", 2024, and "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", 2024).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

CHUNK = 32
"""Tokens that the delta rule takes at once; a batch is padded to a multiple."""
WINDOW = 16
"""Dimensions for each of the tokens before, where training starts."""


def demo_config(vocab_size: int) -> dict[str, Any]:
    """The `text_config` of the demo's model, in mlx-lm's terms: a recurrent layer, and one of full attention."""
    return {
        "model_type": "qwen3_5_text",
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "full_attention_interval": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    }


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight, 1e-6)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """The recurrence `S = decay * S; S += k (beta * (v - k S))`, read with q after each token.

    q, k, v: [rows, tokens, head_dim]; log_decay, beta: [rows, tokens]; tokens is a multiple of CHUNK.
    """
    rows, num_tokens, key_dim = q.shape
    chunks = num_tokens // CHUNK
    q, k, v = (x.view(rows, chunks, CHUNK, -1) for x in (q, k, v))
    since = log_decay.view(rows, chunks, CHUNK).cumsum(-1)
    beta = beta.view(rows, chunks, CHUNK, 1)
    is_past = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    decay = (since[..., :, None] - since[..., None, :]).masked_fill(~is_past, -1e9).exp()
    k_beta, k_t = k * beta, k.transpose(-1, -2)
    # Within a chunk each write sees the writes before it: (I - A)^-1 with A nilpotent, by doubling.
    power = -((k_beta @ k_t) * decay).tril(-1)
    inverse = torch.eye(CHUNK) + power
    for _ in range(CHUNK.bit_length() - 2):
        power = power @ power
        inverse = inverse + inverse @ power
    gain = since.exp()[..., None]
    written, read = (inverse @ torch.cat([v * beta, k_beta * gain], -1)).split([v.shape[-1], key_dim], -1)
    within = (q @ k_t) * decay
    q_gain = q * gain
    k_left = (k * (since[..., -1:] - since).exp()[..., None]).transpose(-1, -2)
    chunk_gain = gain[..., -1:, :]
    state = q.new_zeros(rows, key_dim, v.shape[-1])
    outputs: list[Tensor] = []
    parts = (x.unbind(1) for x in (written, read, q_gain, within, k_left, chunk_gain))
    for written_i, read_i, q_i, within_i, k_i, gain_i in zip(*parts, strict=True):
        new = torch.baddbmm(written_i, read_i, state, alpha=-1)
        outputs.append(torch.baddbmm(torch.bmm(q_i, state), within_i, new))
        state = torch.baddbmm(state * gain_i, k_i, new)
    return torch.stack(outputs, 1).view(rows, num_tokens, -1)


class GatedDeltaNet(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.heads, self.head_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
        self.kernel = config["linear_conv_kernel_dim"]
        inner = self.heads * self.head_dim
        self.in_proj_qkv = nn.Linear(width, 3 * inner, bias=False)
        self.in_proj_z = nn.Linear(width, inner, bias=False)
        self.in_proj_b = nn.Linear(width, self.heads, bias=False)
        self.in_proj_a = nn.Linear(width, self.heads, bias=False)
        self.conv1d = nn.Conv1d(3 * inner, 3 * inner, self.kernel, groups=3 * inner, bias=False)
        self.dt_bias = nn.Parameter(torch.zeros(self.heads))
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        self.norm = RMSNorm(self.head_dim)
        self.out_proj = nn.Linear(inner, width, bias=False)

    @torch.no_grad()
    def start_as_memory(self) -> None:
        """Start near a memory: what followed the same few tokens before is read again.

        Queries and keys begin with one projection, the key's window a token earlier than the query's, what is written
        comes out as it came in, and nearly nothing decays (after Trockman et al., "Mimetic Initialization Helps State
        Space Models Learn to Recall", 2024). From a random start recall takes many times the tokens.

        Those are the first two heads. The other two forget at once, and write what stands one, two and three tokens
        before, each in directions of its own: `window`.
        """
        memory = 2 * self.head_dim
        q, k, v = self.in_proj_qkv.weight.split(2 * memory)
        k.copy_(q)
        nn.init.orthogonal_(v)
        self.out_proj.weight.copy_(v.T * 0.3)
        q_taps, k_taps, v_taps = self.conv1d.weight.normal_(std=0.05).split(2 * memory)
        # Most of the weight on the token before: what a fact is about stands before its "is".
        taps = torch.randn(2 * memory, 1, self.kernel - 1) * torch.tensor([0.3, 1.0, 0.3])
        q_taps[..., 1:] += taps
        k_taps[:memory, :, :-1] += taps[:memory]
        k_taps[memory:] = q_taps[memory:]
        v_taps[:memory, :, -1] += 1
        v_taps[memory:] = 0.0
        for at, before in enumerate((1, 2, 3, 3)):
            part = slice(memory + at * WINDOW, memory + (at + 1) * WINDOW)
            v[part] = v[-WINDOW:]
            v_taps[part, :, -1 - before] = 1.0
        self.dt_bias.copy_(torch.tensor([-9.0, -8.0, 2.0, 2.0]))
        # Open gates, by the part that all embeddings share.
        self.in_proj_z.weight.normal_(std=0.02)[:, 0] = 0.5

    @property
    def window(self) -> tuple[Tensor, ...]:
        """The directions of what stands one token before, two, and three: columns [width, WINDOW]."""
        return self.out_proj.weight[:, -4 * WINDOW :].split(WINDOW, -1)

    def forward(self, x: Tensor) -> Tensor:
        batch, num_tokens, _ = x.shape
        mixed = functional.pad(self.in_proj_qkv(x).transpose(1, 2), (self.kernel - 1, 0))
        mixed = functional.silu(self.conv1d(mixed)).view(batch, 3, self.heads, self.head_dim, num_tokens)
        q, k, v = mixed.transpose(-1, -2).reshape(batch, 3, self.heads, num_tokens, self.head_dim).unbind(1)
        q, k = functional.normalize(q, dim=-1) * self.head_dim**-0.5, functional.normalize(k, dim=-1)
        log_decay = -self.A_log.exp() * functional.softplus(self.in_proj_a(x) + self.dt_bias)
        by_head = (y.transpose(1, 2).reshape(-1, num_tokens) for y in (log_decay, self.in_proj_b(x).sigmoid()))
        rows = (y.reshape(-1, num_tokens, self.head_dim) for y in (q, k, v))
        out = gated_delta_rule(*rows, *by_head).view(batch, self.heads, num_tokens, self.head_dim).transpose(1, 2)
        gate = functional.silu(self.in_proj_z(x))
        return self.out_proj(self.norm(out).reshape(batch, num_tokens, -1) * gate)


class Attention(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.heads, self.head_dim = config["num_attention_heads"], config["head_dim"]
        inner = self.heads * self.head_dim
        self.q_proj = nn.Linear(width, 2 * inner, bias=False)
        self.k_proj = nn.Linear(width, inner, bias=False)
        self.v_proj = nn.Linear(width, inner, bias=False)
        self.o_proj = nn.Linear(inner, width, bias=False)
        self.q_norm, self.k_norm = RMSNorm(self.head_dim), RMSNorm(self.head_dim)
        rope = config["rope_parameters"]
        self.half = int(self.head_dim * rope["partial_rotary_factor"]) // 2
        self.theta = rope["rope_theta"]

    @torch.no_grad()
    def start_as_match(self, window: tuple[Tensor, ...]) -> None:
        """Start by looking where the same stood before, and passing on what stands there.

        The first head looks where what stands one token before here stands two before, the second with two and three:
        what comes after "Anna's code is", and after the letter of the code. Each sees both in a rotation of its own,
        behind the dimensions that turn with the position. The other heads look nowhere in particular.
        """
        self.k_proj.weight.normal_(std=self.k_proj.weight.shape[1] ** -0.5 * 0.1)
        queries = self.q_proj.weight.view(self.heads, 2 * self.head_dim, -1)[:, : self.head_dim]
        queries.normal_(std=queries.shape[-1] ** -0.5 * 0.1)
        keys = self.k_proj.weight.view(self.heads, self.head_dim, -1)
        for head, (asked, stored) in enumerate(((0, 1), (1, 2))):
            turned = nn.init.orthogonal_(torch.empty(WINDOW, WINDOW))
            queries[head, -WINDOW:] = turned @ window[asked].T
            keys[head, -WINDOW:] = turned @ window[stored].T
        self.q_norm.weight.fill_(1.5)
        self.k_norm.weight.fill_(1.5)
        nn.init.orthogonal_(self.v_proj.weight)
        self.o_proj.weight.copy_(self.v_proj.weight.T)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotary positions on the first `2 * half` dimensions."""
        angles = torch.arange(x.shape[-2])[:, None] * self.theta ** (-torch.arange(self.half) / self.half)
        cos, sin = angles.cos(), angles.sin()
        a, b, rest = x.split([self.half, self.half, self.head_dim - 2 * self.half], -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1)

    def forward(self, x: Tensor) -> Tensor:
        batch, num_tokens, _ = x.shape
        q, gate = self.q_proj(x).view(batch, num_tokens, self.heads, 2 * self.head_dim).chunk(2, -1)
        k, v = (proj(x).view(batch, num_tokens, self.heads, self.head_dim) for proj in (self.k_proj, self.v_proj))
        q, k = self.rotate(self.q_norm(q).transpose(1, 2)), self.rotate(self.k_norm(k).transpose(1, 2))
        out = functional.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True).transpose(1, 2)
        return self.o_proj((out * gate.sigmoid()).reshape(batch, num_tokens, -1))


class MLP(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class TwinLayer(nn.Module):
    def __init__(self, config: dict[str, Any], *, is_linear: bool) -> None:
        super().__init__()
        self.is_linear = is_linear
        if is_linear:
            self.linear_attn = GatedDeltaNet(config)
        else:
            self.self_attn = Attention(config)
        self.input_layernorm = RMSNorm(config["hidden_size"])
        self.post_attention_layernorm = RMSNorm(config["hidden_size"])
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        mixer = self.linear_attn if self.is_linear else self.self_attn
        x = x + mixer(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Twin(nn.Module):
    """The language model. Its output matrix is its embedding."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(TwinLayer(config, is_linear=is_linear) for is_linear in (True, False))
        self.norm = RMSNorm(config["hidden_size"])
        for name, value in self.named_parameters():
            if value.ndim == 2:
                is_output = any(part in name for part in ("o_proj", "out_proj", "down_proj"))
                nn.init.normal_(value, std=value.shape[1] ** -0.5 * (0.05 if is_output else 1.0))
        with torch.no_grad():
            self.embed_tokens.weight[:, 0] = 0.3
        memory, match = self.layers
        memory.linear_attn.start_as_memory()
        match.self_attn.start_as_match(memory.linear_attn.window)

    def forward(self, tokens: Tensor, where: Tensor) -> Tensor:
        """Logits [places, vocabulary] at the places `where` the mask [batch, tokens] is true."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return functional.linear(self.norm(x[where]), self.embed_tokens.weight)

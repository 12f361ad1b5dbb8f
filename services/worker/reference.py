"""The reference backend: any `DecoderSpec` in plain torch, on any device. It is the oracle of the other backends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.executor import Executor, Ints, Logits, StepBatch, Weight
from services.worker.quantize import BLOCK_FORMATS, Format, Formats, quantise, quantise_rows
from services.worker.spec import DecoderSpec, RopeSpec
from shared.errors import StartupError

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
WIDENED_ELEMENTS = 1 << 20
QUERY_TILE = 256  # rows of a prefill chunk that attend at once; bounds the mask to QUERY_TILE x context


@dataclass
class AttentionTile:
    """N sequences with n query rows each, whose keys are padded to a common length C."""

    rows: Tensor  # [N, n] int64, indexes into the step's rows
    slots: Tensor  # [N, C] int64, cache slots (block * block_size + offset) of the keys
    mask: Tensor  # [N, 1, group * n, C], 0 where a query sees a key, else -inf


class ReferenceExecutor(Executor):
    """Implements `Executor`. Linear layers run over all rows of a step.

    `dtype` is that of weights and KV cache: "float32", "bfloat16" or "float16"; activations, sums and logits are
    float32, so that how a step is put together moves no more than the last bits. Weights that `formats` names are
    quantised and held dequantised, and the activations that meet w8 ones are rounded likewise. Raises StartupError for
    an activation it does not know and for missing weights.
    """

    backend = "reference"
    arithmetic = "reference"

    def __init__(
        self, spec: DecoderSpec, dtype: str, block_size: int, device: str = "cpu", formats: Formats | None = None
    ) -> None:
        if spec.activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise StartupError(f"activation {spec.activation!r} is not supported; the known ones are {known}")
        self.spec = spec
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.block_size = block_size
        self.device = torch.device(device)
        self._formats = formats or {}
        self._weights: dict[str, Tensor] = {}
        self._keys: list[Tensor] = []  # per layer [num_blocks * block_size, kv_heads, head_dim]
        self._values: list[Tensor] = []

    def load(self, weights: Iterable[tuple[str, Weight]]) -> None:
        """Takes all weights by their canonical names."""
        for name, weight in weights:
            if name in self._formats:
                self._weights[name] = quantised(weight, self._formats[name]).to(self.device)
            else:
                self._weights[name] = as_tensor(weight).to(self.device, self.dtype)
        shapes = self.spec.weight_shapes()
        for name, shape in shapes.items():
            found = tuple(self._weights[name].shape) if name in self._weights else None
            if found != shape:
                raise StartupError(f"weight {name} should have shape {shape}, got {found}")

    def weight_bytes(self) -> int:
        """Bytes of the weights, quantised ones in float32."""
        sizes = {name: 4 if name in self._formats else self.dtype.itemsize for name in self.spec.weight_shapes()}
        return sum(math.prod(shape) * sizes[name] for name, shape in self.spec.weight_shapes().items())

    def block_bytes(self) -> int:
        """Bytes of one KV block over all layers, keys and values."""
        spec = self.spec
        per_token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * self.dtype.itemsize
        return per_token * self.block_size

    def allocate_kv(self, num_blocks: int) -> None:
        """Makes the KV cache, untouched: no row ever attends to a slot that was not written before."""
        shape = (num_blocks * self.block_size, self.spec.num_kv_heads, self.spec.head_dim)
        layers = range(self.spec.num_layers)
        self._keys = [torch.empty(shape, dtype=self.dtype, device=self.device) for _ in layers]
        self._values = [torch.empty(shape, dtype=self.dtype, device=self.device) for _ in layers]

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copies whole blocks, (source, destination), one after the other."""
        size = self.block_size
        for cache in (*self._keys, *self._values):
            for source, target in pairs:
                cache[target * size : (target + 1) * size] = cache[source * size : (source + 1) * size]

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Logits:
        """Runs one step; returns the logits of `batch.logit_rows`, [R, vocab]."""
        spec, weights = self.spec, self._weights
        x = F.embedding(self._on_device(batch.tokens), weights["embed.weight"]).float()  # [T, hidden]
        cos, sin = rotations(spec.rope, self._on_device(batch.positions))
        slots = self._on_device(new_slots(batch, self.block_size))
        tiles = {window: list(self._tiles(batch, window)) for window in set(spec.windows)}
        for i, window in enumerate(spec.windows):
            normed = self._norm(x, f"layers.{i}.attn_norm")
            x = x + self._attention(i, normed, cos, sin, slots, tiles[window])
            x = x + self._mlp(i, self._norm(x, f"layers.{i}.mlp_norm"))
        last = self._norm(x[self._on_device(batch.logit_rows)], "final_norm")  # [R, hidden]
        logits = self._linear(last, "embed" if spec.tie_embeddings else "lm_head")
        capped: Logits = cap_softly(logits, spec.final_logit_softcap).cpu().numpy()
        return capped

    def _attention(
        self, i: int, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, tiles: list[AttentionTile]
    ) -> Tensor:
        """Writes the rows' keys and values into the cache, then attends. x: [T, hidden]."""
        spec = self.spec
        q = self._linear(x, f"layers.{i}.q").unflatten(-1, (spec.num_heads, spec.head_dim))
        k = self._linear(x, f"layers.{i}.k").unflatten(-1, (spec.num_kv_heads, spec.head_dim))
        v = self._linear(x, f"layers.{i}.v").unflatten(-1, (spec.num_kv_heads, spec.head_dim))
        if spec.qk_norm:
            q = self._norm(q, f"layers.{i}.q_norm")
            k = self._norm(k, f"layers.{i}.k_norm")
        self._keys[i][slots] = rotate(k, cos, sin).to(self.dtype)
        self._values[i][slots] = v.to(self.dtype)
        q = rotate(q, cos, sin)  # [T, heads, head_dim]
        out = torch.empty_like(q)
        for tile in tiles:
            k, v = self._keys[i][tile.slots].float(), self._values[i][tile.slots].float()
            out[tile.rows] = attend(q[tile.rows], k, v, tile.mask, spec)
        return self._linear(out.flatten(-2), f"layers.{i}.o")

    def _mlp(self, i: int, x: Tensor) -> Tensor:
        gate = ACTIVATIONS[self.spec.activation](self._linear(x, f"layers.{i}.gate"))
        return self._linear(gate * self._linear(x, f"layers.{i}.up"), f"layers.{i}.down")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        if self._formats.get(f"{name}.weight") == "w8":
            x = rounded(x)
        return linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm (arXiv 1910.07467) over the last dimension."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.spec.norm_eps) * self._weights[f"{name}.weight"]

    def _on_device(self, array: Ints) -> Tensor:
        return torch.from_numpy(array).to(self.device, torch.int64)

    def _tiles(self, batch: StepBatch, window: int) -> Iterator[AttentionTile]:
        """Cuts the step's attention into tiles: decodes of similar length together, prefill chunks by QUERY_TILE rows.

        The padded length of a decode follows from its own length alone, so a neighbour does not change its arithmetic.
        """
        counts = np.diff(batch.query_start)
        single = np.flatnonzero(counts == 1)
        seen = np.minimum(batch.context_lens[single], window) if window else batch.context_lens[single]
        padded = np.maximum(1 << np.ceil(np.log2(seen)).astype(np.int64), self.block_size)
        for length in np.unique(padded):
            members = single[padded == length]
            yield self._tile(batch, members, batch.query_start[members], 1, int(length), window)
        for s in np.flatnonzero(counts > 1):
            for row in range(int(batch.query_start[s]), int(batch.query_start[s + 1]), QUERY_TILE):
                n = min(QUERY_TILE, int(batch.query_start[s + 1]) - row)
                end = int(batch.positions[row]) + n
                length = min(end, window + n - 1) if window else end
                yield self._tile(batch, np.array([s]), np.array([row]), n, length, window)

    def _tile(
        self, batch: StepBatch, sequences: Ints, first_rows: Ints, n: int, length: int, window: int
    ) -> AttentionTile:
        """The tile of rows first_rows[j] ... + n - 1 of each sequence, over the `length` keys up to its last row."""
        rows = first_rows[:, None] + np.arange(n)  # [N, n]
        queries = batch.positions[rows].astype(np.int64)  # [N, n]
        last = queries[:, -1:]
        first = np.maximum(last + 1 - length, 0)
        keys = first + np.arange(length)  # [N, length]
        visible = keys[:, None, :] <= queries[:, :, None]
        if window:
            visible &= keys[:, None, :] > queries[:, :, None] - window
        # NOTE: padding reads keys of the sequence's own. What else lies in the cache may be NaN, and 0 * NaN is NaN.
        keys = np.clip(keys, np.maximum(queries[:, :1] + 1 - window, 0) if window else 0, last)
        blocks = np.take_along_axis(batch.block_tables[sequences], keys // self.block_size, axis=1)
        slots = blocks.astype(np.int64) * self.block_size + keys % self.block_size
        mask = np.where(visible, np.float32(0), np.float32(-np.inf))
        mask = np.tile(mask, (1, self.spec.num_heads // self.spec.num_kv_heads, 1))[:, None]
        return AttentionTile(
            rows=torch.from_numpy(rows).to(self.device, torch.int64),
            slots=torch.from_numpy(slots).to(self.device),
            mask=torch.from_numpy(mask).to(self.device),
        )


def as_tensor(weight: Weight) -> Tensor:
    """A copy of the values in CPU memory."""
    if not isinstance(weight, np.ndarray):
        return torch.from_numpy(weight.floats())
    if weight.dtype == np.uint16:
        return torch.tensor(weight.view(np.int16)).view(torch.bfloat16)
    return torch.tensor(weight)


def quantised(weight: Weight, form: Format) -> Tensor:
    """What a weight is after quantising, in float32. GGUF blocks of the same format stay exactly what they are."""
    tensor = as_tensor(weight).float()
    if not isinstance(weight, np.ndarray) and BLOCK_FORMATS.get(weight.kind) == form:
        return tensor
    for rows in tensor.split(max(1, WIDENED_ELEMENTS // tensor.shape[1])):
        rows.copy_(torch.from_numpy(quantise(rows.numpy(), form).floats()))
    return tensor


def rounded(x: Tensor) -> Tensor:
    """Activations [..., k] as int8 codes hold them, in float32."""
    codes, scales = quantise_rows(x.reshape(-1, x.shape[-1]).cpu().numpy())
    values = (codes * scales[..., None]).reshape(len(codes), -1)[:, : x.shape[-1]]
    return torch.from_numpy(np.ascontiguousarray(values)).to(x.device).view(x.shape)


def new_slots(batch: StepBatch, block_size: int) -> Ints:
    """Cache slot of each of the step's rows, [T]."""
    sequence = np.repeat(np.arange(len(batch.context_lens)), np.diff(batch.query_start))
    blocks = batch.block_tables[sequence, batch.positions // block_size].astype(np.int64)
    return blocks * block_size + batch.positions % block_size


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias in float32. Weights of another type are widened piece by piece, to keep the copies small."""
    if weight.dtype == torch.float32:
        return F.linear(x, weight, bias)
    rows = max(1, WIDENED_ELEMENTS // weight.shape[1])
    out = torch.cat([F.linear(x, part.float()) for part in weight.split(rows)], dim=-1)
    return out if bias is None else out + bias


def rotations(rope: RopeSpec, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of RoPE (arXiv 2104.09864), float32 [T, 1, rope.dim]."""
    inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float32, device=positions.device)
    angles = positions.float()[:, None, None] * inv_freq
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the first rope.dim elements of each head; pairs are (i, i + dim / 2). x: [T, heads, head_dim]."""
    dim = cos.shape[-1]
    turned = x[..., :dim]
    a, b = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-b, a), dim=-1) * sin
    return torch.cat((turned, x[..., dim:]), dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, spec: DecoderSpec) -> Tensor:
    """Softmax attention of a tile. q: [N, n, heads, head_dim], k and v: [N, C, kv_heads, head_dim]; returns q's shape.

    The query heads that share a key head are laid out as further query rows, so keys are never repeated.
    """
    batch, n = q.shape[:2]
    group = spec.num_heads // spec.num_kv_heads
    q = q.view(batch, n, spec.num_kv_heads, group, spec.head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if spec.attention_softcap:
        scores = cap_softly(q @ k.mT * spec.attention_scale, spec.attention_softcap)
        out = (scores + mask).softmax(-1) @ v  # [N, kv_heads, group * n, head_dim]
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.attention_scale)
    out = out.unflatten(2, (group, n)).permute(0, 3, 1, 2, 4)  # [N, n, kv_heads, group, head_dim]
    return out.reshape(batch, n, spec.num_heads, spec.head_dim)


def cap_softly(x: Tensor, cap: float) -> Tensor:
    """tanh(x / cap) * cap, which keeps x within +-cap (arXiv 2408.00118); x where cap is 0."""
    return (x / cap).tanh() * cap if cap else x

"""Small GPT: causal self-attention, dropout, tied input and output embeddings."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx

from models.layers import TrainingGraph

__all__ = ["gpt"]


def gpt(
    layers: int = 4,
    width: int = 128,
    heads: int = 4,
    seq: int = 64,
    vocab: int = 256,
    batch: int = 8,
    dropout: float = 0.1,
    dtype: type = np.float32,
) -> onnx.ModelProto:
    """Pre-norm transformer decoder, language-model cross entropy over all positions.

    Args:
        layers: transformer blocks.
        width: model width, a multiple of `heads`.
        heads: attention heads.
        seq: tokens of a sequence.
        vocab: number of tokens; the table [vocab, width] is read by the embedding and by the output layer.
        batch: sequences in a batch.
        dropout: ratio of every dropout; 0 leaves the nodes out.
        dtype: float type of the graph.
    """
    g = TrainingGraph("gpt", dtype)
    tokens = g.batch_input("tokens", [batch, seq], np.int64, below=vocab)
    labels = g.batch_input("labels", [batch, seq], np.int64, below=vocab)
    table, positions = g.param("wte", [vocab, width]), g.param("wpe", [seq, width])
    mask = g.causal_mask(seq, "causal_mask")
    y = g.add(g.embedding(table, tokens, "embed"), positions, "embed_pos")
    y = g.reshape(g.dropout(y, dropout, "embed_drop"), [batch * seq, width], "embed_rows")
    for index in range(layers):
        with g.scope(f"block{index:02d}"):
            attended = _attention(g, g.layer_norm(y, "ln1"), mask, batch, heads, dropout)
            y = g.add(y, g.dropout(attended, dropout, "attn_drop"), "attn_add")
            hidden = g.gelu(g.dense(g.layer_norm(y, "ln2"), 4 * width, "fc1"), "gelu")
            y = g.add(y, g.dropout(g.dense(hidden, width, "fc2"), dropout, "mlp_drop"), "mlp_add")
    logits = g.linear(g.layer_norm(y, "ln"), table, name="head", tied=True)
    return g.finish(g.cross_entropy(logits, g.reshape(labels, [batch * seq], "label_rows")))


def _attention(g: TrainingGraph, x: Any, mask: Any, batch: int, heads: int, dropout: float) -> Any:
    """softmax(q k^T / sqrt(d)) v for every head, then the output projection (Vaswani et al., arXiv 1706.03762)."""
    rows, width = x.shape
    depth, seq = width // heads, rows // batch
    qkv = g.reshape(g.dense(x, 3 * width, "qkv"), [batch, seq, 3, heads, depth], "qkv_heads")
    q, k, v = g.split(g.transpose(qkv, [2, 0, 3, 1, 4], "qkv_first"), 3, 0, "qkv_split")
    scores = g.scale(g.matmul(q, g.transpose(k, [0, 1, 2, 4, 3], "k_turned"), "scores"), 1 / math.sqrt(depth), "scaled")
    weights = g.dropout(g.softmax(g.keep_where(mask, scores, "masked"), "softmax"), dropout, "weights_drop")
    mixed = g.transpose(g.matmul(weights, v, "mixed"), [0, 1, 3, 2, 4], "mixed_turned")
    return g.dense(g.reshape(mixed, [rows, width], "mixed_rows"), width, "proj")

#!/usr/bin/env python3
"""Writes llama_reference.bin: losses and gradients of a tiny Llama from PyTorch, for llama_test.cc.

Needs the PyTorch of the same version as LibTorch here (2.11). The model is written as plainly as possible, and not as
apps/llama.cc is: rotary positions as a complex product, attention as softmax(Q K^T) V with the keys repeated, norms
from their definition. It computes in fp64 and the results are rounded to fp32 once, so that the C++ fp32 results are
held against numbers that have no rounding errors of their own, on whatever processor either ran.

The file has the layout of safetensors: the header's length (u64, little endian), a JSON header, the data.
  param.NAME, grad.NAME             two layers, separate head
  tied_grad.NAME                    one layer (the first), the head shares tok.weight; the parameters are those above
  tokens, targets, loss, tied_loss
Run: python3 llama_reference.py
"""
import json
import math
import os
import struct

import torch

DIM, LAYERS, HEADS, KV_HEADS, FFN, VOCAB, SEQ, BATCH = 32, 2, 4, 2, 88, 67, 16, 2
EPS, THETA = 1e-5, 10000.0
HEAD_DIM = DIM // HEADS


def make_params():
    torch.manual_seed(20)
    shapes = {"tok.weight": (VOCAB, DIM)}
    for i in range(LAYERS):
        p = f"layers.{i}."
        shapes[p + "attn_norm.weight"] = (DIM,)
        shapes[p + "ffn_norm.weight"] = (DIM,)
        shapes[p + "wq.weight"] = (HEADS * HEAD_DIM, DIM)
        shapes[p + "wk.weight"] = (KV_HEADS * HEAD_DIM, DIM)
        shapes[p + "wv.weight"] = (KV_HEADS * HEAD_DIM, DIM)
        shapes[p + "wo.weight"] = (DIM, HEADS * HEAD_DIM)
        shapes[p + "w1.weight"] = (FFN, DIM)
        shapes[p + "w2.weight"] = (DIM, FFN)
        shapes[p + "w3.weight"] = (FFN, DIM)
    shapes["norm.weight"] = (DIM,)
    shapes["out.weight"] = (VOCAB, DIM)
    params = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            params[name] = 1 + 0.2 * torch.randn(shape)
        else:
            params[name] = torch.randn(shape) / math.sqrt(shape[1])
    return params


def norm(x, weight):
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rotate(x):  # [B, H, T, E]: the pair (x[i], x[i + E/2]) as a complex number, turned by t / theta^(2i/E)
    # The tables are fp32 in the model by definition, so they are made in fp32 here too.
    inverse = 1.0 / THETA ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    angle = torch.outer(torch.arange(x.shape[2]).float(), inverse)
    turn = torch.complex(angle.cos().to(x.dtype), angle.sin().to(x.dtype))
    first, second = x[..., : HEAD_DIM // 2], x[..., HEAD_DIM // 2 :]
    turned = torch.complex(first, second) * turn
    return torch.cat([turned.real, turned.imag], -1)


def block(x, p, prefix):
    w = lambda name: p[prefix + name + ".weight"]
    b, t, _ = x.shape
    split = lambda y, heads: y.view(b, t, heads, HEAD_DIM).transpose(1, 2)
    h = norm(x, w("attn_norm"))
    q = rotate(split(h @ w("wq").T, HEADS))
    k = rotate(split(h @ w("wk").T, KV_HEADS)).repeat_interleave(HEADS // KV_HEADS, 1)
    v = split(h @ w("wv").T, KV_HEADS).repeat_interleave(HEADS // KV_HEADS, 1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM)
    mask = torch.ones(t, t, dtype=torch.bool).tril()
    o = torch.softmax(scores.masked_fill(~mask, -math.inf), -1) @ v
    x = x + o.transpose(1, 2).reshape(b, t, DIM) @ w("wo").T
    h = norm(x, w("ffn_norm"))
    gate = h @ w("w1").T
    return x + (gate * torch.sigmoid(gate) * (h @ w("w3").T)) @ w("w2").T


def loss_and_grads(params, tokens, targets, layers, tied):
    names = [n for n in params if not (tied and n == "out.weight")
             and not (n.startswith("layers.") and int(n.split(".")[1]) >= layers)]
    p = {n: params[n].double().requires_grad_() for n in names}
    x = p["tok.weight"][tokens]
    for i in range(layers):
        x = block(x, p, f"layers.{i}.")
    logits = norm(x, p["norm.weight"]) @ p["tok.weight" if tied else "out.weight"].T
    log_probs = torch.log_softmax(logits, -1)
    loss = -log_probs.gather(-1, targets.unsqueeze(-1)).mean()
    loss.backward()
    return loss.detach(), {n: t.grad for n, t in p.items()}


def write(path, tensors, metadata):
    header, data = {"__metadata__": metadata}, b""
    for name, tensor in tensors.items():
        kind = {torch.float32: "F32", torch.int64: "I64"}[tensor.dtype]
        raw = tensor.contiguous().numpy().tobytes()
        header[name] = {"dtype": kind, "shape": list(tensor.shape),
                        "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


def main():
    params = make_params()
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ))
    targets = torch.randint(0, VOCAB, (BATCH, SEQ))
    tensors = {"tokens": tokens, "targets": targets}
    tensors |= {"param." + n: t for n, t in params.items()}
    loss, grads = loss_and_grads(params, tokens, targets, LAYERS, tied=False)
    tensors |= {"loss": loss.float()} | {"grad." + n: g.float() for n, g in grads.items()}
    loss, grads = loss_and_grads(params, tokens, targets, 1, tied=True)
    tensors |= {"tied_loss": loss.float()} | {"tied_grad." + n: g.float() for n, g in grads.items()}
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "llama_reference.bin")
    write(path, tensors, {"torch": torch.__version__.split("+")[0], "written_by": "llama_reference.py"})


main()

# ruff: noqa: N803, N806 - tensors carry their shape in their name
"""A decoder-only transformer over bytes, like GPT-2 (A. Radford et al. 2019), with learned positions and pre-norm.

Shapes: B batch, T positions, D width, H heads, V vocabulary.
"""

import math
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256  # a token is a byte


class Attention(nn.Module):
    """Causal self-attention: each position attends to itself and to the positions before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the attention output of each position, of shape (B, T, D)."""
        split = self.query_key_value(x_BTD).unflatten(2, (3, self.heads, -1))
        query_BHTE, key_BHTE, value_BHTE = split.permute(2, 0, 3, 1, 4)
        read_BHTE = functional.scaled_dot_product_attention(query_BHTE, key_BHTE, value_BHTE, is_causal=True)
        return cast(Tensor, self.output(read_BHTE.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    """Attention, then a multilayer perceptron. The output of each one is added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return features of the same shape."""
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
        return x_BTD + cast(Tensor, self.perceptron(self.norm2(x_BTD)))


class GPT(nn.Module):
    """The transformer. It returns the logits of the next byte at each position."""

    def __init__(self, *, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim > 1:  # layers whose outputs are summed get smaller weights
                is_added = name.endswith(("attention.output.weight", "perceptron.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if is_added else 0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return logits of shape (B, T, V)."""
        at_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.blocks(self.tokens(tokens_BT) + self.positions(at_T))
        return cast(Tensor, self.head(self.norm(x_BTD)))


@torch.no_grad()
def generate(model: GPT, prompt: bytes, *, temperature: float, seed: int) -> Iterator[int]:
    """Yield an endless continuation of the prompt. With temperature 0, each byte is the most probable one."""
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt or b"\n")
    while True:
        logits_V = model(torch.tensor([tokens[-model.context :]]))[0, -1]
        if temperature:
            chances_V = functional.softmax((logits_V - logits_V.max()).double() / temperature, dim=0)
            tokens.append(int(torch.multinomial(chances_V, 1, generator=generator)))
        else:
            tokens.append(int(logits_V.argmax()))
        yield tokens[-1]

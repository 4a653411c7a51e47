"""The states that are saved: W1 to W5.

W1 a GPT-like model with AdamW, W2 thousands of small tensors (as a module, and with AdamW), W3 a
few huge ones, W4 Python objects, W5 a model of which 90 % is frozen. `gpt_shape` is pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks.harness import SCALE

WORKLOADS = ("W1", "W2", "W2+AdamW", "W3", "W4", "W5")
W1_BYTES = 1_250_000_000
ADAM_BYTES = 12
"""A weight, and AdamW's two moments of it, in float32."""


def gpt_shape(nbytes: int, per_parameter: int = ADAM_BYTES) -> tuple[int, int, int]:
    """Layers, width and vocabulary of a GPT whose state takes about `nbytes`.

    At 1.25 GB with AdamW it has the 12 layers of 768 of the smallest GPT-2.
    """
    parameters = nbytes / per_parameter
    width = next((w for w in (768, 512, 256, 128) if 12 * w * w * 4 <= parameters * 0.8), 64)
    vocabulary = width * 32
    left = parameters - width * (vocabulary + 1024)
    return max(1, round(left / (12 * width * width))), width, vocabulary


class Block(nn.Module):
    """One layer of GPT-2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        b, t, d = x_BTD.shape
        qkv = self.qkv(self.norm_1(x_BTD)).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(seen.transpose(1, 2).reshape(b, t, d))
        return x_BTD + self.down(nn.functional.gelu(self.up(self.norm_2(x_BTD))))


class GPT(nn.Module):
    """Token and position embeddings, layers, and a head that is tied to the embedding."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """The mean loss of predicting each token from those before it."""
        x_BTD = self.tokens(ids_BT) + self.places(torch.arange(ids_BT.shape[1]))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits = self.head(self.norm(x_BTD))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())


@dataclass
class State:
    """What one process trains and saves."""

    model: nn.Module | None
    optimizer: torch.optim.Optimizer | None
    objects: dict[str, Any] = field(default_factory=dict)

    def changing(self) -> list[torch.Tensor]:
        """The tensors that training changes, each once."""
        trained = [p for p in self.model.parameters() if p.requires_grad] if self.model else []
        if self.optimizer is None:
            return [p.detach() for p in trained]
        states = self.optimizer.state
        return [p.detach() for p in trained] + [
            v for p in trained for v in states[p].values() if v.ndim
        ]

    def change(self) -> None:
        """Change everything as an update would, without the memory that gradients would take."""
        if self.model is not None:
            torch._foreach_mul_(self.changing(), 1.0001)
        if self.objects:
            self.objects["step"] = self.objects.get("step", 0) + 1

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors by name, each memory once."""
        seen: set[int] = set()
        state = self.state_dict()
        optimizer = state.get("optimizer", {"state": {}})["state"]
        moments = {f"{i}/{k}": v for i, one in optimizer.items() for k, v in one.items()}
        for prefix, tensors in (("model", state.get("model", {})), ("optimizer", moments)):
            for name, tensor in tensors.items():
                if tensor.data_ptr() not in seen:
                    seen.add(tensor.data_ptr())
                    yield f"{prefix}/{name}", tensor

    def state_dict(self) -> dict[str, Any]:
        """As torch's users save it."""
        found: dict[str, Any] = {}
        if self.model is not None:
            found["model"] = self.model.state_dict()
        if self.optimizer is not None:
            found["optimizer"] = self.optimizer.state_dict()
        if self.objects:
            found["objects"] = self.objects
        return found

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(t.nbytes for _, t in self.named())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW as after a thousand steps, without having taken any."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-4, foreach=True)
    for p in trained:
        optimizer.state[p] = {
            "step": torch.tensor(1000.0),
            "exp_avg": torch.empty_like(p, requires_grad=False).uniform_(-1e-4, 1e-4),
            "exp_avg_sq": torch.empty_like(p, requires_grad=False).uniform_(0, 1e-8),
        }
    return optimizer


class Tensors(nn.Module):
    """Parameters of given numbers of elements, in groups, and nothing that uses them."""

    def __init__(self, **groups: tuple[int, int]) -> None:
        super().__init__()
        for name, (count, elements) in groups.items():
            made = [nn.Parameter(torch.empty(elements).uniform_(-1, 1)) for _ in range(count)]
            self.register_module(name, nn.ParameterList(made))


def _frozen(nbytes: int) -> State:
    """A GPT that is frozen, and small trained layers with AdamW, nine parts to one by bytes."""
    base = GPT(*gpt_shape(int(nbytes * 0.9), per_parameter=4)).requires_grad_(False)
    width, wanted = base.norm.weight.numel(), nbytes * 0.1 / ADAM_BYTES
    rank = max(1, round(wanted / (2 * width * len(base.blocks))))
    for block in base.blocks:
        block.adapter = nn.Sequential(
            nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)
        )
    return State(base, adamw(base))


def _objects(entries: int) -> dict[str, Any]:
    """As a loader or a metric tracker would keep them: half numbers, half small things."""
    found: dict[str, Any] = {}
    for i in range(entries):
        name = f"sample-{i:07d}"
        match i % 8:
            case 0 | 1 | 2:
                found[name] = i * 997
            case 3 | 4:
                found[name] = math.sin(i)
            case 5:
                found[name] = f"shard-{i % 613:05d}.parquet"
            case 6:
                found[name] = (i, i % 7 == 0)
            case _:
                found[name] = None
    return found


def build(workload: str, scale: float = SCALE) -> State:
    """Make a state; seeded."""
    torch.manual_seed(0)
    count = lambda n: max(1, round(n * scale))  # noqa: E731
    if workload.startswith("W1"):
        model: nn.Module = GPT(*gpt_shape(int(W1_BYTES * scale)))
        return State(model, adamw(model), {"step": 1000, "epoch": 1, "best": 3.25})
    if workload.startswith("W2"):
        model = Tensors(small=(count(5000), 1024), large=(count(300), 1 << 20))
        return State(model, adamw(model) if workload.endswith("AdamW") else None)
    if workload == "W3":
        return State(Tensors(huge=(4, max(4096, int((1 << 28) * scale)))), None)
    if workload == "W4":
        return State(None, None, _objects(count(100_000)))
    if workload == "W5":
        return _frozen(int(W1_BYTES * scale))
    raise ValueError(f"no workload {workload!r}")

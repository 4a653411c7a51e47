"""Micro-batches and blocks: the tensors of a plan.

Property: with `loss_sum` the sum of a micro-batch's token losses, the gradients of
`loss_sum * scale`, added over a rank's micro-batches of a block and averaged over ranks as DDP
does, are the gradient of the mean loss over all the block's label tokens. For the other means of
`Loss`, the sum is that of `token losses * weights`.

Shapes: B samples in the micro-batch, T tokens in the longest of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eke.batching.planner import DUMMY_TOKENS
from eke.batching.tally import Tally

IGNORED = -100
"""The label of a position that does not train, as in torch's cross_entropy."""

Loss = Literal["token", "sample", "sequence"]
"""What a block's loss is the mean of, over all ranks: of the losses of its label tokens; of its
samples' mean token losses; of its samples' summed token losses. A sample without a label that
trains is in none."""

Uid = tuple[int, int]
"""(epoch, dataset index): a sample's name, unique over the run."""


@dataclass(frozen=True)
class Tokens:
    """One sample as it came from the dataset: `ids` and `labels`, int64 [T].

    Attributes:
        full_length: tokens before truncation.
        label_tokens: labels that train, after the causal shift.
        loads: what it takes of each further resource of the cost model.
        item: the sample as the dataset gave it, where a `collate` of the user asks for it.
    """

    ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    full_length: int
    label_tokens: int
    loads: tuple[int, ...] = ()
    item: Any = None

    def cut(self, limit: int) -> Tokens:
        """Its first `limit` tokens."""
        if len(self.ids) <= limit:
            return self
        labels = self.labels[:limit]
        trained = int(np.count_nonzero(labels[1:] != IGNORED))
        return replace(self, ids=self.ids[:limit], labels=labels, label_tokens=trained)


@dataclass(frozen=True, eq=False)
class MicroBatch(Mapping[str, Tensor]):
    """What one forward and backward pass sees on this rank.

    Padded: a mapping of `input_ids`, `labels` and `attention_mask`, each int64 [B, T], padded on
    the right. Packed: `input_ids`, `labels` and `position_ids`, int64 [1, T], the samples end to
    end, positions starting at 0 in each; where each begins and the longest are `cu_seqlens` and
    `max_seqlen`. A dummy has no samples and no labels that train: it keeps ranks in step, and its
    loss, of weight 0, touches every parameter.

    Padded, pass it to a model as `model(**micro_batch)`. Packed, samples must not see one another.
    A transformers model finds their ends in `position_ids` only if it keeps no cache and gets no
    mask: `model(**micro_batch, use_cache=False)`; with its default `use_cache` it mixes them, and
    says nothing. `varlen_arguments` and `block_causal_mask` are for other models.

    Attributes:
        uids: `(epoch, index)` of each row; empty for a dummy.
        lengths: real tokens of each row; empty for a dummy.
        label_tokens: labels of this micro-batch that train, after the causal shift.
        scale: factor for the summed loss, see the module; 0 if the block has no such label.
        loss: what the mean is of; where it is "sample", the sum must be one with `weights`.
    """

    tensors: Mapping[str, Tensor]
    uids: list[Uid]
    lengths: list[int]
    label_tokens: int
    scale: float
    loss: Loss = "token"

    def __getitem__(self, key: str) -> Tensor:
        return self.tensors[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def is_packed(self) -> bool:
        """True if it has no padding."""
        return "attention_mask" not in self.tensors

    @property
    def cu_seqlens(self) -> Tensor:
        """Where each sample of a packed micro-batch begins, and the end: int32 [samples + 1]."""
        lengths = self.lengths or [self.tensors["input_ids"].shape[1]]
        return torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32)

    @property
    def max_seqlen(self) -> int:
        """The longest sample's length."""
        return max(self.lengths, default=self.tensors["input_ids"].shape[1])

    @property
    def weights(self) -> Tensor:
        """Weight of the loss of predicting each label, before `scale`: float64, as `labels`.

        `(token_losses * weights[:, 1:]).sum() * scale`, with the losses of all positions but the
        first, gives the exact mean whatever `loss` is. 0 where a label does not train; else 1, or
        of "sample" one over the labels of its sample that train.
        """
        trains = self.tensors["labels"] != IGNORED
        trains[:, :1] = False
        weights = trains.double()
        if self.loss != "sample" or self.is_dummy:
            return weights
        if self.is_packed:
            parts = torch.tensor_split(weights[0], self.cu_seqlens[1:-1].long())
            return torch.cat([part / part.sum().clamp(min=1) for part in parts])[None]
        return weights / weights.sum(dim=1, keepdim=True).clamp(min=1)

    def varlen_arguments(self) -> dict[str, Any]:
        """What transformers' varlen attention takes besides a packed micro-batch: the ends of its
        samples and the longest, for queries and for keys."""
        ends, longest = self.cu_seqlens, self.max_seqlen
        return {
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": longest,
            "max_length_k": longest,
        }

    def block_causal_mask(self, dtype: torch.dtype = torch.bool) -> Tensor:
        """Which tokens of its own sample, up to itself, each token sees: [1, 1, T, T] of a packed
        micro-batch.

        Args:
            dtype: bool, True where it sees, is what scaled_dot_product_attention takes; of a
                floating dtype it is what attention adds to its scores, 0 or the dtype's least.
        """
        sample_T = torch.repeat_interleave(
            torch.arange(len(self.cu_seqlens) - 1), torch.diff(self.cu_seqlens)
        )
        sees_TT = (sample_T[:, None] == sample_T).tril()[None, None]
        if dtype == torch.bool:
            return sees_TT
        return torch.zeros_like(sees_TT, dtype=dtype).masked_fill(~sees_TT, torch.finfo(dtype).min)

    def pinned(self) -> MicroBatch:
        """The same in pinned memory, from which `.to("cuda", non_blocking=True)` copies while the
        GPU computes. Tensors that are on a device stay there."""
        tensors = {
            name: tensor.pin_memory() if tensor.device.type == "cpu" else tensor
            for name, tensor in self.tensors.items()
        }
        return replace(self, tensors=tensors)

    @property
    def is_dummy(self) -> bool:
        """True if it has no samples."""
        return not self.uids

    @property
    def tokens(self) -> int:
        """Real tokens."""
        return sum(self.lengths)

    @property
    def padded_tokens(self) -> int:
        """B * T."""
        return self.tensors["input_ids"].numel()


@dataclass(frozen=True, eq=False)
class Block:
    """One optimizer step: iterate over it for this rank's micro-batches.

    The number of micro-batches, and every attribute but `micro_batches`, is the same on all
    ranks; sums are over all ranks.

    Attributes:
        index: number of blocks before this one in the run.
        lengths: tokens of each sample, in the order of the epoch.
        shapes: (samples, padded length) of every micro-batch of every rank, dummies included;
            packed, (1, length) of every sample and dummy, since attention does not cross samples.
        tokens: real tokens.
        padded_tokens: real tokens, padding and dummies.
        tallies: of each rank, its real tokens, its padding, and how long it waits for the slowest.
        label_tokens: labels that train, after the causal shift.
        loss_parts: what the loss is the mean of: so many label tokens, or samples that have some.
        position: the loader's `state_dict` after this block, for a checkpoint after its step.
    """

    micro_batches: tuple[MicroBatch, ...]
    epoch: int
    index: int
    lengths: list[int]
    shapes: list[tuple[int, int]]
    padded_tokens: int
    tallies: list[Tally]
    label_tokens: int
    loss_parts: int
    position: dict[str, Any]

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.micro_batches)

    def __len__(self) -> int:
        return len(self.micro_batches)

    @property
    def samples(self) -> int:
        """Samples of the step."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Real tokens of the step."""
        return sum(self.lengths)


def collate(
    samples: Sequence[Tokens],
    uids: list[Uid],
    *,
    pad_token_id: int,
    scale: float,
    packed: bool = False,
    loss: Loss = "token",
) -> MicroBatch:
    """Pad samples on the right to the longest, or pack them; without samples, make a dummy."""
    if packed:
        return _packed(samples, uids, pad_token_id, scale, loss)
    lengths = [len(sample.ids) for sample in samples]
    shape = (len(samples), max(lengths)) if samples else (1, DUMMY_TOKENS)
    ids_BT = np.full(shape, pad_token_id, dtype=np.int64)
    labels_BT = np.full(shape, IGNORED, dtype=np.int64)
    # A dummy attends to its padding: a row that is masked whole makes softmax give NaN.
    mask_BT = np.zeros(shape, dtype=np.int64) if samples else np.ones(shape, dtype=np.int64)
    for row, sample in enumerate(samples):
        ids_BT[row, : lengths[row]] = sample.ids
        labels_BT[row, : lengths[row]] = sample.labels
        mask_BT[row, : lengths[row]] = 1
    tensors = {"input_ids": ids_BT, "labels": labels_BT, "attention_mask": mask_BT}
    return MicroBatch(
        {name: torch.from_numpy(array) for name, array in tensors.items()},
        uids=uids,
        lengths=lengths,
        label_tokens=sum(sample.label_tokens for sample in samples),
        scale=scale if samples else 0.0,
        loss=loss,
    )


def _packed(
    samples: Sequence[Tokens], uids: list[Uid], pad_token_id: int, scale: float, loss: Loss
) -> MicroBatch:
    lengths = [len(sample.ids) for sample in samples]
    if samples:
        ids_T = np.concatenate([sample.ids for sample in samples])
        labels_T = np.concatenate([sample.labels for sample in samples])
        # What comes before a sample's first token is another sample: it predicts nothing.
        labels_T[np.cumsum([0, *lengths[:-1]])] = IGNORED
        positions_T = np.concatenate([np.arange(length) for length in lengths])
    else:
        ids_T = np.full(DUMMY_TOKENS, pad_token_id, dtype=np.int64)
        labels_T = np.full(DUMMY_TOKENS, IGNORED, dtype=np.int64)
        positions_T = np.arange(DUMMY_TOKENS)
    tensors = {"input_ids": ids_T, "labels": labels_T, "position_ids": positions_T}
    return MicroBatch(
        {name: torch.from_numpy(array[None]) for name, array in tensors.items()},
        uids=uids,
        lengths=lengths,
        label_tokens=sum(sample.label_tokens for sample in samples),
        scale=scale if samples else 0.0,
        loss=loss,
    )

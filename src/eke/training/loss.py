"""The next-token loss, summed: what makes token means exact over micro-batches and ranks.

Shape letters: B sequences, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from eke.training.packing import packed_arguments

IGNORED = -100


def token_losses(model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Losses in nats, `[B, T-1]` in fp32 (fp64 of an fp64 model); 0 where the next token is not
    supervised.

    The batch is padded on the right, and the mask handed over only when there is padding: without
    it transformers takes its faster causal path. Or it is packed: `position_ids` and no mask.
    """
    ids_BT, labels_BT = batch["input_ids"], batch["labels"]
    if "position_ids" in batch:
        logits_BTV = model(input_ids=ids_BT, **packed_arguments(model, batch)).logits
    else:
        mask_BT = batch["attention_mask"]
        padded = not bool(mask_BT.all())
        logits_BTV = model(input_ids=ids_BT, attention_mask=mask_BT if padded else None).logits
    exact = torch.promote_types(logits_BTV.dtype, torch.float32)
    losses = F.cross_entropy(
        logits_BTV[:, :-1].flatten(0, 1).to(exact),
        labels_BT[:, 1:].flatten(),
        ignore_index=IGNORED,
        reduction="none",
    )
    # Not -1: a batch of single tokens has no loss, and its shape cannot be inferred.
    return losses.view(ids_BT.shape[0], ids_BT.shape[1] - 1)

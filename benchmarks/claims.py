"""What eke must do, as numbers that the benchmarks compute, and the verdict on each.

`MUSTS` is the table of measures, one entry a row; `CLAIMS` says for each row which figure of which
benchmark decides it. Figures are ratios to a peer's median in the same run, or plain amounts. The
checkpoint's are here, the loader's in `batching_claims`. All of this is pure.
"""

from __future__ import annotations

from benchmarks.batching_claims import BATCHING_CLAIMS, BATCHING_MUSTS
from benchmarks.claim import Claim, Values, Verdict, judge

__all__ = ["CLAIMS", "KEPT", "MUSTS", "Claim", "Values", "Verdict", "deciding", "judge", "verdicts"]

MUSTS = {
    "return": "save() returns in <= 5 ms",
    "stall": "stall at the barrier <= 10 ms when forward+backward takes longer than capture",
    "extra": "total extra time per checkpoint <= 0.5 x DCP async (kept stager) and <= 0.5 x "
    "torch.save; saving every 10 steps inflates the loop by <= 2 %",
    "cpu": "CPU-seconds per GiB saved <= 0.3 x DCP async (kept stager)",
    "durable": "time to durable <= 1.15 x safetensors+fsync and <= 0.5 x DCP async (kept stager)",
    "first": "first save <= 1.5 x later saves",
    "small": ">= 2 x DCP's rate with thousands of small tensors",
    "objects": "100,000 Python entries in <= 0.5 s, and <= 2 x one pickled blob",
    "memory": "extra memory <= pool + 5 % of the state, for a pool of 1/8 of the state",
    "changed": "bytes written <= 12 % of the state on the second save, 90 % frozen",
    "restore": "verified restore <= 1.2 x torch's fastest unverified load, extra memory <= 5 %",
    "integrity": "every single-bit flip detected; 0 of 200 random kill -9 lose a committed step; "
    "resumed loss bit-identical",
    **BATCHING_MUSTS,
}
"""Row -> what it says."""

KEPT = "dcp.async_save, kept"
POOL_SHARE = 1 / 8


def _claims() -> tuple[Claim, ...]:
    save, train, load = "checkpoint_save", "checkpoint_training", "checkpoint_restore"
    found = [
        Claim("return", save, w, "return", 0.005, "s") for w in ("W1", "W2", "W2+AdamW", "W3", "W5")
    ]
    found += [
        Claim("stall", train, "W1 long", "barrier", 0.010, "s"),
        Claim("extra", train, "W1", "extra", 0.5, against=(KEPT,)),
        Claim("extra", train, "W1", "extra", 0.5, against=("torch.save",)),
        Claim("extra", train, "W1", "inflation", 0.02, "of the loop"),
    ]
    for w in ("W1", "W3"):
        found += [
            Claim("cpu", save, w, "cpu", 0.3, against=(KEPT,)),
            Claim("durable", save, w, "durable", 1.15, against=("safetensors",)),
            Claim("durable", save, w, "durable", 0.5, against=(KEPT,)),
        ]
    found.append(
        Claim("first", save, "W1", "first", 1.5, against=("eke",), against_metric="durable")
    )
    found += [
        Claim("small", save, w, "durable", 0.5, against=(dcp,))
        for w in ("W2", "W2+AdamW")
        for dcp in ("dcp.save", KEPT)
    ]
    found += [
        Claim("objects", save, "W4", "durable", 0.5, "s"),
        Claim("objects", save, "W4", "durable", 2.0, against=("pickle",)),
    ]
    found += [
        Claim("memory", save, w, "memory", POOL_SHARE + 0.05, "of the state", arm="eke, small pool")
        for w in ("W1", "W3")
    ]
    found.append(Claim("changed", save, "W5", "second", 0.12, "of the state"))
    torchs = ("torch.load", "torch.load, mmap", "dcp.load")
    found += [
        Claim("restore", load, "W1", "warm", 1.2, against=torchs),
        Claim("restore", load, "W1", "cold", 1.2, against=torchs),
        Claim("restore", load, "W1", "memory", 0.05, "of the state"),
    ]
    found += [
        Claim("integrity", "checkpoint_integrity", "small", "flips missed", 0.0),
        Claim("integrity", "checkpoint_integrity", "small", "steps lost", 0.0),
        Claim("integrity", "checkpoint_integrity", "small", "losses differing", 0.0),
    ]
    return (*found, *BATCHING_CLAIMS)


CLAIMS = _claims()


def deciding(script: str) -> set[tuple[str, str]]:
    """The workloads and arms of a benchmark without which a claim cannot be judged."""
    mine = [claim for claim in CLAIMS if claim.script == script]
    return {(claim.workload, arm) for claim in mine for arm in (claim.arm, *claim.against)}


def verdicts(script: str, values: Values) -> list[Verdict]:
    """On every claim of one benchmark, in the order of the table."""
    return [judge(claim, values) for claim in CLAIMS if claim.script == script]

"""One checkpoint on its way into live state: compare all of it, then load.

Property: nothing live is changed before every provider has said how its part fits, and every object
is decoded. After that only the bytes of tensors are still unchecked; they are as they are read.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from operator import add
from typing import Any

import torch

from eke.checkpoint.capture import rank_name
from eke.checkpoint.checks import ManifestError
from eke.checkpoint.errors import CorruptCheckpoint, Problem
from eke.checkpoint.manifest import ObjectEntry, TensorEntry
from eke.checkpoint.objects import decode
from eke.checkpoint.providers import Fit, Saved, Spec, StateProvider
from eke.checkpoint.reader import Fill, Reader
from eke.checkpoint.references import references
from eke.distributed import World, is_dtensor, part_of
from eke.errors import EkeError, InputError

SORTS = ("missing", "unexpected", "mismatched", "left_alone")


def _content(entry: TensorEntry | None) -> Hashable:
    assert entry is not None
    shards = sorted((shard.offset, shard.shape, shard.xxh3_128) for shard in entry.shards)
    return entry.dtype, entry.shape, tuple(shards)


class Attempt:
    """One checkpoint and the providers that are to take it.

    Args:
        providers: what is attached, by name.
        reader: of the checkpoint, open.
        here: this rank.
        cast: whether a floating-point tensor may go into one of another type.
        partial: whether saved state of other providers is no difference.

    Attributes:
        report: names by how they differ, one list for each of `SORTS`.
    """

    def __init__(
        self,
        providers: Mapping[str, StateProvider],
        reader: Reader,
        here: World,
        *,
        cast: bool,
        partial: bool,
    ) -> None:
        self._providers, self._reader, self._here = providers, reader, here
        self._cast, self._partial = cast, partial
        self._parts: dict[str, Saved] = {}
        self._notes: list[str] = []
        self.report: dict[str, list[str]] = {sort: [] for sort in SORTS}

    @property
    def untouched(self) -> set[str]:
        """What of the live state `load` leaves as it is."""
        return {
            name.partition(" (of ")[0]
            for sort in ("missing", "mismatched", "left_alone")
            for name in self.report[sort]
        }

    def compare(self, strict: bool) -> None:
        """Decode every object, and ask every provider how its part fits. Changes nothing.

        Raises:
            InputError: `strict`, and the states differ.
            CorruptCheckpoint: an object, or a tensor inside one, is damaged.
            OSError: the disk failed.
        """
        objects, report = self._reader.manifest.objects, self.report
        report["missing"] += [name for name in self._providers if name not in objects]
        if not self._partial:
            report["unexpected"] += [name for name in objects if name not in self._providers]
        for name, provider in self._providers.items():
            if name not in objects:
                continue
            size = self._reader.manifest.world_size
            if objects[name].per_rank and size != self._here.size:
                # What differs between ranks by design has no place among another number of them;
                # what turned out to differ, such as a loader's position, is the user's to settle.
                sort = "left_alone" if provider.per_rank else "mismatched"
                report[sort].append(f"{name} (of {size} ranks)")
                continue
            self._parts[name] = self._saved(name, provider, objects[name])
            fit = self._fit(name, provider)
            for sort, names in report.items():
                names += [f"{name}/{key}" for key in getattr(fit, sort)]
            self._notes += fit.notes
        if strict and (report["missing"] or report["unexpected"] or report["mismatched"]):
            raise self._misfit()

    def load(self) -> None:
        """Let every provider take its part.

        Raises:
            CorruptCheckpoint: a tensor's bytes are not the ones that were written.
            EkeError: the disk or a provider failed. Either way, what is live is partly restored.
        """
        for name, saved in self._parts.items():
            try:
                self._providers[name].load(saved)
            except CorruptCheckpoint as error:
                raise CorruptCheckpoint(error.path, error.problems, partly_restored=True) from error
            except Exception as error:
                raise self._half_done(name, error) from error

    def _fit(self, name: str, provider: StateProvider) -> Fit:
        """What a provider says of its part; whatever it stumbles over is what it cannot take."""
        try:
            return provider.fit(self._parts[name])
        except EkeError:
            raise
        except Exception as error:
            raise InputError(
                f"the checkpoint {self._reader.path} does not fit what is attached",
                rule=f"the saved state of {name!r} is not of the kind that it takes: {error}",
                fix="Attach what was attached when it was saved",
            ) from error

    def _saved(self, name: str, provider: StateProvider, entry: ObjectEntry) -> Saved:
        """One provider's part, as this rank takes it."""
        reader = self._reader
        manifest = reader.manifest
        file = entry.files[self._here.rank if entry.per_rank else 0]
        prefix = f"{name}/{rank_name(self._here.rank)}/" if provider.per_rank else f"{name}/"
        tensors = {}
        for full in manifest.names():
            spec = manifest.find(full)
            if spec is not None and spec.role == "segment" and full.startswith(prefix):
                tensors[full.removeprefix(prefix)] = Spec(spec.dtype, spec.shape)
        try:
            encoded = reader.objects(file)[name]
            inner = self._inner(encoded)
            state: Any = decode(encoded, inner.__getitem__)
        except (ManifestError, KeyError) as error:
            problem = Problem(
                file, None, "corrupt", f"the object {name!r} cannot be decoded: {error}"
            )
            raise CorruptCheckpoint(str(reader.path), [problem]) from error
        return Saved(
            tensors,
            state,
            read=lambda key: reader.read(prefix + key),
            copy_into=lambda key, live: self._fill([Fill(prefix + key, live)]),
            fill=lambda fills: self._fill(
                [Fill(prefix + key, live, offset) for key, live, offset in fills]
            ),
            content=lambda key: _content(manifest.find(prefix + key)),
            cast=self._cast,
        )

    def _fill(self, wanted: Sequence[Fill]) -> None:
        """Fill live tensors; of a DTensor, what this rank holds of it."""
        fills = []
        for name, live, start in wanted:
            part = part_of(live, name)
            if not part.spread:
                fills.append(Fill(name, live, start))
            elif part.box is not None:
                base = start or (0,) * len(part.shape)
                offset = tuple(map(add, base, part.box.offset))
                fills.append(Fill(name, part.local, offset))
        self._reader.fill(fills)
        for fill in wanted:
            if is_dtensor(fill.target) and not fill.target.is_inference():
                torch.autograd.graph.increment_version(fill.target)

    def _inner(self, encoded: object) -> dict[str, torch.Tensor]:
        """The tensors inside an object by the names it has for them; one for several aliases."""
        aliases = self._reader.manifest.aliases
        own = {key: aliases.get(key, key) for key in references(encoded)}
        for key in own:
            if self._reader.manifest.find(key) is None:
                raise ManifestError(f"it names {key!r}, which is not listed")
        loaded = self._reader.read_all(dict.fromkeys(own.values()))
        return {key: loaded[target] for key, target in own.items()}

    def _misfit(self) -> InputError:
        parts = []
        for sort in ("missing", "unexpected", "mismatched"):
            names = self.report[sort]
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                parts.append(f"{sort}: {', '.join(names[:3])}{more}")
        return InputError(
            f"the checkpoint {self._reader.path} does not fit what is attached",
            rule="; ".join([*parts, *self._notes]),
            fix="Attach what was attached when it was saved, or call restore(strict=False)",
        )

    def _half_done(self, name: str, error: Exception) -> EkeError:
        shown = error.strerror or error if isinstance(error, OSError) else error
        where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        return EkeError(
            f"restoring {name!r} from {self._reader.path} failed: {where}{shown}",
            rule="the state may now be partly restored",
            fix="Do not train on with it: restore again, or start the process again",
        )

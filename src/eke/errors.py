"""The errors a user sees: one paragraph that says what, which value, the rule, and what to do.

Every failure that a user can cause or mend is an `EkeError`; the command line prints it
without a traceback and exits with its `exit_code` (see `docs/cli.md`). Anything else that
escapes is a defect of eke and keeps its traceback.
"""

from __future__ import annotations

from typing import Final

NO_VALUE: Final = object()
"""There is no offending value; None is one, as any other."""


class EkeError(Exception):
    """A failure while running (exit code 1).

    Args:
        what: what went wrong, as a sentence without a full stop.
        value: the offending value, shown as `got ...`; `NO_VALUE` when there is none.
        rule: the rule that it breaks.
        fix: what to do about it, in the imperative.
    """

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        value: object = NO_VALUE,
        rule: str | None = None,
        fix: str | None = None,
    ) -> None:
        self.what, self.value, self.rule, self.fix = what, value, rule, fix
        parts = [what]
        if value is not NO_VALUE:
            parts.append(f"got {value!r}")
        if rule is not None:
            parts.append(rule)
        message = "; ".join(part.rstrip(".") for part in parts) + "."
        if fix is not None:
            message += f" {fix.rstrip('.')}."
        super().__init__(message)


class InputError(EkeError):
    """Bad input, found before anything is lost: configuration, data or arguments (exit code 2)."""

    exit_code = 2


class MissingExtraError(InputError):
    """A feature needs a package of an extra that is not installed."""

    def __init__(self, package: str, extra: str, feature: str) -> None:
        super().__init__(
            f"{feature} needs the package {package!r}, which is not installed",
            fix=f"Install it with: pip install 'eke[{extra}]'",
        )
        self.package, self.extra = package, extra

"""Writes `report.html`: one file with style and pictures inside, asking no network for anything.

Properties: every string of a record is escaped; the page carries a content security policy that
forbids scripts and every foreign address; the file appears whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eke.errors import EkeError, MissingExtraError
from eke.report import figures, text
from eke.report.charts import meter
from eke.report.loss_chart import loss_chart
from eke.report.model import build
from eke.report.records import load
from eke.report.svg import el, rect
from eke.report.view import DecisionRow, Limit, RunView
from eke.version import __version__

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"
SHOWN_CONTINUES = 6
STATES = {
    "finished": ("good", "finished"),
    "running": ("busy", "running"),
    "interrupted": ("warn", "interrupted"),
    "failed": ("bad", "failed"),
}


def environment() -> Environment:
    """The templates, with escaping on.

    Raises:
        MissingExtraError: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise MissingExtraError("jinja2", "train", "report.html") from error
    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        count=text.count, power=text.power, duration=text.duration, share=text.share,
        loss=text.loss, moment=text.moment,
    )  # fmt: skip
    return made


def page(template: str, values: Mapping[str, Any]) -> str:
    """A template filled in, with the styles."""
    css = "\n".join((TEMPLATES / name).read_text("utf-8") for name in ("chart.css", "report.css"))
    return environment().get_template(template).render(css=css, version=__version__, **values)


def write_whole(path: Path, content: str) -> Path:
    """Write a file so that a reader sees the old or the new one, never a part.

    Raises:
        EkeError: it cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(content, encoding="utf-8", errors="replace")
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):  # it may never have come to be
            draft.unlink()
        raise EkeError(
            f"could not write {path}: {error.strerror}", fix="Choose another place for the report"
        ) from error
    return path


def _limit(limit: Limit, currency: str) -> dict[str, str]:
    used = text.amount(limit.unit, limit.used, currency)
    if limit.used is not None and not limit.is_exact:
        used = f"at least {used}"
    total = text.amount(limit.unit, limit.total, currency)
    label = f"{limit.label}: {used} of {total} used"
    return {
        "label": limit.label,
        "used": used,
        "total": total,
        "share": text.share(limit.share),
        "meter": meter(limit.share, f"limit-{limit.unit}", label),
    }


def _decision_groups(view: RunView) -> tuple[list[DecisionRow], list[DecisionRow]]:
    """The decisions to show at once, and those to fold away: all but the last few `continue`."""
    going_on = [d for d in view.decisions if d.action == "continue"]
    folded = {id(d) for d in going_on[: max(0, len(going_on) - SHOWN_CONTINUES)]}
    shown = [d for d in view.decisions if id(d) not in folded]
    return shown, [d for d in view.decisions if id(d) in folded]


def render(view: RunView) -> str:
    """The report of a run as HTML."""
    shown, folded = _decision_groups(view)
    parameters = next((v for k, v in view.plan if k == "parameters"), None)
    return page(
        "report.html.j2",
        {
            "view": view,
            "state": STATES.get(view.state, ("plain", view.state)),
            "parameters": parameters,
            "limits": [_limit(limit, view.currency) for limit in view.limits],
            "loss": figures.loss_figure(view),
            "budget": figures.budget_figures(view),
            "budget_table": figures.budget_table(view),
            "coverage": figures.coverage(view),
            "lengths": figures.length_figures(view),
            "batching": figures.batching_figure(view),
            "batching_lead": figures.batching_lead(view),
            "saves": figures.save_figures(view),
            "saves_lead": figures.saves_lead(view),
            "proof": figures.proof_figure(view),
            "shown": shown,
            "folded": folded,
        },
    )


def write_report(
    run_dir: str | os.PathLike[str], *, out: str | os.PathLike[str] | None = None
) -> Path:
    """Write a run's report; returns its path.

    Args:
        run_dir: a run's directory, of a run that finished, stopped, crashed or still runs.
        out: the file to write; `report.html` in the run's directory if None.

    Raises:
        InputError: `run_dir` is not the directory of a run.
        EkeError: a record is damaged, or the report cannot be written.
    """
    view = build(load(run_dir))
    return write_whole(Path(run_dir) / "report.html" if out is None else Path(out), render(view))


def loss_svg(run_dir: str | os.PathLike[str]) -> str:
    """The main chart as an SVG document of its own, in light and dark, with what was run.

    Raises:
        InputError: `run_dir` is not the directory of a run.
        EkeError: a record is damaged.
    """
    view = build(load(run_dir))
    parts = [
        f"{view.model} on {view.corpus}",
        f"{text.count(view.last_step)} steps" if view.steps else "no steps",
    ]
    if view.x_unit == "flops" and view.steps:
        parts.append(f"{text.power(view.steps[-1].x)} FLOPs")
    if view.accounts.wall_s is not None:
        parts.append(text.duration(view.accounts.wall_s))
    if view.ended is not None:
        parts.append(text.moment(view.ended)[:10])
    chart = loss_chart(view, width=860, name="loss", footer=" · ".join(parts), hover=False)
    css = (TEMPLATES / "chart.css").read_text("utf-8")
    opening, _, rest = chart.partition(">")
    width, height = opening.split('viewBox="0 0 ')[1].split('"')[0].split()
    card = el("style", css) + rect(0, 0, float(width), float(height), "card")
    rest = rest.replace("</desc>", f"</desc>{card}", 1)
    return f'{opening} width="{width}" height="{height}">{rest}\n'

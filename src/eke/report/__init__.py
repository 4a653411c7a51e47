"""A run's record as a page: `report.html`, comparisons of runs, and the main chart alone."""

from eke.report.compare import compare
from eke.report.render import loss_svg, write_report

__all__ = ["compare", "loss_svg", "write_report"]

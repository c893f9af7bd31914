"""The page around what a study has to show: one file that opens offline."""

from __future__ import annotations

from fedmtl.report.single_page import TABLE_STYLE, single_page

__all__ = ["TABLE_STYLE", "study_page"]

study_page = single_page

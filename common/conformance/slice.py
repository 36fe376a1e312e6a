"""Conformance, as the page and the verdict see it."""

from __future__ import annotations

from common.conformance.findings import caveats
from common.conformance.section import sections
from common.present.slices import Slice

CONFORMANCE = Slice(sections, caveats=caveats)

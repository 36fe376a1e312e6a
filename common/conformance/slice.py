"""Register conformance with the command: its section of the page, and its caveats for the verdict."""

from __future__ import annotations

from common.conformance.findings import caveats
from common.conformance.section import sections
from common.present.slices import Slice

CONFORMANCE = Slice(sections, caveats=caveats)

"""Faults as data, and what must hold after each: see docs/reliability.md.  ``make faults`` runs them."""

"""The count of a model's operations: `counter.FlopCounter` counts, `rules.register` adds a rule."""

"""From a corpus, manifests or figures to a shape file; only generate_shape_info.py comes here."""

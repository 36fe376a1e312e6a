"""Utterance shapes and batches: from manifests or figures to shape_info.pt, from shape_info.pt to batches."""

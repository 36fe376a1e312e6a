"""Tools beside the comparison of losses: FLOPs, profile, inference and pipelines, each whole in its folder."""

"""Tools beside the comparison of losses: FLOPs, profile of a step, inference, pipelines. Each is whole in its folder."""

"""Tools beside the comparison of losses: FLOPs, profile of a step, inference, pipelines. Each has
its own folder."""

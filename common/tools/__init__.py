"""Tools beside the comparison of losses: FLOPs, profile of a step, largest batch, inference,
pipelines. Each has its own folder."""

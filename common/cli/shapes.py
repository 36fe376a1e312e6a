"""generate_shape_info.py --executor ray: the shards of a shape file on the nodes of a Ray cluster.

A shard goes to a node by its content, and its part comes back; what does the work, with the model, goes there once.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Dict, Iterator, Optional, Set

from common.data.sources import wire
from common.data.sources.parts import Parted
from common.data.sources.shards import Shard
from common.data.sources.tabulate import Part, Work
from common.jobs import cluster, spread
from common.jobs.executor import Lost

#: Shards on their way to a node or there: one is worked at while the next travels.
IN_FLIGHT = 2


def on_cluster(address: str, jobs: Optional[int], work: Work, shards: Iterator[Shard]) -> Parted:
    """Their parts, in any order.  The nodes are held until then.  jobs: processes on each node; None: one for each of
    its CPUs."""
    with cluster.kinds(address, "cpu") as kinds, TemporaryDirectory(prefix="shapes-") as scratch:
        path = Path(scratch) / "work.npz"
        wire.save(path, work)
        lanes = [device for kind in kinds for device in kind.devices] * IN_FLIGHT
        have: Set[str] = set()

        def serve(device: cluster.Device, shard: Shard) -> Part:
            request = {"ask": "shard", "shard": wire.packed(shard), "jobs": jobs}
            files: Dict[str, str] = {} if device.label in have else {"work": str(path)}
            answer = device.ask(request, files)
            if "part" not in answer:
                raise Lost(f"device {device.label}: {answer.get('unfit', 'stopped')}", began=False)
            have.add(device.label)
            if shard.error:
                raise shard.error
            return wire.part(answer["part"])

        yield from spread.as_they_come(lanes, shards, serve)

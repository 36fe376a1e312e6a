"""Under a Python that has Ray: a local cluster of a head that runs nothing and two nodes of one slot each.  Prints the
head's address and the process numbers of the nodes, and ends with its stdin."""

import json
import os
import sys

from ray.cluster_utils import Cluster

NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}

if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(**NODE, env_vars={"RNNT_BENCH_CHECKOUT": sys.argv[1]}) for _ in range(2)]
    raylets = [node.all_processes["raylet"][0].process.pid for node in nodes]
    print(json.dumps({"address": cluster.address, "raylets": raylets}), file=answers, flush=True)
    sys.stdin.read()
    cluster.shutdown()

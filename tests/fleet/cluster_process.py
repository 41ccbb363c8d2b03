"""A Ray cluster of nodes with one core each, in a process of its own.

python cluster_process.py NODES, which prints its address and the id of the last node's raylet, and then waits.
"""

import sys

from ray.cluster_utils import Cluster


def main(nodes):
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    node = cluster.head_node
    for _ in range(1, nodes):
        node = cluster.add_node(num_cpus=1)  # which Ray allows in the main thread only
    cluster.wait_for_nodes()
    print("cluster", cluster.address, node.all_processes["raylet"][0].process.pid, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""Files that tell Ascend's offline compiler how the models of several ranks belong together."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from torchair.ge.graph import Graph

_NAMED = re.compile(r"tag=(?P<tag>[^;]*);rank_list=(?P<ranks>[\d,]+)")


def groups_of(graph: Graph) -> dict[str, list[int]]:
    """Communication groups that a graph names, with their ranks where the name says them."""
    found: dict[str, list[int]] = {}
    for node in graph.nodes:
        name = node.attr("group", "")
        if name and name not in found:
            named = _NAMED.search(name)
            found[name] = [int(r) for r in named["ranks"].split(",")] if named else []
    return found


def model_relation(name: str, groups: dict[str, list[int]], world: int) -> dict[str, Any]:
    """`model_relation_config.json`: which model runs where, and who talks to whom."""
    models = [f"{name}{rank}" for rank in range(world)]
    everybody = list(range(world))
    return {
        "deploy_config": [
            {"submodel_name": f"{model}.air", "deploy_device_id_list": f"0:0:{rank}"}
            for rank, model in enumerate(models)
        ],
        "model_name_to_instance_id": [
            {"model_name": f"{model}.air", "model_instance_id": rank}
            for rank, model in enumerate(models)
        ],
        "comm_group": [
            {"group_name": group, "group_rank_list": str(ranks or everybody)}
            for group, ranks in groups.items()
        ],
        "rank_table": [{"rank_id": r, "model_instance_id": r} for r in everybody],
    }


def numa(ranks: Sequence[int]) -> dict[str, Any]:
    """`numa_config.json`: one node with a device for each rank."""
    node = {
        "node_id": 0,
        "node_type": "ATLAS800",
        "ipaddr": "127.0.0.1",
        "port": 29500,
        "is_local": True,
        "item_list": [{"item_id": rank} for rank in ranks],
    }
    return {
        "cluster": [{"cluster_nodes": [node]}],
        "item_def": [{"item_type": "Ascend910"}],
        "node_def": [{"node_type": "ATLAS800", "item_type": "Ascend910"}],
    }


def text(config: dict[str, Any]) -> bytes:
    """The content of such a file."""
    return (json.dumps(config, indent=2) + "\n").encode()

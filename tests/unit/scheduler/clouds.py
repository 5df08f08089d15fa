"""A cluster whose machines come when they are asked for."""

from dataclasses import dataclass, field

from yunlu.executors.executor import Reserve
from yunlu.scheduler.autoscaling import ScalingRules

CALM = ScalingRules(grow_after_s=0.0, idle_s=60.0, least_life_s=0.0)


@dataclass
class Cluster:
    awake: int = 0
    most: int = 3
    asked: list[int] = field(default_factory=list)
    names: tuple[str, ...] = ()

    def reserves(self):
        return (
            Reserve(type="cloud", devices=2, awake=self.awake, most=self.most, nodes=self.names),
        )

    def scale(self, node_type, nodes):
        assert node_type == "cloud"
        self.asked.append(nodes)
        self.awake = nodes

"""Machines on this machine: hosts with limited links, for benchmarks and tests."""

from benchmarks.netrig.links import RigError
from benchmarks.netrig.rig import Counters, Rig, why_no_rig

__all__ = ["Counters", "Rig", "RigError", "why_no_rig"]

"""The same engine without the model: scheduler, block manager, policies and stop conditions run for real, on a simulated
clock; a step costs what a roofline model says, and tokens are made up. `Engine.from_config` builds one for
runner.name=simulated."""

from qkv.simulation.build import SimulatedModel, assemble_simulated
from qkv.simulation.clock import SimulatedClock
from qkv.simulation.loop import SimulatedLoop

__all__ = ["SimulatedClock", "SimulatedLoop", "SimulatedModel", "assemble_simulated"]

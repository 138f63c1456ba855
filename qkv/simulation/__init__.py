"""The same engine without the model: the scheduler, the block manager, the policies and the stop conditions are the real ones.
The clock is simulated, a step takes as long as a roofline model says, and tokens are made up. `Engine.from_config` builds such
an engine for runner.name=simulated."""

from qkv.simulation.build import SimulatedModel, assemble_simulated
from qkv.simulation.clock import SimulatedClock
from qkv.simulation.loop import SimulatedLoop

__all__ = ["SimulatedClock", "SimulatedLoop", "SimulatedModel", "assemble_simulated"]

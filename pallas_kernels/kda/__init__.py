"""Kimi Delta Attention: a recurrence with one decay per key channel and a delta-rule update."""

from pallas_kernels.kda.activate import l2_normalize
from pallas_kernels.kda.call import kda
from pallas_kernels.kda.context import plan_context
from pallas_kernels.kda.decode import KDAConv, kda_decode
from pallas_kernels.kda.gate import KDAGate, kda_gate
from pallas_kernels.kda.transition import compose_transitions, entering_states, kda_transition

__all__ = [
    "KDAConv",
    "KDAGate",
    "compose_transitions",
    "entering_states",
    "kda",
    "kda_decode",
    "kda_gate",
    "kda_transition",
    "l2_normalize",
    "plan_context",
]

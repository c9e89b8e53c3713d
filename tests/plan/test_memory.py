"""The plan's bytes against finished compilations of the whole training step of Kimi K3.

The figures are those of `python -m experiments.aot_training --level O1 --json FILE` with jax
0.10.2; "job": at a job's own optimization level. `tests/contracts/test_aot.py` compiles anew.
"""

import pytest

import meshes
from experiments.aot_training import MACHINES
from k3jax.config import K3Config
from k3jax.plan.local import Candidate
from k3jax.plan.search import Coster
from k3jax.plan.workload import Precision, Workload

# Machine of `experiments.aot_training`, level -> bytes of arguments and peak on one device.
FITTED = {
    ("v5p-512", "O1"): (43728621056, 95990322752),
    ("v5p-512", "job"): (43728621056, 101150599232),
    ("v5p-4096", "O1"): (12710075904, 56751227968),
    ("v5p-1024-tensor", "O1"): (22027337216, 43735736384),
    ("h200-1024", "O1"): (22392632952, 115659601683),
}
# Not used to fit anything.
UNSEEN = {
    ("v5p-2048", "O1"): (25282321920, 72500793920),
    ("v5p-1024-adamw", "O1"): (28117338624, 75027368032),
    ("v5p-1024-context", "O1"): (22124122624, 70974446656),
    ("tpu7x-512", "O1"): (22527562240, 67690178624),
    ("v5p-1024-tensor2", "O1"): (21942472192, 52182025792),
    ("h200-2048", "O1"): (25215717144, 116444158887),
}


@pytest.mark.parametrize(("machine", "level"), FITTED | UNSEEN)
def test_bytes_of_the_plan_are_the_compilers(machine, level):
    arguments, peak = (FITTED | UNSEEN)[machine, level]
    described = MACHINES[machine]
    optimizer = "adamw" if described.rule == "adamw" else "muon"
    work = Workload(
        cfg=K3Config.kimi_k3(),
        use="training",
        batch=described.batch,
        length=described.length,
        precision=Precision(optimizer=optimizer),
    )
    coster = Coster(work, meshes.hardware(described.chips))
    planned = coster.memory(coster.local(Candidate(shape=described.shape)))
    print(
        f"arguments {planned.arguments / arguments - 1:+.4%}, peak {planned.total / peak - 1:+.1%}"
    )
    assert abs(planned.arguments / arguments - 1) <= 0.005
    assert abs(planned.total / peak - 1) <= 0.10

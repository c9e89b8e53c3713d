"""The full-size model exists as shapes, quickly and in little memory."""

import json
import subprocess
import sys

PROGRAM = """
import json, pathlib, re, resource, time
import jax, k3jax
from k3jax.config import K3Config
k3jax.init  # import what it needs
cfg = K3Config.kimi_k3()
start = time.perf_counter()
model = jax.eval_shape(lambda key: k3jax.init(cfg, key), jax.random.key(0))
seconds = time.perf_counter() - start
count, text = (sum(leaf.size for leaf in jax.tree.leaves(m)) for m in (model, model.language))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
status = pathlib.Path("/proc/self/status")
if status.exists():  # ru_maxrss also counts what the parent held when it forked
    peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read_text())[1]) * 1024
print(json.dumps({"seconds": seconds, "count": count, "text": text, "peak_bytes": peak}))
"""


def test_released_model_is_built_abstractly_in_seconds_and_under_a_gigabyte():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    facts = json.loads(done.stdout)
    assert facts["text"] == 2_779_484_476_000
    assert facts["count"] - facts["text"] == 447_358_976  # vision tower and projector
    assert facts["seconds"] < 5
    assert facts["peak_bytes"] < 1e9

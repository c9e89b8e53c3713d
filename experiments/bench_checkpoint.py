"""Convert a synthetic checkpoint of 3 GB in the released layout, timed against plain copies.

    python -m experiments.bench_checkpoint                     # 3.2 GB, about 3 minutes
    python -m experiments.bench_checkpoint --gigabytes 0.3     # a quick look

Each part runs in a process of its own, several times in turns; medians count.

    copy              read, write and fsync of the files
    released          `k3jax convert --to hf`                  at least 0.5 of copy's speed
    load_save         `load_hf`, then `save_hf`                at least 0.5 of copy's speed
    orbax             a plain orbax save of the same arrays
    run               `k3jax convert --to run`                 at least 0.7 of orbax's speed

Memory is the peak resident size less that before, and for `load_save` less the arrays; the bound
is 1.3 x (largest variable + two shards). Expected on two CPU cores: every line "reached".
"""

import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import tyro

from k3jax.checkpoint.folder import INDEX
from k3jax.checkpoint.headers import NUMPY_TYPES, encode_header
from k3jax.checkpoint.names import placements, released_name
from k3jax.checkpoint.placement import Placement
from k3jax.checkpoint.stored_config import stored_config
from k3jax.config import K3Config, KDAConfig, MLAConfig, MoEConfig

PARTS = ("copy", "released", "load_save", "orbax", "run")
AGAINST = {"released": ("copy", 0.5), "load_save": ("copy", 0.5), "run": ("orbax", 0.7)}
MEMORY_FACTOR = 1.3


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What to measure."""

    gigabytes: float = 3.2
    """Size of the checkpoint (10^9 bytes)."""
    repeats: int = 3
    """Runs of each part."""
    shard_megabytes: float = 500
    """Size of a file of the checkpoint and of what is written."""
    folder: Path | None = None
    """Where to work, on the disk to measure; a temporary folder by default."""
    json: Path | None = None
    """Also write the numbers to this file."""
    part: str | None = None
    """Used by the processes that the benchmark starts."""


def synthetic(gigabytes: float) -> K3Config:
    """K3's proportions at a twelfth of its width: most bytes are packed experts."""
    expert = 3 * 640 * 704 * 17 // 32  # bytes: four bits a weight, and the scales
    num_layers = 13
    experts = max(8, int((gigabytes * 1e9 - 2.6e8) / expert / (num_layers - 1)) // 8 * 8)
    full = {*range(4, num_layers, 4), num_layers}
    return K3Config(
        vocab_size=32768,
        dim=1024,
        num_layers=num_layers,
        ffn_dim=4608,
        kda_layers=tuple(i for i in range(1, num_layers + 1) if i not in full),
        full_attention_layers=tuple(sorted(full)),
        kda=KDAConfig(num_heads=8, head_dim=128, gate_lower_bound=-5.0, full_rank_gate=True),
        mla=MLAConfig(
            num_heads=8,
            q_lora_rank=256,
            kv_lora_rank=128,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            output_gate=True,
        ),
        moe=MoEConfig(
            num_experts=experts,
            experts_per_token=8,
            num_shared_experts=2,
            expert_hidden_dim=640,
            latent_dim=704,
            latent_norm=True,
            first_dense_layers=1,
        ),
        activation="situ",
        situ_beta=4.0,
        situ_linear_beta=25.0,
        attention_residual_block=4,
    )


def write_synthetic(folder: Path, cfg: K3Config, shard_bytes: int) -> None:
    """Random bytes under the released names, written without the code that is measured."""
    folder.mkdir()
    random = np.random.default_rng(0)
    shards, size = [[]], 0
    for placement in placements(cfg, packed=True):
        if size + placement.num_bytes > shard_bytes and shards[-1]:
            shards.append([])
            size = 0
        shards[-1].append(placement)
        size += placement.num_bytes
    weight_map, total = {}, 0
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        shard.sort(key=lambda p: -NUMPY_TYPES[p.dtype].itemsize)
        with (folder / name).open("wb") as file:
            rows = [(released_name(cfg, p.released), p.dtype, p.shape) for p in shard]
            file.write(encode_header(rows))
            for placement in shard:
                file.write(_content(placement, random))
                total += placement.num_bytes
        weight_map |= {full: name for full, _, _ in rows}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))
    config = stored_config(cfg, packed=True, dtype=NUMPY_TYPES["BF16"])
    (folder / "config.json").write_text(json.dumps(config))


def _content(placement: Placement, random: np.random.Generator) -> bytes:
    if placement.layout == "decay":
        values = np.zeros(placement.shape, np.float32)
        values[: placement.num_heads] = 0.5
        return values.tobytes()
    if placement.released.endswith("_scale"):
        return random.integers(112, 128, placement.num_bytes, dtype=np.uint8).tobytes()
    if placement.dtype == "U8":
        return random.bytes(placement.num_bytes)
    numbers = random.random(placement.shape, dtype=np.float32) - 0.5
    return numbers.astype(NUMPY_TYPES[placement.dtype]).tobytes()


class PeakMemory:
    """The largest resident size while it runs, sampled every 5 ms."""

    def __enter__(self) -> "PeakMemory":
        self.before = self.peak = _resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.peak = max(self.peak, _resident())

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def added(self) -> int:
        """Bytes above those before."""
        return self.peak - self.before


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def run_part(name: str, source: Path, target: Path, shard_bytes: int) -> dict:
    """Seconds and bytes of memory of one part, in this process."""
    import jax

    from k3jax.checkpoint.convert import convert_hf
    from k3jax.checkpoint.hf import load_hf
    from k3jax.checkpoint.save import save_hf
    from k3jax.train.conversion import convert_hf_to_run

    jax.devices()  # starting the backend is not part of any of them
    held = 0
    arrays = None
    if name == "orbax":
        import orbax.checkpoint as ocp
        from flax import traverse_util

        from k3jax.nn.parameters import named_variables

        variables = named_variables(load_hf(source))
        arrays = traverse_util.unflatten_dict({n: v[...] for n, v in variables.items()}, sep=".")
    with PeakMemory() as memory:
        begin, cpu = time.perf_counter(), time.process_time()
        if name == "copy":
            target.mkdir()
            for file in source.iterdir():
                _copy(file, target / file.name)
        elif name == "released":
            convert_hf(source, target, shard_bytes=shard_bytes)
        elif name == "load_save":
            model = load_hf(source)
            held = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
            save_hf(model, target, shard_bytes=shard_bytes)
        elif name == "run":
            convert_hf_to_run(source, target)
        else:
            with ocp.StandardCheckpointer() as writer:
                writer.save(target.absolute(), arrays)
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu
    return {"seconds": seconds, "memory": memory.added - held, "cpu_seconds": cpu_seconds}


def _copy(source: Path, target: Path) -> None:
    with source.open("rb", buffering=0) as read, target.open("wb", buffering=0) as written:
        buffer = memoryview(bytearray(1 << 24))
        while count := read.readinto(buffer):
            written.write(buffer[:count])
        os.fsync(written.fileno())


def largest_variable(cfg: K3Config) -> int:
    """Bytes of the largest stacked variable, all of which one device holds here."""
    sizes: dict[str, int] = {}
    for placement in placements(cfg, packed=True):
        sizes[placement.variable] = sizes.get(placement.variable, 0) + placement.num_bytes
    return max(sizes.values())


def measure(config: BenchConfig, work: Path) -> dict:
    """All parts, in turns."""
    cfg = synthetic(config.gigabytes)
    shard_bytes = int(config.shard_megabytes * 1e6)
    source = work / "source"
    write_synthetic(source, cfg, shard_bytes)
    size = sum(file.stat().st_size for file in source.iterdir())
    found: dict[str, list[dict]] = {part: [] for part in PARTS}
    for _ in range(config.repeats):
        for part in PARTS:
            command = [sys.executable, "-m", "experiments.bench_checkpoint", "--part", part]
            command += ["--folder", str(work), "--shard-megabytes", str(config.shard_megabytes)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[part].append(json.loads(done.stdout.splitlines()[-1]))
            shutil.rmtree(work / "target", ignore_errors=True)
    speeds = {part: size / 1e9 / statistics.median(r["seconds"] for r in runs)
              for part, runs in found.items()}  # fmt: skip
    memory = {part: max(r["memory"] for r in runs) for part, runs in found.items()}
    bound = MEMORY_FACTOR * (largest_variable(cfg) + 2 * shard_bytes)
    return {
        "bytes": size,
        "gigabytes_per_second": speeds,
        "memory": memory,
        "memory_bound": bound,
        "runs": found,
    }


def show(result: dict) -> None:
    """Print a line per part."""
    speeds = result["gigabytes_per_second"]
    print(f"{result['bytes'] / 1e9:.2f} GB; memory bound {result['memory_bound'] / 1e9:.2f} GB")
    for part, speed in speeds.items():
        line = f"{part:10} {speed:5.2f} GB/s   memory {result['memory'][part] / 1e9:5.2f} GB"
        if part in AGAINST:
            other, least = AGAINST[part]
            ratio = speed / speeds[other]
            is_fine = ratio >= least and result["memory"][part] <= result["memory_bound"]
            verdict = "reached" if is_fine else "MISSED"
            line += f"   {ratio:.2f} of {other} (at least {least}): {verdict}"
        print(line)


def main() -> None:
    config = tyro.cli(BenchConfig, description=__doc__)
    if config.part is not None:
        shard_bytes = int(config.shard_megabytes * 1e6)
        work = config.folder
        print(json.dumps(run_part(config.part, work / "source", work / "target", shard_bytes)))
        return
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=config.folder) as work:
        result = measure(config, Path(work))
    show(result)
    if config.json:
        config.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Tests compile many small programs: quick compilation matters more there than fast code, and what one process has
compiled, the others and the next run load."""

import gc
import os
import pathlib

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[1] / ".pytest_cache" / "xla"))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
gc.set_threshold(200_000, 20, 100)  # Tracing makes many objects that stay: looking through all of them so often took 7 % of the time.

"""What a feature cache would cost, before anything is written: bytes a token, total size, hours; and what its alternatives do.

  python -m experiments.plan_cache --config=configs/qwen3_4b/cache.py
"""

from absl import app
from rich import console as rich_console
from rich import table as rich_table

from experiments import common
from specdec_jax.data.feature_cache import STORED, bytes_per_token


def plan(config) -> list[dict]:
  """One row a way of having features: bytes a token, bytes in all, hours to write, hours of target passes over all epochs."""
  forward = 2 * config.target_parameters * config.tokens / (config.accelerators * config.flops * config.utilisation) / 3600
  rows = []
  for dtype in STORED:
    size = bytes_per_token(config.width, config.taps, dtype) * config.tokens
    rows.append({
        "features": f"cached, {dtype}", "bytes_per_token": bytes_per_token(config.width, config.taps, dtype), "bytes": size,
        "write_hours": size / config.disk_bytes_per_s / 3600, "target_hours": forward})
  rows.append({"features": "on the fly", "bytes_per_token": 0, "bytes": 0, "write_hours": 0.0, "target_hours": forward * config.epochs})
  return rows


def main(argv):
  del argv
  config, _ = common.settings()
  shown = rich_table.Table(
      title=f"{config.target}: {config.taps} taps of {config.width}, {config.tokens:.3g} tokens, {config.epochs} epochs")
  for title in ("features", "bytes a token", "TB in all", "hours to write", "hours of target passes"):
    shown.add_column(title)
  for row in plan(config):
    shown.add_row(
        row["features"], f"{row['bytes_per_token']:,}", f"{row['bytes'] / 1e12:.2f}",
        f"{row['write_hours']:.1f}", f"{row['target_hours']:.1f}")
  rich_console.Console(width=110).print(shown)


if __name__ == "__main__":
  common.define("configs/qwen3_4b/cache.py")
  app.run(main)

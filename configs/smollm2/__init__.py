"""What the evaluations of SmolLM2-135M-Instruct share: its system prompt, its drafters and the sets of prompts."""

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
METHODS = ("mtp", "eagle3", "dflash", "dspark", "dflash2", "hybrid")
SETS = ("gsm8k", "math500", "aime25", "mbpp", "humaneval", "livecodebench", "mt-bench", "arena-hard-v2")


def folder(method: str) -> str:
  """Where the training of a drafter leaves it."""
  return f"runs/smollm2_{method}/{method}"


def prompts(folder: str = "eval_datasets") -> dict[str, str]:
  """Prompt files by set: {"turns": [first user turn, …]} a line."""
  return {name: f"{folder}/{name}.jsonl" for name in SETS}

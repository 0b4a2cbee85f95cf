"""Text to token ids and back, with the chat template that belongs to the tokenizer."""

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import jinja2
import jinja2.sandbox
import tokenizers

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """A `tokenizers` tokenizer, its chat template (jinja source, or None) and the special tokens that the template names."""

  backend: tokenizers.Tokenizer
  chat_template: str | None = None
  special: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def encode(self, text: str) -> list[int]:
    """Token ids; special tokens spelled out in the text are recognised, none is added."""
    return self.backend.encode(text, add_special_tokens=False).ids

  def decode(self, ids: Sequence[int]) -> str:
    """The text of token ids, special tokens left out."""
    return self.backend.decode(list(ids), skip_special_tokens=True)

  @functools.cached_property
  def vocab(self) -> int:
    """One more than the largest id."""
    return 1 + max(self.backend.get_vocab(with_added_tokens=True).values())

  def id(self, token: str) -> int:
    """The id of one token by its spelling."""
    found = self.backend.token_to_id(token)
    if found is None:
      raise KeyError(f"the tokenizer has no token {token!r}")
    return found

  def chat(self, turns: Sequence[Mapping[str, str]], add_generation_prompt: bool = True, **options) -> str:
    """The text of a conversation, as the model's chat template writes it. turns: {"role", "content"} each."""
    if self.chat_template is None:
      raise ValueError("this tokenizer has no chat template; give prompts as plain text or token ids")
    return _template(self.chat_template).render(
        messages=turns, add_generation_prompt=add_generation_prompt, **self.special, **options)

  def fingerprint(self) -> str:
    """A hash of every (token, id) pair and of the template: two tokenizers with swapped ids differ."""
    vocabulary = sorted(self.backend.get_vocab(with_added_tokens=True).items())
    return hashlib.sha256(json.dumps([vocabulary, self.chat_template]).encode()).hexdigest()[:16]

  def save(self, folder: pathlib.Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    self.backend.save(str(folder / "tokenizer.json"))
    config = {**self.special, "chat_template": self.chat_template, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_tokenizer(folder: pathlib.Path) -> Tokenizer | None:
  """The tokenizer of a published folder, or None where it has no tokenizer.json.

  The template comes from tokenizer_config.json or chat_template.jinja.
  """
  path = folder / "tokenizer.json"
  if not path.exists():
    return None
  config = {}
  if (folder / "tokenizer_config.json").exists():
    config = json.loads((folder / "tokenizer_config.json").read_text())
  template = config.get("chat_template")
  if isinstance(template, list):  # Several named templates: the default one is for chat.
    template = {t["name"]: t["template"] for t in template}.get("default")
  if template is None and (folder / "chat_template.jinja").exists():
    template = (folder / "chat_template.jinja").read_text()
  spelled = {
      k: v["content"] if isinstance(v, dict) else v
      for k, v in config.items() if k in ("bos_token", "eos_token", "pad_token", "unk_token") and v}
  return Tokenizer(tokenizers.Tokenizer.from_file(str(path)), template, spelled)


@functools.lru_cache(maxsize=32)
def _template(source: str) -> jinja2.Template:
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
  environment.filters["tojson"] = lambda x, **kw: json.dumps(x, ensure_ascii=False, **kw)

  def refuse(message):
    raise ValueError(f"the chat template refuses this conversation: {message}")

  environment.globals["raise_exception"] = refuse
  return environment.from_string(source)


def train_bpe(texts: Iterable[str], vocab: int) -> Tokenizer:
  """A byte-level BPE of exactly `vocab` tokens, with single digits, the ChatML tokens and a mask token."""
  backend = tokenizers.Tokenizer(tokenizers.models.BPE())
  pre = tokenizers.pre_tokenizers
  backend.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)])
  backend.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
      vocab_size=vocab, special_tokens=list(SPECIAL), initial_alphabet=pre.ByteLevel.alphabet(), show_progress=False)
  backend.train_from_iterator(texts, trainer)
  return Tokenizer(backend, CHATML, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})

"""How published tensors map to parameter trees, written once and used for loading, saving and gradients."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from specdec_jax.config import DrafterConfig, ModelConfig, SerialConfig


class TensorError(ValueError):
  """Missing, extra or mis-shaped tensors; the message lists their names."""


@dataclasses.dataclass(frozen=True)
class Entry:
  """One parameter: its path, the published tensors that it is made of, and their shapes.

  outputs: output axes of a kernel as published, split into the axes used here; None for a tensor that is kept as it is.
  stack: where several published tensors meet, the axis of the output axes that counts them.
  """

  path: tuple[str, ...]
  names: tuple[str, ...]
  shape: tuple[int, ...]  # of each published tensor
  outputs: tuple[int, ...] | None = None
  stack: int = 0

  def parameter_shape(self, transposed: bool) -> tuple[int, ...]:
    """The shape that `join` gives."""
    if self.outputs is None:
      return self.shape
    outputs, inputs = list(self.outputs), self.shape[1:]
    if len(self.names) > 1:
      outputs.insert(self.stack, len(self.names))
    return (*outputs, *inputs) if transposed or not inputs else (*inputs, *outputs)

  def join(self, tensors: list[np.ndarray], transposed: bool) -> np.ndarray:
    """Published tensors → the parameter."""
    if self.outputs is None:
      return tensors[0]
    inputs = self.shape[1:]  # Empty for a bias.
    parts = [t.reshape(*self.outputs, *inputs) for t in tensors]
    whole = np.stack(parts, self.stack) if len(parts) > 1 else parts[0]
    return whole if transposed or not inputs else np.moveaxis(whole, -1, 0)

  def parameter(self, transposed: bool) -> tuple[int, ...]:
    """The shape of the parameter."""
    if self.outputs is None:
      return self.shape
    outputs, inputs = list(self.outputs), self.shape[1:]
    if len(self.names) > 1:
      outputs.insert(self.stack, len(self.names))
    return (*outputs, *inputs) if transposed else (*inputs, *outputs)

  def part(self, index: tuple[slice, ...], read: Callable[[str, tuple[slice, ...]], np.ndarray], transposed: bool) -> np.ndarray:
    """The part `index` of the parameter; read(name, index) gives a part of a published tensor."""
    if self.outputs is None:
      return read(self.names[0], index)
    index, kernel = list(index), len(self.shape) > 1
    inputs = (index.pop(-1 if transposed else 0),) if kernel else ()
    picked = range(*index.pop(self.stack).indices(len(self.names))) if len(self.names) > 1 else (0,)
    start, stop, _ = index[0].indices(self.outputs[0])
    inner = int(np.prod(self.outputs[1:]))
    rows = lambda name: read(name, (slice(start * inner, stop * inner), *inputs))
    split = lambda x: x.reshape(stop - start, *self.outputs[1:], *x.shape[1:])[(slice(None), *index[1:])]
    parts = [split(rows(self.names[i])) for i in picked]
    whole = np.stack(parts, self.stack) if len(self.names) > 1 else parts[0]
    return whole if transposed or not kernel else np.moveaxis(whole, -1, 0)

  def split(self, parameter: np.ndarray, transposed: bool) -> list[np.ndarray]:
    """The parameter → published tensors."""
    if self.outputs is None:
      return [parameter]
    whole = parameter if transposed or len(self.shape) == 1 else np.moveaxis(parameter, 0, -1)
    parts = [np.take(whole, i, self.stack) for i in range(len(self.names))] if len(self.names) > 1 else [whole]
    return [np.ascontiguousarray(p).reshape(self.shape) for p in parts]


def layer_entries(c: ModelConfig, prefix: str, path: tuple[str, ...], inputs: int = 0, recurrent: bool = False) -> list[Entry]:
  """The entries of one layer under `prefix`; inputs: what its attention reads, the model's width where 0; recurrent: whether a
  gated delta net stands in the place of attention."""
  inputs = inputs or c.width
  head = c.head_dim
  out = []

  def linear(where: tuple[str, ...], names: tuple[str, ...], outputs: tuple[int, ...], inputs: int, stack: int, bias: bool):
    names = tuple(prefix + n for n in names)
    size = int(np.prod(outputs))
    out.append(Entry((*path, *where, "kernel"), tuple(n + ".weight" for n in names), (size, inputs), outputs, stack))
    if bias:
      out.append(Entry((*path, *where, "bias"), tuple(n + ".bias" for n in names), (size,), outputs, stack))

  def norm(where: tuple[str, ...], name: str, size: int):
    out.append(Entry((*path, *where, "scale"), (f"{prefix}{name}.weight",), (size,)))

  norm(("attention_norm",), "input_layernorm", c.width)
  if c.sandwich:
    norm(("attention_out_norm",), "post_attention_layernorm", c.width)
    norm(("mlp_norm",), "pre_feedforward_layernorm", c.width)
    norm(("mlp_out_norm",), "post_feedforward_layernorm", c.width)
    out.append(Entry((*path, "scalar"), (f"{prefix}layer_scalar",), (1,)))
  else:
    norm(("mlp_norm",), "post_attention_layernorm", c.width)
  linear(("mlp", "gate_up"), ("mlp.gate_proj", "mlp.up_proj"), (c.mlp,), c.width, 0, c.mlp_bias)
  linear(("mlp", "down"), ("mlp.down_proj",), (c.width,), c.mlp, 0, c.mlp_bias)
  if recurrent:
    d, name, at = c.delta, "linear_attn.", (*path, "attention")
    linear(("attention", "qkv"), (name + "in_proj_qkv",), (d.channels,), c.width, 0, False)
    linear(("attention", "z"), (name + "in_proj_z",), (d.value_heads, d.value_dim), c.width, 0, False)
    linear(("attention", "gates"), (name + "in_proj_b", name + "in_proj_a"), (d.value_heads,), c.width, 1, False)
    linear(("attention", "o"), (name + "out_proj",), (c.width,), d.value_heads * d.value_dim, 0, False)
    norm(("attention", "norm"), name + "norm", d.value_dim)
    return [*out, Entry((*at, "taps"), (f"{prefix}{name}conv1d.weight",), (d.channels, 1, d.conv)),
            *(Entry((*at, mine), (f"{prefix}{name}{theirs}",), (d.value_heads,))
              for mine, theirs in (("rate", "A_log"), ("shift", "dt_bias")))]
  linear(("attention", "q"), ("self_attn.q_proj",), (c.kv_heads, c.groups, *((2,) if c.gated else ()), head), inputs, 0, c.attention_bias)
  if c.shared_kv:
    linear(("attention", "k"), ("self_attn.k_proj",), (c.kv_heads, head), inputs, 0, c.attention_bias)
  else:
    linear(("attention", "kv"), ("self_attn.k_proj", "self_attn.v_proj"), (c.kv_heads, head), inputs, 1, c.attention_bias)
  linear(("attention", "o"), ("self_attn.o_proj",), (c.width,), c.heads * head, 0, c.attention_bias)
  if c.qk_norm:
    norm(("attention", "q_norm"), "self_attn.q_norm", head)
    norm(("attention", "k_norm"), "self_attn.k_norm", head)
  return out


def decoder_entries(c: ModelConfig) -> list[Entry]:
  """A checkpoint of any family; layers stand under ("layers", "0") … until `stack_layers`."""
  out = [Entry(("embedding",), ("model.embed_tokens.weight",), (c.vocab, c.width)),
         Entry(("final_norm", "scale"), ("model.norm.weight",), (c.width,))]
  if not c.tied:
    out.append(Entry(("head", "kernel"), ("lm_head.weight",), (c.vocab, c.width)))
  for i in range(c.layers):
    out += layer_entries(c.layer(i), f"model.layers.{i}.", ("layers", str(i)), recurrent=i in c.recurrent)
  return out


def drafter_entries(c: DrafterConfig | SerialConfig) -> list[Entry]:
  """The tensors of a drafter of any kind."""
  return serial_entries(c) if isinstance(c, SerialConfig) else block_entries(c)


def serial_entries(c: SerialConfig) -> list[Entry]:
  """An EAGLE-3 drafter in DeepSpec's layout (RELEASED_FORMATS §1.2), and MTP in the same spelling."""
  m, eagle = c.model, c.kind == "eagle3"
  rows = c.draft_vocab or m.vocab
  fused = len(c.taps) * m.width if eagle else 2 * m.width
  out = [
      Entry(("fuse", "kernel"), ("fc.weight",), (m.width, fused), (m.width,)),
      Entry(("final_norm", "scale"), ("norm.weight",), (m.width,))]
  if c.own_embedding:
    out += [
        Entry(("embedding",), ("embed_tokens.weight",), (m.vocab, m.width)),
        Entry(("head", "kernel"), ("lm_head.weight",), (rows, m.width))]
  if c.draft_vocab:
    out.append(Entry(("draft_ids",), ("d2t",), (rows,)))
  names = {
      "embedding_norm": "input_layernorm" if eagle else "embedding_layernorm", "hidden_norm": "hidden_norm",
      "mlp_norm": "post_attention_layernorm"}
  if not eagle:
    names["attention_norm"] = "input_layernorm"
  out += [Entry((mine, "scale"), (f"layers.0.{theirs}.weight",), (m.width,)) for mine, theirs in names.items()]
  inner = layer_entries(m, "layers.0.", (), 2 * m.width if eagle else m.width)
  return out + [e for e in inner if e.path[0] in ("attention", "mlp")]


def block_entries(c: DrafterConfig) -> list[Entry]:
  """A block drafter (RELEASED_FORMATS §1.2, §2): no prefix, copies of embedding and head only in DeepSpec's layout."""
  m = c.model
  out = [Entry(("fuse", "kernel"), ("fc.weight",), (m.width, len(c.taps) * m.width), (m.width,)),
         Entry(("fuse_norm", "scale"), ("hidden_norm.weight",), (m.width,)),
         Entry(("final_norm", "scale"), ("norm.weight",), (m.width,))]
  if c.own_embedding:
    out += [Entry(("embedding",), ("embed_tokens.weight",), (m.vocab, m.width)),
            Entry(("head", "kernel"), ("lm_head.weight",), (m.vocab, m.width))]
  for i in range(m.layers):
    out += layer_entries(m.layer(i), f"layers.{i}.", (f"layers_{i}",))
    if c.conv:
      out += _conv_entries(c, i)
  return out + _head_entries(c)


def _conv_entries(c: DrafterConfig, layer: int) -> list[Entry]:
  width, groups = c.model.width, c.model.width // c.conv_group
  out = []
  for name in ("attention_conv", "mlp_conv"):
    at, prefix = (f"layers_{layer}", name), f"layers.{layer}.{name}."
    out += [Entry((*at, "base"), (prefix + "base_kernel",), (2, c.conv, width)),
            Entry((*at, "dynamic", "kernel"), (prefix + "kernel_projection.weight",), (2 * c.conv * groups, width), (2, c.conv, groups))]
  return out


def _head_entries(c: DrafterConfig) -> list[Entry]:
  m, r = c.model, c.rank
  out = []
  if c.head == "selector":
    name = "candidate_selector."
    out += [Entry(("selector", "predecessor"), (name + "predecessor_codebook",), (m.vocab, r)),
            Entry(("selector", "successor"), (name + "successor_codebook",), (m.vocab, r)),
            Entry(("selector", "gate", "kernel"), (name + "hidden_projection.weight",), (r, m.width), (r,))]
  elif c.head != "none":
    out += [Entry(("markov", "previous"), ("markov_head.markov_w1.weight",), (m.vocab, r)),
            Entry(("markov", "bias"), ("markov_head.markov_w2.weight",), (m.vocab, r))]
  if c.head == "gated":
    out += [Entry(("markov", "gate", "kernel"), ("markov_head.gate_proj.weight",), (r, m.width + r), (r,)),
            Entry(("markov", "gate", "bias"), ("markov_head.gate_proj.bias",), (r,))]
  if c.head == "rnn":
    out += [Entry(("markov", "joint", "kernel"), ("markov_head.joint_proj.weight",), (3 * r, 2 * r + m.width), (3, r)),
            Entry(("markov", "joint", "bias"), ("markov_head.joint_proj.bias",), (3 * r,), (3, r))]
  if c.confidence:
    inputs = m.width + (r if c.confidence_with_head else 0)
    out += [Entry(("confidence", "kernel"), ("confidence_head.proj.weight",), (1, inputs)),
            Entry(("confidence", "bias"), ("confidence_head.proj.bias",), (1,))]
  return out


def build(
    entries: Iterable[Entry], shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], np.ndarray], transposed: bool,
) -> dict[str, Any]:
  """The parameter tree from published tensors: `shapes` are all there are, `read(name)` gives one. Raises as `check`."""
  entries = list(entries)
  check(entries, shapes)
  tree: dict[str, Any] = {}
  for e in entries:
    place(tree, e.path, e.join([read(n) for n in e.names], transposed))
  return tree


def check(entries: Iterable[Entry], shapes: Mapping[str, tuple[int, ...]]) -> None:
  """Raises TensorError that lists every missing, extra and mis-shaped name."""
  wanted = {name: e.shape for e in entries for name in e.names}
  faults = [f"missing: {', '.join(sorted(wanted.keys() - shapes.keys()))}"] if wanted.keys() - shapes.keys() else []
  if shapes.keys() - wanted.keys():
    faults.append(f"extra: {', '.join(sorted(shapes.keys() - wanted.keys()))}")
  wrong = [
      f"{n} is {tuple(shapes[n])}, expected {wanted[n]}"
      for n in sorted(wanted.keys() & shapes.keys()) if tuple(shapes[n]) != wanted[n]]
  faults += [f"mis-shaped: {'; '.join(wrong)}"] if wrong else []
  if faults:
    raise TensorError("the checkpoint does not match its config.json: " + " | ".join(faults))


def take_apart(entries: Iterable[Entry], params: Mapping[str, Any], transposed: bool = False) -> dict[str, np.ndarray]:
  """Published tensors from a parameter tree; works on gradients as well."""
  out = {}
  for e in entries:
    value = params
    for key in e.path:
      value = value[key]
    out.update(zip(e.names, e.split(np.asarray(value), transposed)))
  return out


def place(tree: dict[str, Any], path: tuple[str, ...], value) -> None:
  """Sets tree[path[0]][path[1]]… = value, making the levels between."""
  for key in path[:-1]:
    tree = tree.setdefault(key, {})
  tree[path[-1]] = value


def stack_layers(params: dict[str, Any]) -> dict[str, Any]:
  """{"layers": {"0": …, "1": …}} → {"layers": stacked}, the form that `lax.scan` runs over."""
  layers = params["layers"]
  return {**params, "layers": jax.tree.map(lambda *x: np.stack(x), *(layers[str(i)] for i in range(len(layers))))}

"""Packaging: `specdec_jax`, with the top-level `kernels` folder as `specdec_jax.kernels`."""

import pathlib

import setuptools

ROOT = pathlib.Path(__file__).parent

setuptools.setup(
    name="specdec_jax",
    version="0.1.0",
    description="Lossless speculative decoding in JAX: drafters, exact verification, training and measurement",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[
        *setuptools.find_packages(include=["specdec_jax", "specdec_jax.*"]), "specdec_jax.kernels",
        *(f"specdec_jax.kernels.{name}" for name in setuptools.find_packages("kernels"))],
    package_dir={"specdec_jax.kernels": "kernels"},
    package_data={"specdec_jax": ["assets/**/*"]},
    install_requires=[
        "jax>=0.10", "flax>=0.12", "optax>=0.2.5", "orbax-checkpoint>=0.11", "absl-py>=2", "ml_collections>=1", "numpy>=2",
        "ml_dtypes>=0.5", "tensorflow-datasets>=4.9.9", "array_record>=0.8", "grain>=0.2.12", "safetensors>=0.5",
        "tokenizers>=0.21", "jinja2>=3.1", "matplotlib>=3.9", "rich>=13.9", "tensorboardX>=2.6", "importlib_resources>=6",
    ],
    extras_require={
        "dev": ["pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6", "chex>=0.1.89", "ruff>=0.9"],
        "gguf": ["gguf>=0.17"],
        "transformers": ["torch>=2.5", "transformers>=5"],
        "hub": ["huggingface_hub>=0.30"],
        "notebooks": ["nbclient>=0.10", "ipykernel>=6"],
        "tpu": ["jax[tpu]>=0.10"],
        "cuda13": ["jax[cuda13]>=0.10"],
        "aot": ["jax[tpu,cuda13-local]>=0.10", "nvidia-cuda-nvcc>=13", "flatbuffers>=24"],
    },
)

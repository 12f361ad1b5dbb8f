"""Makes the checkpoints that engines are compared on: one and the same bfloat16 weights as a folder and as GGUF.

    python -m bench.checkpoint OUT                   OUT and OUT.gguf of the bundled model, dequantised
    python -m bench.checkpoint OUT --random          the same of a random model of Llama-3.2-1B's shape
    python -m bench.checkpoint OUT --random hidden_size=256 ...   fields of its config.json changed

Needs transformers (for the first) and gguf. The random model has the bundled one's tokenizer.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from services.worker import loader
from services.worker.models import decoder_spec
from services.worker.models.names import GGUF_NAMES, HF_NAMES, checkpoint_names
from shared.hub import resolve
from shared.model_config import read_config

LLAMA_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
DEVIATION = 0.02


def bundled_folder(folder: Path) -> None:
    """The bundled GGUF model dequantised to bfloat16, as transformers would save it."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    source = resolve("")
    dense = GgufConfig(dequantize=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16, quantization_config=dense
    )
    model.save_pretrained(folder)
    bundled_tokenizer(folder)


def bundled_tokenizer(folder: Path) -> None:
    """The bundled model's tokenizer, without the model."""
    from transformers import AutoTokenizer

    source = resolve("")
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def random_folder(folder: Path, changes: Mapping[str, Any], tokenizer: Path) -> None:
    """A random Llama with the tokenizer of another folder."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_1B | dict(changes), indent=1))
    for name in FILES:
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, folder / name)
    config = read_config(folder)
    shapes = decoder_spec(config, config.max_position).weight_shapes()
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, canonical in checkpoint_names(shapes, HF_NAMES).items():
        tensor = torch.ones(shapes[canonical], dtype=torch.bfloat16)
        tensors[name] = tensor if tensor.ndim == 1 else tensor.normal_(0, DEVIATION, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_gguf(folder: Path, file: Path, tokenizer: Path) -> None:
    """A bfloat16 Llama's folder as llama.cpp's converter would write it, with the tokens of the GGUF `tokenizer`."""
    import gguf

    config = read_config(folder)
    spec = decoder_spec(config, config.max_position)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(spec.max_position)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_freq_base(_rope_base(json.loads((folder / "config.json").read_text())))
    writer.add_rope_dimension_count(spec.rope.dim)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    _copy_tokenizer(writer, gguf.GGUFReader(tokenizer), spec.vocab_size)
    heads = {"q": spec.num_heads, "k": spec.num_kv_heads}
    names = {canonical: name for name, canonical in checkpoint_names(spec.weight_shapes(), GGUF_NAMES).items()}
    for canonical, bits in loader.weights(folder, spec):
        values = np.asarray(bits)
        part = canonical.rsplit(".", 2)[-2]
        if values.ndim == 1:
            writer.add_tensor(names[canonical], (values.astype(np.uint32) << 16).view(np.float32))
            continue
        rows = _interleaved(values, heads[part]) if part in heads else values
        raw = np.ascontiguousarray(rows).view(np.uint8)
        writer.add_tensor(names[canonical], raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rope_base(config: Mapping[str, Any]) -> float:
    return float((config.get("rope_parameters") or config)["rope_theta"])


def _copy_tokenizer(writer: Any, reader: Any, vocab_size: int) -> None:
    """The tokenizer's fields, its vocabulary filled up with tokens that nothing encodes to."""
    import gguf

    for field in reader.fields.values():
        if not field.name.startswith("tokenizer."):
            continue
        value, kind = field.contents(), field.types[0]
        if field.name == "tokenizer.ggml.tokens":
            value = value + [f"[PAD{i}]" for i in range(len(value), vocab_size)]
        if field.name == "tokenizer.ggml.token_type":
            value = value + [int(gguf.TokenType.UNUSED)] * (vocab_size - len(value))
        writer.add_key_value(field.name, value, kind, field.types[1] if kind == gguf.GGUFValueType.ARRAY else None)


def _interleaved(rows: Any, heads: int) -> Any:
    """The row order of llama.cpp's rotary kernel (`permute` of its convert_hf_to_gguf.py)."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes both forms."""
    parser = argparse.ArgumentParser(prog="python -m bench.checkpoint", description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--random", nargs="*", metavar="FIELD=VALUE", help="a random model of Llama-3.2-1B's shape")
    args = parser.parse_args(argv)
    if args.random is None:
        bundled_folder(args.out)
    else:
        changes = {key: json.loads(value) for key, _, value in (word.partition("=") for word in args.random)}
        vocabulary = args.out.with_name(args.out.name + "-tokenizer")
        bundled_tokenizer(vocabulary)
        random_folder(args.out, changes, vocabulary)
        shutil.rmtree(vocabulary)
    write_gguf(args.out, args.out.with_name(args.out.name + ".gguf"), resolve(""))
    print(f"{args.out}\n{args.out}.gguf")
    return 0


if __name__ == "__main__":
    sys.exit(main())

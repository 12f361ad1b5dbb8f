"""Fields that clients of other engines send, that would change the output, and that are not built: refused by name.

Silence here would be a lie: a client that asks for a JSON schema and gets free text has no way to notice. Each field
lists the values, besides null and empty ones, that change nothing and are let through. Fields neither here nor in a
request's struct are ignored, as OpenAI's SDK adds new ones all the time.
"""

from __future__ import annotations

from typing import Any

import msgspec

from services.api.body import parse
from services.api.errors import not_supported

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": (),
    "custom_logit_processor": (),
    "custom_params": (),
    "documents": (),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "ebnf": (),
    "echo": (False,),
    "frequency_penalty": (0,),
    "grammar": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_json_object": (False,),
    "guided_regex": (),
    "json_schema": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logit_bias": (),
    "logits_processors": (),
    "logprob_token_ids": (),
    "logprobs": (False,),
    "lora_name": (),
    "lora_path": (),
    "min_new_tokens": (0,),
    "mirostat": (0,),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "presence_penalty": (0,),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "regex": (),
    "repetition_detection": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "session_params": (),
    "stop_regex": (),
    "structural_tag": (),
    "structured_outputs": (),
    "suffix": ("",),
    "t_max_predict_ms": (-1, 0),
    "tfs_z": (1,),
    "thinking_token_budget": (),
    "top_a": (0,),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "vllm_xargs": (),
    "web_search_options": (),
    "xtc_probability": (0,),
}

_Fields = msgspec.defstruct("_Fields", [(name, Any, None) for name in NEUTRAL])
_NONE = _Fields()
_decoder = msgspec.json.Decoder(_Fields)


def refuse_unbuilt(body: bytes) -> None:
    """Raises RequestError (code not_supported) for the first field that asks for what is not built."""
    fields = parse(_decoder, body)
    if fields == _NONE:
        return
    for name, neutral in NEUTRAL.items():
        value = getattr(fields, name)
        if value is not None and not _changes_nothing(value, neutral):
            raise not_supported(name)


def _changes_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    if value == [] or value == {}:
        return True
    # 0 and False are equal in Python; `logprobs: 0` asks for something, `logprobs: false` does not
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)

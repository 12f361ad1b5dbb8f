"""Model families as data: from a configuration to a `DecoderSpec`, from a checkpoint's tensor names to ours."""

from services.worker.models.families import FAMILIES, decoder_spec
from services.worker.models.names import GGUF_NAMES, HF_NAMES, checkpoint_names

__all__ = ["FAMILIES", "GGUF_NAMES", "HF_NAMES", "checkpoint_names", "decoder_spec"]

